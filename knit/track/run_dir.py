"""The folder of a run: resolved config, versions, logs, metrics, events, summary."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from knit.config.load import to_yaml
from knit.config.resolved import Resolved
from knit.config.schema import KnitConf
from knit.errors import ConfigError

log = logging.getLogger("knit")

PACKAGES = ("knit", "ray", "sglang", "torch", "megatron-core", "transformers", "numpy", "wandb", "reasoning-gym")
TRACEBACK_NOTE = "traceback: "
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def create_run_dir(conf: KnitConf, resolved: Resolved) -> Path:
    """Makes ``resolved.run_dir`` with ``config.yaml``, ``versions.json`` and ``logs/``; returns it.

    ``config.yaml`` works as a recipe: ``knit train recipe=RUN_DIR/config.yaml`` gives the same settings.
    Raises :class:`ConfigError` when a run has written metrics there, or the folder cannot be made.
    """
    folder = resolved.run_dir
    metrics = folder / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise ConfigError(f"track.dir={folder} holds the metrics of an earlier run; choose another folder or remove it")
    try:
        resolved.logs_dir.mkdir(parents=True, exist_ok=True)
        write_config(conf, resolved)
        (folder / "versions.json").write_bytes(orjson.dumps(versions(), option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise ConfigError(f"track.dir={folder}: cannot write there ({error.strerror})") from error
    return folder


def write_config(conf: KnitConf, resolved: Resolved) -> None:
    """Again, when ``prepare`` has decided some settings."""
    (resolved.run_dir / "config.yaml").write_text(to_yaml(conf))


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Messages of ``logging`` in this process, warnings of other packages included, go to ``path``.

    An error that leaves the block is written there with its traceback and carries a note of the path.
    """
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    log.setLevel(logging.INFO)
    logging.captureWarnings(True)
    try:
        yield
    except Exception as error:
        log.exception("the run ends")
        error.add_note(f"{TRACEBACK_NOTE}{path}")
        raise
    finally:
        logging.captureWarnings(False)
        logging.getLogger().removeHandler(handler)
        handler.close()


def versions() -> dict[str, str | None]:
    """Versions of Python, of the packages that matter (null: not installed) and of knit's source."""
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return {**found, "commit": source_commit(), "command": " ".join(sys.argv)}


def source_commit() -> str | None:
    """The git commit knit runs from, ``+changes`` behind it when files differ; None outside a checkout."""
    here = Path(__file__).resolve().parents[2]
    if not (here / ".git").exists():  # installed: a repository further up is somebody else's
        return None
    commit = _git(here, "rev-parse", "HEAD")
    if commit is None:
        return None
    return commit + ("+changes" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-c", f"safe.directory={folder}", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):  # no git here: the run does not depend on it
        return None
    return done.stdout.strip() if done.returncode == 0 else None
