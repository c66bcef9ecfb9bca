import pytest

from knit.config.load import load, recipe_names, to_yaml, with_values
from knit.errors import ConfigError

TWO_SOURCES = """
steps: 7
sources:
- {name: spell, ratio: 0.3, reward: 'os.path:join'}
- {name: gcd, reward: 'os.path:join'}
batch: {size: '${steps}'}
"""


@pytest.fixture
def recipe(tmp_path):
    """``recipe=FILE`` of a YAML file of the user's, with two sources."""
    path = tmp_path / "mine.yaml"
    path.write_text(TWO_SOURCES)
    return f"recipe={path}"


def message(*overrides):
    with pytest.raises(ConfigError) as error:
        load(overrides)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_arguments_the_defaults_hold():
    conf = load()
    assert (conf.recipe_name, conf.batch.size, conf.sources) == ("custom", 256, [])


def test_a_recipe_is_chosen_by_name_and_overridden(quickstart):
    conf = load(["recipe=quickstart", "batch.size=64", "seed=3"])
    assert "quickstart" in recipe_names()
    assert (conf.recipe_name, conf.batch.size, conf.seed) == ("quickstart", 64, 3)
    assert conf.batch.group_size == quickstart.batch.group_size
    assert [s.name for s in conf.sources] == ["spell", "sort", "gcd", "count"]


def test_a_recipe_may_be_a_file_and_build_on_another(tmp_path, recipe):
    conf = load([recipe])
    assert (conf.recipe_name, conf.steps, conf.batch.size) == ("mine", 7, 7)
    (tmp_path / "other.yaml").write_text("defaults: [quickstart]\nsteps: 3\n")
    conf = load([f"recipe={tmp_path}/other.yaml"])
    assert (conf.recipe_name, conf.steps, len(conf.sources)) == ("other", 3, 4)


def test_sources_are_addressed_by_name_or_position(recipe):
    conf = load([recipe, "sources.gcd.ratio=0.5", "sources.0.ratio=0.25", "sources.gcd.options.depth=3"])
    assert [s.ratio for s in conf.sources] == [0.25, 0.5]
    assert conf.sources[1].options == {"depth": 3}
    assert message(recipe, "sources.gdc.ratio=1") == (
        "sources.gdc.ratio: gdc is not one of the sources; there are: spell, gcd"
    )


def test_a_list_given_whole_replaces_the_recipes(recipe):
    conf = load([recipe, "sources=[{name: new, reward: 'a:b'}]"])
    assert [s.name for s in conf.sources] == ["new"]
    assert message(recipe, "sources=[{name: new}]") == "sources.0.reward is not set"


def test_raw_mappings_take_any_key():
    conf = load(["engine.extra.attention_backend=fa3", "+engine.extra.b=2", "parallel.megatron={bias_dropout: true}"])
    assert conf.engine.extra == {"attention_backend": "fa3", "b": 2}
    assert conf.parallel.megatron == {"bias_dropout": True}


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("batch.sise", "batch.size"),
        ("bach.size", "batch.size"),
        ("lr", "optim.lr"),
        ("train.lr", "optim.lr"),
        ("rollout.max_response_token", "rollout.max_response_tokens"),
        ("step", "steps"),
        ("sources.spell.rato", "sources.spell.ratio"),
        ("sources.0.rato", "sources.0.ratio"),
        ("eval.sources.x.rewad", "eval.sources.x.reward"),
        ("batch.size.x", "batch.size"),
    ],
)
def test_a_misspelt_key_is_refused_with_the_nearest(key, near):
    assert message(f"{key}=1") == f"{key} is not a setting; did you mean {near}?"


def test_a_key_like_no_other_is_told_what_there_is():
    assert message("sync.zzz=1").startswith("sync.zzz is not a setting; sync has: transport, ")
    assert message("zzz=1").startswith("zzz is not a setting; the top level has: recipe_name, ")


def test_misspelt_keys_in_files_are_found_too_inside_lists(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("sources:\n- {name: a, rato: 1}\n")
    near = "is not a setting; did you mean sources.0.ratio?"
    assert message(f"recipe={path}") == f"sources.0.rato (in recipe {path}) {near}"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("batch.size=many", "batch.size=many: batch.size must be a whole number"),
        ("batch.size=1.5", "batch.size=1.5: batch.size must be a whole number"),
        ("batch.size=null", "batch.size=null: batch.size must be a whole number"),
        ("optim.lr=fast", "optim.lr=fast: optim.lr must be a number"),
        ("eval.limit=all", "eval.limit=all: eval.limit must be a whole number or null"),
        ("rollout.drop_zero_std=maybe", "rollout.drop_zero_std=maybe: rollout.drop_zero_std must be true or false"),
        ("batch=3", "batch=3: batch must be a group of settings"),
        ("sources=3", "sources=3: sources must be a list"),
        ("sources=[3]", "sources.0=3: sources.0 must be a group of settings"),
    ],
)
def test_a_wrong_type_is_named_with_key_value_and_what_is_expected(override, expected):
    assert message(override) == expected


def test_wrong_types_in_files_name_the_file(tmp_path):
    path = tmp_path / "bad.yaml"
    path.write_text("sources:\n- {name: a, ratio: much, reward: 'a:b'}\n")
    assert message(f"recipe={path}") == f"sources.0.ratio=much (in recipe {path}): sources.0.ratio must be a number"


def test_what_is_no_override_is_refused():
    assert "write key=value" in message("batch.size")
    assert "cannot be deleted" in message("~batch.size")
    assert "sweeps are not supported" in message("batch.size=1,2")
    assert "Interpolation key 'nope' not found" in message("batch.size=${nope}")


def test_recipes_that_cannot_be_read_are_refused(tmp_path):
    assert message("recipe=quikstart").startswith("recipe=quikstart is not a recipe; there are: ")
    assert message("recipe=no/such.yaml") == "recipe=no/such.yaml: there is no such file"
    path = tmp_path / "bad.yaml"
    path.write_text("batch: {size: 1\nfoo: [\n")
    assert f"recipe={path}, line 2: not valid YAML" in message(f"recipe={path}")
    path.write_text("- 1\n")
    assert "must be a mapping" in message(f"recipe={path}")


def test_the_resolved_yaml_is_a_recipe_for_the_same_run(tmp_path, quickstart):
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(quickstart))
    assert load([f"recipe={path}"]) == quickstart


def test_values_decided_later_give_a_new_sealed_configuration(quickstart):
    conf = with_values(quickstart, {"model.path": "/x"})
    assert (conf.model.path, quickstart.model.path) == ("/x", None)
    with pytest.raises(AttributeError):
        conf.steps = 1
    with pytest.raises(ConfigError, match=r"model\.pth \(set by prepare\) is not a setting; did you mean model\.path"):
        with_values(quickstart, {"model.pth": "/x"})
