"""Objects named in the configuration by Python path, ``package.module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from knit.errors import ConfigError


def split_path(path: str) -> tuple[str, str]:
    """``"package.module:name"`` → ``("package.module", "name")``; raises :class:`ConfigError` on another form."""
    module, colon, name = path.partition(":")
    well_formed = all(part.isidentifier() for part in (*module.split("."), *name.split(".")))
    if not colon or not well_formed:
        raise ConfigError(f"{path!r} is not a Python path; write it as package.module:name")
    return module, name


def search_here() -> None:
    """Let modules in the working directory be imported, as ``python -m`` would (``knit`` is a console script)."""
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)


def load_path(path: str) -> Any:
    """The object at ``package.module:name``.

    Raises :class:`ConfigError` in one line when the form is wrong, the module does not import or has no
    such name. The working directory is searched last.
    """
    module_name, name = split_path(path)
    search_here()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"{path}: cannot import {module_name} ({type(error).__name__}: {error})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{path}: module {module_name} has no {name}")
        found = getattr(found, part)
    return found
