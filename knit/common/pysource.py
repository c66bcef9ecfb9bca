"""Looks into Python source files without importing them: the loss imports torch, the driver must not."""

from __future__ import annotations

import ast
import functools
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

from knit.common.paths import search_here, split_path
from knit.errors import ConfigError


def missing_name(path: str) -> str | None:
    """Why ``package.module:name`` cannot be there, in a few words; None when it is (or only an import can tell)."""
    try:
        module, name = split_path(path)
    except ConfigError:
        return "write it as package.module:name"
    source = find_source(module)
    if source is None:
        return f"there is no module {module} (searched: the working directory, PYTHONPATH and what is installed)"
    if source.suffix != ".py":
        return None  # built in, or compiled
    try:
        names = _names_in(source, source.stat().st_mtime_ns)
    except SyntaxError as error:
        return f"{source}, line {error.lineno}: {error.msg}"
    first = name.split(".")[0]
    return None if first in names or "*" in names else f"{source} has no {first}"


def find_source(module: str) -> Path | None:
    """The file of a module; packages above it are not imported. ``Path()`` for what has no file."""
    search_here()
    loaded = sys.modules.get(module)
    if loaded is not None:
        return Path(getattr(loaded, "__file__", None) or "")
    folders: list[str] | None = None
    found = Path()
    parts = module.split(".")
    for depth, _ in enumerate(parts, start=1):
        spec = _find_spec(".".join(parts[:depth]), folders)
        if spec is None:
            return None
        found = Path(spec.origin) if spec.has_location and spec.origin else Path()
        folders = list(spec.submodule_search_locations or ())
    return found


def _find_spec(name: str, folders: list[str] | None) -> ModuleSpec | None:
    """As the import system finds it, editable installs included, but with the parents' folders given."""
    for finder in sys.meta_path:
        spec = finder.find_spec(name, folders)
        if spec is not None:
            return spec
    return None


@functools.lru_cache(maxsize=256)
def _names_in(source: Path, mtime_ns: int) -> frozenset[str]:
    """Every name that the file defines or imports; those inside functions only make the answer more lenient."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_bytes())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return frozenset(names)
