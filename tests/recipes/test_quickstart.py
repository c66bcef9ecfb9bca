from __future__ import annotations

import random
from pathlib import Path

import pytest

from knit.config.schema import KnitConf, SourceConf
from knit.errors import ConfigError
from knit.recipes.quickstart import warmup
from knit.recipes.quickstart.tasks import TASKS, GymSource, items, verify
from knit.recipes.quickstart.tokenizer import EOS_ID, encode, save_tokenizer
from knit.recipes.quickstart.warmup import Settings, demonstrations, settings_of
from knit.rollout.prompts import validate_source
from knit.rollout.rewards import RewardSample
from knit.rollout.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer(folder)


def conf_of(task: str, **options: str) -> SourceConf:
    return SourceConf(
        name=task,
        reward="knit.recipes.quickstart.tasks:verify",
        prompt_source="knit.recipes.quickstart.tasks:GymSource",
        options={"task": task, **options},
    )


def answer(source: GymSource, index: int, response: str, finished: bool = True) -> float:
    return verify(RewardSample(source.prompt(index), response, [], finished))


@pytest.mark.parametrize("task", TASKS)
def test_the_splits_share_no_prompt_and_are_large_enough(task: str) -> None:
    heldout, train = items(task, "heldout"), items(task, "train")
    assert len({i.text for i in heldout}) == len(heldout) == 200
    assert len({i.text for i in train}) == len(train) >= 300
    assert not {i.text for i in heldout} & {i.text for i in train}


@pytest.mark.parametrize("task", TASKS)
def test_demonstrations_earn_full_reward_and_fit_the_response_limit(task: str, tokenizer: Tokenizer) -> None:
    source = GymSource(conf_of(task), tokenizer, 0)
    for index in range(100):
        item = source.items[source.order[index]]
        ids = [*tokenizer.encode(item.demo), EOS_ID]
        assert len(ids) <= 32
        assert tokenizer.decode(ids) == item.demo
        assert answer(source, index, item.demo) == 1.0
        assert answer(source, index, item.demo, finished=False) == 0.0
        assert answer(source, index, "") == 0.0
        assert source.prompt(index).input_ids == tuple(encode(item.text))


def test_sorted_numbers_that_are_off_by_one_earn_nothing(tokenizer: Tokenizer) -> None:
    source = GymSource(conf_of("sort"), tokenizer, 0)
    index = next(i for i in range(100) if source.items[source.order[i]].demo.endswith("8"))
    item = source.items[source.order[index]]
    assert answer(source, index, item.demo[:-1] + "9") == 0.0


def test_the_letter_count_is_judged_by_its_answer_alone(tokenizer: Tokenizer) -> None:
    source = GymSource(conf_of("count"), tokenizer, 0)
    demo = source.items[source.order[0]].demo
    assert answer(source, 0, f"whatever:{demo[-1]}") == 1.0
    assert answer(source, 0, demo[:-1] + "9") == 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "chess"}, r"sources\.spell\.options\.task=chess is not known; choose one of spell"),
        ({"split": "test"}, r"sources\.spell\.options\.split=test is not known"),
        ({"spilt": "train"}, r"unknown key 'spilt'"),
    ],
)
def test_wrong_source_options_are_named(options: dict[str, str], message: str) -> None:
    conf = conf_of("spell")
    conf.options |= options
    with pytest.raises(ConfigError, match=message):
        validate_source(conf)


def test_the_cache_folder_depends_on_every_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folders = {Settings().folder, Settings(warmup="clean").folder, Settings(seed=1).folder, Settings(steps=5).folder}
    assert len(folders) == 4
    assert all(f.parent == tmp_path / "knit" for f in folders)


@pytest.mark.parametrize("options", [{"warmup": "sloppy"}, {"wormup": "clean"}])
def test_wrong_prepare_options_are_named(options: dict[str, str]) -> None:
    conf = KnitConf()
    conf.prepare_options = options
    with pytest.raises(ConfigError, match=r"prepare_options\.w"):
        settings_of(conf)


def test_a_clean_warm_up_is_shorter() -> None:
    conf = KnitConf()
    assert settings_of(conf) == Settings()
    conf.prepare_options = {"warmup": "clean"}
    assert settings_of(conf) == Settings(warmup="clean", steps=120)


def test_only_the_last_demonstrations_of_a_careless_teacher_are_wrong() -> None:
    settings = Settings(steps=20, careless_steps=10, batch=40)
    right = {(tuple(encode(i.text)), (*encode(i.demo), EOS_ID)) for t in TASKS for i in items(t, "train")}
    steps = [
        [(tuple(prompt), tuple(response)) in right for prompt, response in pairs] for pairs in demonstrations(settings)
    ]
    assert all(all(step) for step in steps[:10])
    late = [ok for step in steps[10:] for ok in step]
    assert 0.45 < sum(late) / len(late) < 0.75  # half are replaced, and some replacements happen to be right
    clean = demonstrations(Settings(warmup="clean", steps=20, careless_steps=10, batch=40))
    assert all((tuple(p), tuple(r)) in right for pairs in clean for p, r in pairs)


def test_a_wrong_count_keeps_the_tally() -> None:
    item = items("count", "train")[0]
    wrong = warmup.wrong_demo(item, random.Random(0))
    assert wrong[:-1] == item.demo[:-1]


@pytest.mark.megatron
def test_the_model_is_made_once_and_is_whole(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    conf = KnitConf()
    conf.prepare_options = {"steps": 2, "batch": 8}
    folder = Path(warmup.prepare(conf)["model.path"])
    names = {path.name for path in folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "warmup.json"}
    assert [path for path in folder.parent.iterdir() if path != folder] == []
    assert "step 2/2" in capsys.readouterr().out
    assert warmup.prepare(conf) == {"model.path": str(folder)}
    assert "cached" in capsys.readouterr().out
