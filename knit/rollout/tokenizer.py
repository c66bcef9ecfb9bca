"""The model's tokenizer without transformers: tokenizer.json, its chat template and the end-of-sequence ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from knit.errors import ConfigError


class Tokenizer:
    """Reads a Hugging Face model folder. Raises ConfigError when it has no ``tokenizer.json``."""

    def __init__(self, model_path: str | Path) -> None:
        import tokenizers

        self.path = Path(model_path)
        file = self.path / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"model.path={model_path}: no tokenizer.json there; export the tokenizer as a fast one")
        self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.config = _read(self.path / "tokenizer_config.json")
        self.eos_ids = self._eos_ids()
        self.chat_template = self._chat_template()
        self._template: Any = None

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def render_chat(self, messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True, **extra: Any) -> str:
        """The text of a conversation as the model's chat template writes it."""
        if self.chat_template is None:
            raise ConfigError(f"model.path={self.path} has no chat template; set sources[].chat_template=false")
        if self._template is None:
            self._template = _environment().from_string(self.chat_template)
        special = {k: _content(v) for k, v in self.config.items() if k.endswith("_token") and v is not None}
        return str(
            self._template.render(
                messages=list(messages), add_generation_prompt=add_generation_prompt, **(special | extra)
            )
        )

    def _eos_ids(self) -> tuple[int, ...]:
        """Every id that ends a response: of generation_config, else config; and the tokenizer's own."""
        ids: list[int] = []
        for name in ("generation_config.json", "config.json"):
            ids += _as_ids(_read(self.path / name).get("eos_token_id"))
            if ids:
                break
        token = self.config.get("eos_token")
        own = self.token_id(_content(token)) if token is not None else None
        if own is not None:
            ids.append(own)
        return tuple(dict.fromkeys(ids))

    def _chat_template(self) -> str | None:
        file = self.path / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = self.config.get("chat_template")
        if isinstance(template, list):  # several named templates
            template = next((t["template"] for t in template if t.get("name") == "default"), None)
        return template


def _environment() -> Any:
    """Jinja as Hugging Face sets it up for chat templates."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = lambda value, **_: orjson.dumps(value).decode()
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise(message: str) -> None:
    raise ValueError(message)


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _as_ids(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(v) for v in value] if isinstance(value, Iterable) else [int(value)]


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found: dict[str, Any] = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    return found
