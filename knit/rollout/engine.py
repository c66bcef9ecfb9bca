"""One SGLang server as a supervised process: command line, start, health, stop, restart.

``SGLangServer`` is the plain class, ``EngineActor`` its Ray shell. Guarantees:

- ``start`` returns only when the server answers requests; otherwise it raises EngineError with the end of
  the server's log, after ``start_timeout_s`` at the latest, and leaves no process.
- Every start takes a new port, so a client that still holds the old address can never reach a restarted
  server before it has been told of it.
- ``stop`` returns within a few seconds and leaves no process of the server's tree.
- The server dies with the thread that started it.
- Neither this process nor its caller imports torch.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import orjson

from knit.common.net import free_port, node_ip
from knit.common.procs import die_with_parent, redirect_output, tail, terminate_tree
from knit.config.schema import EngineConf, ModelConf
from knit.errors import EngineError
from knit.types import EngineAddress

CPU_FLAGS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    # An idle scheduler polls without it, and eats most of a core.
    "sleep_on_idle": True,
}
CPU_ENV = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}
POLL_S = 0.25
STOP_GRACE_S = 1.5
MAX_MISSES = 3


def server_args(
    engine: EngineConf,
    model: ModelConf,
    *,
    device: str,
    model_path: str,
    version: int,
    host: str,
    port: int,
    seed: int | None = None,
) -> list[str]:
    """The flags of one server. ``engine.extra`` comes last and wins over what knit would set."""
    args: dict[str, Any] = {
        "model_path": model_path,
        "host": host,
        "port": port,
        "weight_version": version,
        "dtype": model.dtype,
        "tp_size": engine.tp,
        "context_length": engine.context_length,
        "max_running_requests": engine.max_running_requests,
        "max_total_tokens": engine.max_total_tokens,
        "mem_fraction_static": engine.mem_fraction,
        "random_seed": seed,
        "skip_server_warmup": True,
        "log_level_http": "warning",  # not one line per request
    }
    if device == "cpu":
        args |= CPU_FLAGS
    return flags(args | {key.replace("-", "_"): value for key, value in engine.extra.items()})


def flags(args: dict[str, Any]) -> list[str]:
    """``{"tp_size": 2, "sleep_on_idle": True, "seed": None}`` → ``["--tp-size", "2", "--sleep-on-idle"]``."""
    line: list[str] = []
    for key, value in args.items():
        if value is None or value is False:
            continue
        line.append("--" + key.replace("_", "-"))
        if value is True:
            continue
        values = value if isinstance(value, list | tuple) else [value]
        line += [orjson.dumps(v).decode() if isinstance(v, dict) else str(v) for v in values]
    return line


def server_env(engine: EngineConf, device: str) -> dict[str, str]:
    """The environment that a server needs on top of its parent's."""
    env = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": str(engine.threads),
        "PYTHONUNBUFFERED": "1",
    }
    if device == "cpu":
        env |= CPU_ENV
        if engine.tp > 1:  # one core list per rank, and no NCCL to look for
            cores = sorted(os.sched_getaffinity(0))
            env["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[r % len(cores)]) for r in range(engine.tp))
            env["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
    return env


class SGLangServer:
    """Owns one server process. Not safe for threads; start it from a thread that outlives it."""

    def __init__(
        self, name: str, engine: EngineConf, model: ModelConf, *, device: str, log_path: str, seed: int | None = None
    ) -> None:
        self.name = name
        self.engine = engine
        self.model = model
        self.device = device
        self.log_path = Path(log_path)
        self.seed = seed
        self.address: EngineAddress | None = None
        self.starts = 0
        self._misses = 0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self, model_path: str, version: int) -> EngineAddress:
        """Starts the server on ``model_path``, whose weights it will report as ``version``."""
        self.stop()
        for attempt in (1, 2):
            try:
                return self._start_once(model_path, version)
            except EngineError as error:
                # The port was free a moment ago; somebody else may have been faster.
                if attempt == 2 or "address already in use" not in str(error).lower():
                    raise
        raise AssertionError("unreachable")

    def restart(self, model_path: str, version: int) -> EngineAddress:
        """As ``start``; whatever is left of the old process is ended first."""
        return self.start(model_path, version)

    def alive(self, timeout_s: float = 8.0) -> bool:
        """False when the process has ended, or did not answer ``/health`` in time for three calls in a row."""
        if self._process is None or self.address is None or self._process.poll() is not None:
            return False
        self._misses = 0 if answers(self.address.url, timeout_s) else self._misses + 1
        return self._misses < MAX_MISSES and self._process.poll() is None

    def stop(self) -> None:
        """Ends the server's process tree. Idempotent."""
        process, self._process, self.address = self._process, None, None
        if process is None:
            return
        terminate_tree(process.pid, grace_s=STOP_GRACE_S)
        with contextlib.suppress(ProcessLookupError):  # what a killed server left behind in its group
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=5)

    def _start_once(self, model_path: str, version: int) -> EngineAddress:
        host, port = node_ip(), free_port()
        seed = None if self.seed is None else self.seed + self.starts  # a restart must not repeat old samples
        args = server_args(
            self.engine,
            self.model,
            device=self.device,
            model_path=model_path,
            version=version,
            host=host,
            port=port,
            seed=seed,
        )
        self._launch(args)
        self.starts += 1
        url = f"http://{host}:{port}"
        try:
            self._wait_until_up(url)
        except BaseException:
            self.stop()
            raise
        self._misses = 0
        self.address = EngineAddress(self.name, url, self.engine.tp)
        return self.address

    def _launch(self, args: list[str]) -> None:
        command = [sys.executable, "-m", "knit.rollout.server_main", *args]
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            log.write(f"$ {' '.join(command)}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | server_env(self.engine, self.device),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _wait_until_up(self, url: str) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.engine.start_timeout_s
        while time.monotonic() < deadline:
            code = self._process.poll()
            if code is not None:
                raise EngineError(f"{self.name} ended with code {code} while starting; {self._log_end()}")
            if answers(url, timeout_s=15.0):
                return
            time.sleep(POLL_S)
        limit = f"engine.start_timeout_s={self.engine.start_timeout_s:g}"
        raise EngineError(f"{self.name} was not up within {limit}; {self._log_end()}")

    def _log_end(self) -> str:
        return f"the end of {self.log_path}:\n{tail(self.log_path, 25)}"


def answers(url: str, timeout_s: float) -> bool:
    """Whether ``/health`` says 200. SGLang answers it by generating a token, or as it sees others arrive."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


class EngineActor:
    """Ray shell of one server. Wrap it with ``ray.remote`` in the placement group ``rollout``."""

    def __init__(
        self,
        log_path: str,
        name: str,
        engine: EngineConf,
        model: ModelConf,
        device: str,
        seed: int | None = None,
    ) -> None:
        redirect_output(log_path)
        self._server = SGLangServer(name, engine, model, device=device, log_path=log_path, seed=seed)

    def start(self, model_path: str, version: int) -> EngineAddress:
        return self._server.start(model_path, version)

    def restart(self, model_path: str, version: int) -> EngineAddress:
        return self._server.restart(model_path, version)

    def alive(self, timeout_s: float = 8.0) -> bool:
        return self._server.alive(timeout_s)

    def pid(self) -> int | None:
        return self._server.pid

    def stop(self) -> None:
        self._server.stop()
