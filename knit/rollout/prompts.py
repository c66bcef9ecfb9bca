"""Prompt sources: an endless, deterministic stream of prompts per source.

A source is a class ``Source(conf: SourceConf, tokenizer: Tokenizer, seed: int)`` with ``prompt(index)`` and
``__len__``. Index ``i`` names the same prompt in every process: epoch ``i // len`` is a shuffle of all
items that depends on the seed, the source's name and the epoch alone. ``FileSource`` reads JSONL and parquet.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import orjson

from knit.common.paths import load_path
from knit.config.schema import SourceConf
from knit.errors import ConfigError
from knit.rollout.tokenizer import Tokenizer
from knit.types import Prompt

Row = dict[str, Any]


class PromptSource(Protocol):
    """May also have ``validate(conf)``, a static method that raises ConfigError before anything is started."""

    def __init__(self, conf: SourceConf, tokenizer: Tokenizer, seed: int) -> None: ...

    def __len__(self) -> int: ...

    def prompt(self, index: int) -> Prompt: ...


class EpochOrder:
    """Endless index → item, every item once per epoch."""

    def __init__(self, size: int, seed: int, name: str, shuffle: bool = True) -> None:
        self.size, self.seed, self.name, self.shuffle = size, seed, name, shuffle
        self._epochs: dict[int, list[int]] = {}

    def __getitem__(self, index: int) -> int:
        epoch, position = divmod(index, self.size)
        return self._epoch(epoch)[position] if self.shuffle else position

    def _epoch(self, epoch: int) -> list[int]:
        if epoch not in self._epochs:
            order = list(range(self.size))
            random.Random(f"{self.seed}/{self.name}/{epoch}").shuffle(order)
            self._epochs = {e: o for e, o in self._epochs.items() if e >= epoch - 1} | {epoch: order}
        return self._epochs[epoch]


class FileSource:
    """A JSONL or parquet file with a column of prompts (text or chat messages) and perhaps one of labels."""

    def __init__(self, conf: SourceConf, tokenizer: Tokenizer, seed: int) -> None:
        self.conf, self.tokenizer = conf, tokenizer
        self.rows = read_rows(conf)
        self.order = EpochOrder(len(self.rows), seed, conf.name, conf.shuffle)

    @staticmethod
    def validate(conf: SourceConf) -> None:
        read_rows(conf)

    def __len__(self) -> int:
        return len(self.rows)

    def prompt(self, index: int) -> Prompt:
        row = self.rows[self.order[index]]
        text = self.render(row[self.conf.prompt_key])
        rest = {k: v for k, v in row.items() if k not in (self.conf.prompt_key, self.conf.label_key)}
        return Prompt(
            source=self.conf.name,
            index=index,
            input_ids=tuple(self.tokenizer.encode(text)),
            text=text,
            label=row.get(self.conf.label_key),
            metadata=rest,
        )

    def render(self, prompt: str | Sequence[Row]) -> str:
        """The prompt as the model sees it: system prompt and chat template applied."""
        if self.conf.chat_template:
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
            if self.conf.system_prompt is not None:
                messages = [{"role": "system", "content": self.conf.system_prompt}, *messages]
            return self.tokenizer.render_chat(messages)
        text = str(prompt)
        return text if self.conf.system_prompt is None else f"{self.conf.system_prompt}\n\n{text}"


def validate_source(conf: SourceConf) -> None:
    """Raises ConfigError unless the source's class and reward import and its data can be read. Starts nothing."""
    where = f"sources.{conf.name}"
    source = _load(conf.prompt_source, f"{where}.prompt_source")
    if not callable(_load(conf.reward, f"{where}.reward")):
        raise ConfigError(f"{where}.reward={conf.reward} is not callable; it must be a function of a RewardSample")
    validate = getattr(source, "validate", None)
    if validate is not None:
        validate(conf)


def make_source(conf: SourceConf, tokenizer: Tokenizer, seed: int) -> PromptSource:
    source: PromptSource = _load(conf.prompt_source, f"sources.{conf.name}.prompt_source")(conf, tokenizer, seed)
    if len(source) == 0:
        raise ConfigError(f"sources.{conf.name}: {conf.prompt_source} has no prompts")
    return source


def read_rows(conf: SourceConf) -> list[Row]:
    """All rows of ``conf.path``. ConfigError when it is missing, empty, malformed or lacks the prompt key."""
    where = f"sources.{conf.name}.path"
    if conf.path is None:
        raise ConfigError(f"{where} is not set; name a JSONL or parquet file")
    path = Path(conf.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"{where}={conf.path}: no such file")
    rows = _parquet_rows(path, where) if path.suffix == ".parquet" else _jsonl_rows(path, where)
    if not rows:
        raise ConfigError(f"{where}={conf.path} is empty; it needs at least one prompt")
    for line, row in rows:
        _check_row(conf, line, row)
    return [row for _, row in rows]


def _check_row(conf: SourceConf, line: int, row: Any) -> None:
    where = f"sources.{conf.name}.path={conf.path}, line {line}"
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, found {type(row).__name__}")
    if conf.prompt_key not in row:
        keys = ", ".join(map(str, row)) or "none"
        raise ConfigError(f"{where}: no key {conf.prompt_key!r} (its keys: {keys}); set prompt_key")
    prompt = row[conf.prompt_key]
    if isinstance(prompt, list) and not conf.chat_template:
        raise ConfigError(f"{where}: {conf.prompt_key!r} holds chat messages; set chat_template=true")
    if not isinstance(prompt, str | list) or not prompt:
        raise ConfigError(f"{where}: {conf.prompt_key!r} must be text or a list of chat messages, and not empty")


def _jsonl_rows(path: Path, where: str) -> list[tuple[int, Any]]:
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append((number, orjson.loads(line)))
            except orjson.JSONDecodeError as error:
                raise ConfigError(f"{where}={path}, line {number}: malformed JSON ({error})") from error
    return rows


def _parquet_rows(path: Path, where: str) -> list[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{where}={path}: unreadable parquet ({error})") from error
    return list(enumerate(rows, 1))


def _load(path: str, setting: str) -> Any:
    try:
        return load_path(path)
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
