"""Runs a recipe's ``prepare`` function: it makes the models or data that the recipe needs and does not find.

The function ``f(conf: KnitConf) -> dict`` runs in a process of its own, so it may use torch freely. It returns
the settings that it decided, ``{"model.path": "…"}``; what it prints goes to ``logs/prepare.log``.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from knit.common.child import run_module
from knit.common.paths import load_path
from knit.common.procs import tail
from knit.config.load import with_values
from knit.config.schema import KnitConf
from knit.errors import ConfigError, KnitError, RunError


def prepare(conf: KnitConf, logs_dir: Path, note: Callable[[str], None]) -> KnitConf:
    """The configuration with what ``prepare`` decided; the same one when the recipe has none.

    Raises :class:`ConfigError` as the function raises it, :class:`RunError` with the end of its log when it
    fails otherwise, takes longer than ``prepare_timeout_s`` or leaves no model.
    """
    if conf.prepare is None:
        return conf
    log = logs_dir / "prepare.log"
    note(f"preparing: {conf.prepare} (log: {log})")
    with open(log, "ab") as output:
        try:
            code, result = run_module("knit.prepare", conf, conf.prepare_timeout_s, output)
        except TimeoutError as error:
            raise RunError(
                f"prepare={conf.prepare} took longer than prepare_timeout_s={conf.prepare_timeout_s:g}; "
                f"end of {log}:\n{tail(log)}"
            ) from error
    if code == ConfigError.exit_code and result:
        raise ConfigError(orjson.loads(result)["error"])
    if code != 0:
        raise RunError(f"prepare={conf.prepare} failed with exit code {code}; end of {log}:\n{tail(log)}")
    prepared = with_values(conf, orjson.loads(result) if result else {})
    if prepared.model.path is None:
        raise RunError(f"prepare={conf.prepare} ended well but set no model.path, and the configuration has none")
    return prepared


def main() -> int:
    conf = pickle.loads(sys.stdin.buffer.read())
    code = 0
    result: dict[str, Any] = {}
    try:
        result = load_path(conf.prepare)(conf) or {}
    except KnitError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        code, result = error.exit_code, {"error": str(error)}
    Path(sys.argv[1]).write_bytes(orjson.dumps(result))
    return code


if __name__ == "__main__":
    sys.exit(main())
