from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from knit.config.schema import SourceConf
from knit.errors import ConfigError
from knit.recipes.quickstart.tokenizer import EOS_ID, save_tokenizer
from knit.rollout.prompts import EpochOrder, FileSource, make_source, validate_source
from knit.rollout.tokenizer import Tokenizer

REWARD = "knit.rollout.rewards:exact_match"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    save_tokenizer(tmp_path)
    return Tokenizer(tmp_path)


def source(path: Path, text: str | None = None, **changed: Any) -> SourceConf:
    if text is not None:
        path.write_text(text)
    return SourceConf(**{"name": "math", "path": str(path), "reward": REWARD} | changed)


def rows(count: int) -> str:
    return "".join(json.dumps({"prompt": f"q{i}", "label": i, "level": i % 3}) + "\n" for i in range(count))


def test_prompts_are_tokenized_with_their_label_and_the_rest(tmp_path: Path, tokenizer: Tokenizer) -> None:
    prompt = make_source(source(tmp_path / "d.jsonl", rows(3), shuffle=False), tokenizer, 0).prompt(1)
    assert (prompt.text, prompt.label, prompt.metadata) == ("q1", 1, {"level": 1})
    assert prompt.input_ids == tuple(tokenizer.encode("q1"))
    assert (prompt.source, prompt.index) == ("math", 1)


def test_every_epoch_has_every_item_once_in_a_new_and_repeatable_order() -> None:
    order = EpochOrder(20, seed=1, name="a")
    epochs = [[order[e * 20 + i] for i in range(20)] for e in range(3)]
    assert all(sorted(e) == list(range(20)) for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = EpochOrder(20, seed=1, name="a")
    assert [again[i] for i in reversed(range(60))] == [x for e in reversed(epochs) for x in reversed(e)]
    assert [EpochOrder(20, seed=2, name="a")[i] for i in range(20)] != epochs[0]
    assert [EpochOrder(20, seed=1, name="b")[i] for i in range(20)] != epochs[0]


def test_parquet_and_jsonl_give_the_same_prompts(tmp_path: Path, tokenizer: Tokenizer) -> None:
    import pyarrow
    import pyarrow.parquet

    lines = source(tmp_path / "d.jsonl", rows(5))
    table = pyarrow.Table.from_pylist([json.loads(line) for line in rows(5).splitlines()])
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    columns = source(tmp_path / "d.parquet")
    validate_source(columns)
    a, b = FileSource(lines, tokenizer, 0), FileSource(columns, tokenizer, 0)
    assert [a.prompt(i) for i in range(10)] == [b.prompt(i) for i in range(10)]


def test_chat_template_and_system_prompt_are_applied(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    chat = Tokenizer(tmp_path)
    conf = source(tmp_path / "d.jsonl", rows(1), chat_template=True, system_prompt="Be brief.")
    assert FileSource(conf, chat, 0).prompt(0).text == "[system] Be brief.<eos>\n[user] q0<eos>\n[assistant]"
    messages = json.dumps({"prompt": [{"role": "user", "content": "hi"}]})
    conf = source(tmp_path / "m.jsonl", messages, chat_template=True)
    prompt = FileSource(conf, chat, 0).prompt(0)
    assert prompt.text == "[user] hi<eos>\n[assistant]"
    assert EOS_ID in prompt.input_ids
    plain = source(tmp_path / "p.jsonl", rows(1), system_prompt="Be brief.")
    assert FileSource(plain, chat, 0).prompt(0).text == "Be brief.\n\nq0"


@pytest.mark.parametrize(
    ("text", "changed", "message"),
    [
        ("", {}, "is empty; it needs at least one prompt"),
        ('{"prompt": "a"}\n{"prompt": \n', {}, r"line 2: malformed JSON"),
        ('{"prompt": "a"}\n\n{"question": "b"}\n', {}, r"line 3: no key 'prompt' \(its keys: question\)"),
        ('{"prompt": "a"}\n[1]\n', {}, r"line 2: expected an object, found list"),
        ('{"prompt": ""}\n', {}, r"line 1: 'prompt' must be text"),
        ('{"prompt": [{"role": "user", "content": "a"}]}\n', {}, "set chat_template=true"),
        ('{"prompt": "a"}\n', {"reward": "knit.rollout.rewards:nothing"}, "sources.math.reward"),
        ('{"prompt": "a"}\n', {"reward": "no.such.module:f"}, "sources.math.reward"),
        ('{"prompt": "a"}\n', {"prompt_source": "knit.rollout.prompts:Missing"}, "sources.math.prompt_source"),
    ],
)
def test_bad_input_is_one_readable_line(tmp_path: Path, text: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        validate_source(source(tmp_path / "d.jsonl", text, **changed))
    assert "\n" not in str(error.value)


def test_a_missing_file_and_a_missing_path_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"sources\.math\.path=.*none\.jsonl: no such file"):
        validate_source(source(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match=r"sources\.math\.path is not set"):
        validate_source(SourceConf(name="math", reward=REWARD))
    broken = tmp_path / "d.parquet"
    broken.write_bytes(b"no parquet")
    with pytest.raises(ConfigError, match="unreadable parquet"):
        validate_source(source(broken))


def test_eos_ids_come_from_the_model_and_its_tokenizer(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    assert Tokenizer(tmp_path).eos_ids == (EOS_ID,)
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer(tmp_path).eos_ids == (7, EOS_ID)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 6]}')
    assert Tokenizer(tmp_path).eos_ids == (5, 6, EOS_ID)


def test_a_model_without_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
