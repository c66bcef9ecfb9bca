"""The architecture, read from the source: rooms import only from lower floors, and each keeps its nevers.

Floors (docs/architecture.md):  5 commands, driver, recipes · 4 train · 3 feed, sync, rollout, replay ·
2 buffer, store, track · 1 types, errors, common, config.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {"types": 1, "errors": 1, "common": 1, "config": 1}
FLOORS |= {"buffer": 2, "store": 2, "track": 2, "feed": 3, "sync": 3, "rollout": 3, "replay": 3, "train": 4}
TOP_FLOOR = 5  # cli, driver, recipes and what else stands directly in the package

ENGINES = {"torch", "transformers", "megatron", "sglang"}
# Rooms that may not import these packages, not even inside a function.
NEVER = {
    "types": {*ENGINES, "ray", "numpy"},
    "errors": {*ENGINES, "ray", "numpy"},
    "config": {*ENGINES, "ray"},
    "buffer": {*ENGINES},
    "store": {*ENGINES},
    "track": {*ENGINES},
    "rollout": {*ENGINES},
    "replay": {*ENGINES, "ray"},
    "feed": {"sglang", "megatron"},
    "sync": {"sglang", "megatron"},
    "train": {"sglang"},
}
# Modules that are the program of an engine's own process.
OWN_PROCESS = {"knit.rollout.server_main"}
ONLY_IN = {("buffer", "ray"): {"knit.buffer.actor"}}


class Import(NamedTuple):
    importer: str
    line: int
    imported: str
    at_import: bool  # it runs when the importer is imported: not inside a function, not only for type checking

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else "knit"


def floor(module: str) -> int:
    return FLOORS.get(room(module), TOP_FLOOR)


@cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "knit").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


@cache
def imports() -> tuple[Import, ...]:
    return tuple(i for name, path in modules().items() for i in _walk(name, ast.parse(path.read_text()), True))


def _walk(importer: str, node: ast.AST, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
        for name in _names(importer, child):
            yield Import(importer, getattr(child, "lineno", 0), name, at_import)
        yield from _walk(importer, child, at_import and not later and not typing_only)


def _names(importer: str, node: ast.AST) -> list[str]:
    """What an import statement names: for ``from a import b`` the module ``a.b`` if there is one, else ``a``."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.level == 0, f"{importer}:{node.lineno}: relative imports hide which room is meant"
    base = node.module or ""
    return [f"{base}.{a.name}" if f"{base}.{a.name}" in modules() else base for a in node.names]


def inside() -> list[Import]:
    return [i for i in imports() if i.imported == "knit" or i.imported.startswith("knit.")]


def test_rooms_import_only_from_lower_floors():
    """Rooms of the first and of the top floor may know each other; circles among modules are tested below."""
    wrong = []
    for i in inside():
        here, there = floor(i.importer), floor(i.imported)
        beside = here == there and room(i.importer) != room(i.imported) and here not in (1, TOP_FLOOR)
        if there > here or beside:
            wrong.append(f"{i} (floor {here} → {there})")
    assert not wrong, "\n".join(wrong)


def test_types_and_errors_import_no_other_room():
    wrong = [str(i) for i in inside() if i.importer in ("knit.types", "knit.errors") and i.imported != "knit.errors"]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", NEVER)
def test_rooms_keep_their_nevers(name):
    wrong = [
        str(i)
        for i in imports()
        if room(i.importer) == name and i.importer not in OWN_PROCESS and i.imported.split(".")[0] in NEVER[name]
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "package"), ONLY_IN)
def test_a_package_stays_in_the_files_made_for_it(name, package):
    users = {i.importer for i in imports() if room(i.importer) == name and i.imported.split(".")[0] == package}
    assert users <= ONLY_IN[name, package]


def test_modules_import_each_other_without_circles():
    """What runs at import; a package counts as its ``__init__``."""
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for i in inside():
        if i.at_import and i.imported != i.importer:
            graph[i.importer].add(i.imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " → ".join(reversed(error.args[1])))


def loaded_by(names: list[str], watched: set[str]) -> list[str]:
    """Which of the watched packages are loaded after importing ``names`` in a fresh interpreter."""
    code = f"import sys, {', '.join(names)}; print(*sorted({watched!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_control_plane_processes_load_no_engine():
    """Not even through a chain of imports: seconds and hundreds of MB for each of their processes."""
    rooms = {"types", "errors", "common", "config", "buffer", "store", "track", "rollout"}
    names = [n for n in modules() if (room(n) in rooms or n in ("knit.cli", "knit.driver")) and n not in OWN_PROCESS]
    assert loaded_by(names, ENGINES) == []


def test_decisions_load_no_ray():
    names = [n for n in modules() if room(n) in ("types", "errors", "config", "buffer", "track") or n == "knit.cli"]
    assert loaded_by([n for n in names if n != "knit.buffer.actor"], {*ENGINES, "ray"}) == []
