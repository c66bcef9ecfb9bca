"""Before anything is started: do the functions named in the configuration import, can the sources be read?

It is tried in a process of its own (``python -m knit.preflight``): a user's reward may import torch, hang or
write to stdout, and none of that should stay with the driver.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path

import orjson

from knit.common.child import run_module
from knit.common.paths import load_path
from knit.common.procs import tail
from knit.config.schema import KnitConf
from knit.config.validate import all_sources, python_paths
from knit.errors import ConfigError

TIMEOUT_S = 120.0


def check(conf: KnitConf) -> None:
    """Raises :class:`ConfigError`, one line per problem, if something does not import or cannot be read."""
    with tempfile.NamedTemporaryFile(prefix="knit-preflight-") as output:
        try:
            code, result = run_module("knit.preflight", conf, TIMEOUT_S, output.file)
        except TimeoutError as error:
            raise ConfigError(
                f"importing the configured functions and reading the sources took more than {TIMEOUT_S:g} s; "
                f"one of these blocks: {', '.join(path for _, path in python_paths(conf))}"
            ) from error
        if code != 0 or not result:
            last = tail(output.name, 1)
            raise ConfigError(f"importing the configured functions ended the process (exit code {code}): {last}")
    problems = orjson.loads(result)
    if problems:
        raise ConfigError("\n".join(problems))


def problems_of(conf: KnitConf) -> list[str]:
    """Imports what the rollout side uses, lets each source look at its data and admission at its rules."""
    from knit.buffer.rules import resolve_rules
    from knit.rollout.prompts import validate_source

    found: list[str] = []
    broken: set[str] = set()
    for key, path in python_paths(conf, torch=False):
        try:
            if not callable(load_path(path)):
                raise ConfigError(f"{path} is not callable")
        except ConfigError as error:
            found.append(f"{key}={_once(path, str(error))}")
            broken.add(key.rpartition(".")[0])
    for key, source in all_sources(conf):
        if key in broken:
            continue
        try:
            validate_source(source)
        except ConfigError as error:
            found.append(str(error).replace(f"sources.{source.name}", key, 1) if key[0] == "e" else str(error))
    if conf.debug.mode != "train_only":
        try:
            resolve_rules(conf)
        except ConfigError as error:
            found.append(str(error))
    return list(dict.fromkeys(found))


def _once(path: str, message: str) -> str:
    return message if message.startswith(path) else f"{path}: {message}"


def main() -> None:
    conf = pickle.loads(sys.stdin.buffer.read())
    Path(sys.argv[1]).write_bytes(orjson.dumps(problems_of(conf)))


if __name__ == "__main__":
    main()
