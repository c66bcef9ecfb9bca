"""wandb behind three verbs. Silent, in the run directory, and it can never keep a run from ending."""

from __future__ import annotations

import contextlib
import logging
import netrc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import psutil

from knit.common.procs import terminate_tree
from knit.errors import ConfigError

log = logging.getLogger(__name__)

INIT_TIMEOUT_S = 60.0
QUIET: dict[str, Any] = {"disable_git": True, "disable_code": True, "x_disable_stats": True}
FINISH_TIMEOUT_S = {"offline": 10.0, "online": 120.0}


class WandbRun:
    """A wandb run on the one axis ``step``. ``mode``: offline | online; online without a key becomes offline."""

    def __init__(self, mode: str, folder: Path, project: str, name: str, config: Mapping[str, Any]) -> None:
        import wandb  # a second to import

        self.mode = mode if mode == "offline" or has_key() else "offline"
        before = _children()
        try:
            self._run = wandb.init(
                mode=self.mode,  # type: ignore[arg-type] # online | offline
                dir=str(folder),
                project=project,
                name=name,
                config=dict(config),
                settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S, **QUIET),
            )
        except wandb.errors.Error as error:
            raise ConfigError(f"track.wandb={mode}: wandb does not start ({error}); set track.wandb=offline") from error
        self._table = wandb.Table
        self._service = _children() - before
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self._run.log({"step": step, name: self._table(columns=list(columns), data=[list(r) for r in rows])})

    def summary(self, values: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(values))

    def finish(self, exit_code: int = 0) -> None:
        """Within a deadline; then its service, a process of ours, is ended and the loss is logged."""
        if not _in_time(lambda: self._run.finish(exit_code=exit_code), FINISH_TIMEOUT_S[self.mode]):
            log.error("wandb did not finish in %g s; it is ended, metrics.jsonl is whole", FINISH_TIMEOUT_S[self.mode])
            for pid in self._service:
                terminate_tree(pid, grace_s=1.0)


def has_key() -> bool:
    """Whether the environment or ``.netrc`` hold a key for wandb; asks nobody and prints nothing."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return host in netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def _in_time(call: Callable[[], None], timeout_s: float) -> bool:
    thread = threading.Thread(target=call, name="wandb-finish", daemon=True)
    thread.start()
    thread.join(timeout_s)
    return not thread.is_alive()


def _children() -> set[int]:
    with contextlib.suppress(psutil.Error):
        return {p.pid for p in psutil.Process().children()}
    return set()
