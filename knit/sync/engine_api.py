"""Blocking client for the control endpoints of one SGLang server, and calls to many of them at once.

Every call has a deadline. Every error is an :class:`EngineCallError`: it names the engine, the endpoint
and the engine's own text, and says whether the engine refused, is gone, or kept silent.
Written against SGLang 0.5.23 (``sglang/srt/entrypoints/http_server.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import StrEnum
from typing import Any, TypeVar

import httpx

from knit.errors import EngineError
from knit.types import EngineAddress

T = TypeVar("T")
TEXT_LIMIT = 500
CONNECT_TIMEOUT_S = 5.0


class Fault(StrEnum):
    """How a call failed."""

    REFUSED = "refused"  # the engine answered with an error: it lives
    GONE = "gone"  # nobody listens, or the connection broke
    SILENT = "silent"  # no answer within the deadline


class EngineCallError(EngineError):
    """One call to one engine failed."""

    def __init__(self, message: str, engine: str, fault: Fault) -> None:
        super().__init__(message, engine, fault)
        self.engine = engine
        self.fault = fault

    def __str__(self) -> str:
        return str(self.args[0])


class EngineClient:
    """Control endpoints of the engine at ``address``. Safe to use from several threads."""

    def __init__(self, address: EngineAddress) -> None:
        self.address = address
        self.name = address.name
        self._http = httpx.Client(base_url=address.url, trust_env=False)

    def close(self) -> None:
        self._http.close()

    # -- generation
    def pause(self, mode: str, timeout_s: float) -> None:
        """``retract`` and ``in_place`` keep unfinished requests, ``abort`` ends them."""
        self._post("/pause_generation", {"mode": mode}, timeout_s)

    def resume(self, timeout_s: float) -> None:
        self._post("/continue_generation", {}, timeout_s)

    # -- weights
    def version(self, timeout_s: float) -> str:
        """The weight version that the engine reports."""
        return str(self._request("GET", "/model_info", None, timeout_s)["weight_version"])

    def begin_update(self, timeout_s: float) -> None:
        self._post("/begin_weight_update", {}, timeout_s)

    def end_update(self, timeout_s: float) -> None:
        self._post("/end_weight_update", {}, timeout_s)

    def join_group(
        self, group: str, master: tuple[str, int], rank_offset: int, world_size: int, backend: str, timeout_s: float
    ) -> None:
        """The engine's TP ranks become ranks ``rank_offset…`` of a new process group."""
        body = {
            "master_address": master[0],
            "master_port": master[1],
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": group,
            "backend": backend,
        }
        self._post("/init_weights_update_group", body, timeout_s)

    def leave_group(self, group: str, timeout_s: float) -> None:
        self._post("/destroy_weights_update_group", {"group_name": group}, timeout_s)

    def receive_bucket(
        self, description: Mapping[str, Any], group: str, version: str | None, flush_cache: bool, timeout_s: float
    ) -> None:
        """Makes the engine take part in the broadcast of one flattened bucket and load it."""
        body = {
            **description,
            "load_format": "flattened_bucket",
            "group_name": group,
            "weight_version": version,
            "flush_cache": flush_cache,
        }
        self._post("/update_weights_from_distributed", body, timeout_s)

    def load_folder(self, path: str, version: str, flush_cache: bool, timeout_s: float) -> None:
        body = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        self._post("/update_weights_from_disk", body, timeout_s)

    # -- plumbing
    def _post(self, endpoint: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return self._request("POST", endpoint, body, timeout_s)

    def _request(self, method: str, endpoint: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        timeout = httpx.Timeout(max(timeout_s, 0.001), connect=max(min(timeout_s, CONNECT_TIMEOUT_S), 0.001))
        try:
            reply = self._http.request(method, endpoint, json=body, timeout=timeout)
        except httpx.TimeoutException as e:
            raise self._error(endpoint, f"did not answer within {timeout_s:.1f} s", Fault.SILENT) from e
        except httpx.TransportError as e:
            raise self._error(endpoint, f"is gone ({type(e).__name__}: {e})", Fault.GONE) from e
        if reply.status_code != 200:
            raise self._error(endpoint, f"answered HTTP {reply.status_code}: {_text(reply)}", Fault.REFUSED)
        return dict(reply.json())

    def _error(self, endpoint: str, what: str, fault: Fault) -> EngineCallError:
        return EngineCallError(f"engine {self.name} ({self.address.url}) {endpoint}: {what}", self.name, fault)


def _text(reply: httpx.Response) -> str:
    """The engine's message on one line, without the JSON around it."""
    try:
        body = reply.json()
    except ValueError:
        body = reply.text
    if isinstance(body, dict):
        body = body.get("message") or body.get("error") or body
    line = " ".join(str(body).split())
    return line if len(line) <= TEXT_LIMIT else line[:TEXT_LIMIT] + "…"


def start_calls(
    pool: ThreadPoolExecutor, clients: Iterable[EngineClient], call: Callable[[EngineClient], T]
) -> dict[str, Future[T]]:
    """Starts ``call`` on every engine at once; results by engine name."""
    return {c.name: pool.submit(call, c) for c in clients}


def failures(calls: Mapping[str, Future[T]]) -> dict[str, EngineCallError]:
    """Waits for all calls (each bounded by its own deadline) and returns those that failed.

    Any other exception than an EngineCallError is a fault of ours and is raised.
    """
    failed: dict[str, EngineCallError] = {}
    for name, future in calls.items():
        error = future.exception()
        if isinstance(error, EngineCallError):
            failed[name] = error
        elif error is not None:
            raise error
    return failed
