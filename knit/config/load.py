"""From recipe and overrides to the one configuration object of a run.

Hydra composes the YAML (``config.yaml``, ``recipe/NAME.yaml`` or a file of the user's, with their defaults
lists) and parses the overrides; every value is then put into the typed schema one by one, so that a wrong
key or type is reported by its full name. The result is sealed: writing to it raises.

Overrides are ``key=value`` in Hydra's grammar. Sources are addressed by name, ``sources.spell.ratio=0.5``, or
by position, ``sources.0.ratio=0.5``; a list that is given whole replaces the recipe's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from knit.config import keys
from knit.config.schema import KnitConf, seal
from knit.errors import ConfigError

RECIPES = Path(__file__).with_name("recipe")
USER_RECIPE = "file_of_the_user"


def load(overrides: Sequence[str] = ()) -> KnitConf:
    """The sealed configuration of ``knit train OVERRIDES``.

    Raises :class:`ConfigError` in one line for an unknown key (with the nearest valid one), a wrong type, a
    recipe that is not there and broken YAML. Does not check how settings fit together: see
    :mod:`knit.config.validate`.
    """
    recipe, changes = _split_recipe(_parse(overrides))
    conf = OmegaConf.structured(KnitConf)
    origin = f" (in recipe {recipe})" if recipe else ""
    if recipe:
        conf.recipe_name = Path(recipe).stem
    _assign_all(conf, "", _compose(recipe), origin)
    for key, value in changes:
        _assign_all(conf, key, value, "")
    return _finish(conf)


def with_values(conf: KnitConf, values: Mapping[str, Any]) -> KnitConf:
    """A sealed copy with some settings changed: what ``prepare`` decided, ``{"model.path": …}``."""
    copy = OmegaConf.structured(conf)
    for key, value in values.items():
        _assign_all(copy, key, value, " (set by prepare)")
    return _finish(copy)


def to_yaml(conf: KnitConf) -> str:
    """The whole configuration; as a recipe file it gives the same run again."""
    return OmegaConf.to_yaml(OmegaConf.structured(conf))


def recipe_names() -> list[str]:
    return sorted(path.stem for path in RECIPES.glob("*.yaml"))


# --- overrides


def _parse(overrides: Sequence[str]) -> list[Override]:
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            raise ConfigError(f"{text!r} is not an override; write key=value, e.g. batch.size=256")
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ConfigError(
                f"cannot read the override {text!r}: {reason}; quote values with special signs"
            ) from error
    return parsed


def _split_recipe(parsed: Sequence[Override]) -> tuple[str | None, list[tuple[str, Any]]]:
    recipe: str | None = None
    changes = []
    for override in parsed:
        key, text = override.key_or_group, override.input_line
        if override.is_delete():
            raise ConfigError(f"{text}: settings cannot be deleted; set {key}=null or its default")
        if override.is_sweep_override():
            raise ConfigError(f"{text}: sweeps are not supported; write a list as {key}=[a,b], or run once per value")
        if key == "recipe":
            recipe = None if override.value() is None else str(override.value())
        else:
            changes.append((key, override.value()))
    return recipe, changes


# --- recipes


def _compose(recipe: str | None) -> Any:
    """What the YAML files set, untyped, as plain mappings and lists (interpolations unresolved)."""
    with _readable_errors(recipe):
        return _compose_choice(_register(recipe)) if recipe and _is_file(recipe) else _compose_built_in(recipe)


def _compose_choice(recipe: str | None) -> Any:
    with initialize_config_module("knit.config", version_base="1.3", job_name="knit"):
        composed = compose("config", overrides=[f"recipe={recipe}"] if recipe else [])
    return OmegaConf.to_container(composed, resolve=False)


_compose_built_in = functools.cache(_compose_choice)  # package data do not change; what is returned is only read


def _is_file(recipe: str) -> bool:
    return recipe.endswith((".yaml", ".yml")) or "/" in recipe


def _register(path: str) -> str:
    """Makes a YAML file outside the package known to Hydra as a recipe; its defaults list may name built-in ones."""
    if not Path(path).is_file():
        raise ConfigError(f"recipe={path}: there is no such file")
    content = OmegaConf.load(path)
    if not isinstance(content, DictConfig):
        raise ConfigError(f"recipe={path}: the file must be a mapping of settings")
    ConfigStore.instance().store(group="recipe", name=USER_RECIPE, node=content, package="_global_")
    return USER_RECIPE


@contextlib.contextmanager
def _readable_errors(recipe: str | None) -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"recipe={recipe}{where}: not valid YAML: {error.problem}") from error
    except (HydraException, OmegaConfBaseException) as error:
        if recipe and not _is_file(recipe) and recipe not in recipe_names():
            known = ", ".join(recipe_names())
            known_or_file = f"there are: {known}; or give the path of a YAML file"
            raise ConfigError(f"recipe={recipe} is not a recipe; {known_or_file}") from error
        reason = " ".join(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"recipe={recipe}: {reason}") from error


# --- into the schema


def _assign_all(conf: DictConfig, key: str, value: Any, origin: str) -> None:
    """Puts ``value`` at ``key``, a mapping or list of groups setting by setting."""
    setting = keys.find(key, origin) if key else None
    kind = setting.kind if setting else "group"
    if kind == "group" and isinstance(value, Mapping):
        for name, inner in value.items():
            _assign_all(conf, f"{key}.{name}" if key else str(name), inner, origin)
    elif kind == "items" and isinstance(value, Sequence) and not isinstance(value, str):
        assert setting is not None
        OmegaConf.update(conf, key, [OmegaConf.structured(setting.type) for _ in value])
        for position, item in enumerate(value):
            _assign_all(conf, f"{key}.{position}", item, origin)
    else:
        _assign(conf, key, value, origin)


def _assign(conf: DictConfig, key: str, value: Any, origin: str) -> None:
    setting = keys.find(key, origin)
    interpolation = isinstance(value, str) and "${" in value
    if setting.kind in ("group", "items") and not interpolation:
        raise ConfigError(f"{key}={_shown(value)}{origin}: {key} must be {setting.expected}")
    try:
        OmegaConf.update(conf, _by_position(conf, key), value, merge=setting.kind == "opaque", force_add=True)
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"{key}={_shown(value)}{origin}: {key} must be {setting.expected}") from error


def _by_position(conf: DictConfig, key: str) -> str:
    """``sources.spell.ratio`` → ``sources.0.ratio``; raises with the names there are."""
    parts = key.split(".")
    for at in range(1, len(parts)):
        items = OmegaConf.select(conf, ".".join(parts[:at]))
        if not isinstance(items, ListConfig) or keys.lookup(".".join(parts[:at])).kind != "items":  # type: ignore[union-attr]
            continue
        names = [None if OmegaConf.is_missing(item, "name") else item.name for item in items]
        if parts[at] in names:
            parts[at] = str(names.index(parts[at]))
        elif not parts[at].isdigit() or int(parts[at]) >= len(names):
            known = ", ".join(str(name) for name in names) or "none yet (set the list whole, or choose a recipe)"
            raise ConfigError(f"{key}: {parts[at]} is not one of the {'.'.join(parts[:at])}; there are: {known}")
    return ".".join(parts)


def _finish(conf: DictConfig) -> KnitConf:
    try:
        missing = sorted(OmegaConf.missing_keys(conf))
        if missing:
            raise ConfigError(f"{missing[0].replace('[', '.').replace(']', '')} is not set")
        found = OmegaConf.to_object(conf)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere, or to a wrong type
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error
    assert isinstance(found, KnitConf)
    return seal(found)


def _shown(value: Any) -> str:
    """A value as one would write it in an override; long ones in short."""
    if isinstance(value, Mapping):
        return "{…}"
    if isinstance(value, list):
        return "[…]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)
