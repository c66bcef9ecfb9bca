"""The names of all settings, read from the dataclasses of :mod:`knit.config.schema`.

A full key is dotted: ``batch.size``. Items of a list of sources are named by their name (or position):
``sources.spell.ratio``. Below an opaque mapping such as ``engine.extra`` any key is valid.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import types
import typing
from dataclasses import dataclass
from typing import Any

from knit.config.schema import KnitConf
from knit.errors import ConfigError

ITEM = "*"  # stands for any item of a list in a key pattern
TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True, slots=True)
class Setting:
    """One node of the configuration: a group, a list of groups, an opaque mapping or a single value."""

    kind: str  # group | items | opaque | value
    type: Any
    optional: bool

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.kind == "group":
            return "a group of settings"
        if self.kind == "items":
            return "a list"
        if self.kind == "opaque":
            return "a mapping"
        return TYPE_NAMES.get(self.type, "a value") + (" or null" if self.optional else "")


@functools.cache
def settings() -> dict[str, Setting]:
    """Every setting by its full key, items of lists as ``*``: ``{"batch.size": …, "sources.*.ratio": …}``."""
    found: dict[str, Setting] = {}
    _collect(KnitConf, "", found)
    return found


def _collect(group: type, prefix: str, found: dict[str, Setting]) -> None:
    hints = typing.get_type_hints(group)
    for field in dataclasses.fields(group):
        key = prefix + field.name
        setting, inner = _describe(hints[field.name])
        found[key] = setting
        if inner is not None:
            _collect(inner, f"{key}.{ITEM}." if setting.kind == "items" else f"{key}.", found)


def _describe(hint: Any) -> tuple[Setting, type | None]:
    """The setting of a type annotation, and the dataclass inside it."""
    arguments = typing.get_args(hint)
    optional = type(None) in arguments
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        (hint,) = (a for a in arguments if a is not type(None))
    if dataclasses.is_dataclass(hint):
        return Setting("group", hint, optional), typing.cast(type, hint)
    if typing.get_origin(hint) is dict:
        return Setting("opaque", hint, optional), None
    if typing.get_origin(hint) is list:
        (item,) = typing.get_args(hint)
        if dataclasses.is_dataclass(item):
            return Setting("items", item, optional), typing.cast(type, item)
        return Setting("value", list, optional), None
    return Setting("value", hint, optional), None


def find(key: str, origin: str = "") -> Setting:
    """The setting with this full key (list items by any name); :class:`ConfigError` with the nearest if none."""
    setting = lookup(key)
    if setting is None:
        raise ConfigError(not_a_setting(key, origin))
    return setting


def lookup(key: str) -> Setting | None:
    pattern: list[str] = []
    table = settings()
    above: Setting | None = None
    for part in key.split("."):
        if above is not None and above.kind == "opaque":
            return Setting("value", Any, True)
        pattern.append(ITEM if above is not None and above.kind == "items" else part)
        above = table.get(".".join(pattern))
        if above is None and pattern[-1] == ITEM:
            above = Setting("group", table[".".join(pattern[:-1])].type, False)
        if above is None:
            return None
    return above


def not_a_setting(key: str, origin: str = "") -> str:
    """``batch.sise is not a setting; did you mean batch.size?``"""
    near = nearest(key)
    if near:
        return f"{key}{origin} is not a setting; did you mean {near}?"
    group = key.rsplit(".", 1)[0] if "." in key else ""
    found = lookup(group) if group else None
    if found is None or found.kind != "group":
        group = ""
    prefix = f"{_as_pattern(group + '.?')[0][:-1]}" if group else ""
    members = [k.removeprefix(prefix) for k in settings() if k.startswith(prefix) and "." not in k.removeprefix(prefix)]
    return f"{key}{origin} is not a setting; {group or 'the top level'} has: {', '.join(members)}"


def nearest(key: str) -> str | None:
    """The valid full key most like ``key``, in the key's own item names, or None if nothing is alike.

    A setting that is right but for its group (``lr``, ``trainer.lr``) is found by its last part.
    """
    pattern, items = _as_pattern(key)
    candidates = list(settings())
    leaf = pattern.rsplit(".", 1)[-1]
    same_leaf = [k for k in candidates if k.rsplit(".", 1)[-1] == leaf]
    siblings = [k for k in candidates if k.count(".") == pattern.count(".")]
    match = (
        difflib.get_close_matches(pattern, same_leaf, n=1, cutoff=0.75)
        or difflib.get_close_matches(pattern, siblings, n=1, cutoff=0.75)
        or (same_leaf if len(same_leaf) == 1 else [])
        or difflib.get_close_matches(pattern, candidates, n=1, cutoff=0.7)
        or difflib.get_close_matches(leaf, [k for k in candidates if "." not in k], n=1, cutoff=0.7)
        or _by_leaf(leaf, candidates)
    )
    if not match:
        return None
    for item in items:
        match = [match[0].replace(ITEM, item, 1)]
    return match[0].replace(f".{ITEM}.", ".<name>.")


def _by_leaf(leaf: str, candidates: list[str]) -> list[str]:
    leaves: dict[str, list[str]] = {}
    for key in candidates:
        leaves.setdefault(key.rsplit(".", 1)[-1], []).append(key)
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.8)
    return leaves[close[0]][:1] if close else []


def _as_pattern(key: str) -> tuple[str, list[str]]:
    """``sources.spell.rato`` → (``sources.*.rato``, [``spell``])."""
    parts, items = key.split("."), []
    for at in range(1, len(parts) - 1):
        above = lookup(".".join(parts[:at]))
        if above is not None and above.kind == "items":
            items.append(parts[at])
            parts[at] = ITEM
    return ".".join(parts), items
