"""Asynchronous client of the SGLang engines: token ids in, token ids out, each with its weight version.

Guarantees of ``generate``:

- The tokens are exactly the sampled ones, with their log-probs, and every one of them belongs to exactly one
  version range taken from the engine's reply. A reply that does not say so is an error, never a guess.
- A request that an engine aborts in the middle (a publish with ``pause_mode=abort``) goes on with prompt plus
  the tokens it has; the version ranges are merged.
- When the engine cannot be reached, dies or answers 5xx, the request is sent again, up to ``max_retries``
  times, to the least loaded engine that is up. While none is up it waits ``engine_wait_s`` at most for one
  to come back or for a new list of engines. Whatever else goes wrong raises EngineError with the engine's name.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson

from knit.errors import EngineError
from knit.types import EngineAddress, VersionRange

CONNECT_TIMEOUT_S = 10.0
PROBE_INTERVAL_S = 0.5
PROBE_TIMEOUT_S = 3.0
# Below uvicorn's 5 s: a kept connection must not be one that the server is just closing.
KEEPALIVE_S = 2.0


@dataclass(frozen=True, slots=True)
class Sampling:
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def payload(self, max_new_tokens: int) -> dict[str, Any]:
        return {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stop_token_ids": list(self.stop_token_ids),
            "ignore_eos": self.ignore_eos,
        }


@dataclass(frozen=True, slots=True)
class Generation:
    """What was sampled: ``tokens`` and ``logprobs`` have one length, ``versions`` cover it without gaps."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRange, ...]
    finish_reason: str  # "stop" | "length"
    retries: int = 0


class Unreachable(Exception):
    """The engine could not be asked, or went away, or answered 5xx: ask again."""


@dataclass(slots=True)
class _Engine:
    address: EngineAddress
    in_flight: int = 0
    up: bool = True
    error: str = ""


@dataclass(slots=True)
class _Partial:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionRange] = field(default_factory=list)

    def extend(self, tokens: list[int], logprobs: list[float], versions: list[VersionRange]) -> None:
        offset = len(self.tokens)
        self.tokens += tokens
        self.logprobs += logprobs
        for r in versions:
            shifted = replace(r, start=r.start + offset, end=r.end + offset)
            last = self.versions[-1] if self.versions else None
            if last and last.version == shifted.version:
                self.versions[-1] = replace(last, end=shifted.end, end_time_s=shifted.end_time_s)
            else:
                self.versions.append(shifted)

    def finish(self, reason: str, retries: int) -> Generation:
        return Generation(tuple(self.tokens), tuple(self.logprobs), tuple(self.versions), reason, retries)


class EngineClient:
    """Shared by all trajectories of one worker; belongs to one event loop."""

    def __init__(
        self,
        *,
        max_retries: int = 3,
        engine_wait_s: float = 300.0,
        request_timeout_s: float = 600.0,
        backoff_s: float = 0.2,
    ) -> None:
        self.max_retries = max_retries
        self.engine_wait_s = engine_wait_s
        self.request_timeout_s = request_timeout_s
        self.backoff_s = backoff_s
        self.retries = 0  # engine failures survived so far
        self.sampled_tokens = 0
        self._engines: dict[str, _Engine] = {}
        self._changed = asyncio.Event()
        self._session: aiohttp.ClientSession | None = None
        self._prober: asyncio.Task[None] | None = None

    def set_engines(self, addresses: Sequence[EngineAddress]) -> None:
        """The engines that may be asked from now on. Requests under way elsewhere end as they may."""
        old = self._engines
        self._engines = {a.url: old.get(a.url) or _Engine(a) for a in addresses}
        self._wake()

    @property
    def in_flight(self) -> int:
        return sum(e.in_flight for e in self._engines.values())

    async def generate(self, input_ids: Sequence[int], sampling: Sampling) -> Generation:
        got, retries = _Partial(), 0
        while True:
            left = sampling.max_new_tokens - len(got.tokens)
            if left <= 0:
                return got.finish("length", retries)
            body = {
                "input_ids": [*input_ids, *got.tokens],
                "sampling_params": sampling.payload(left),
                "return_logprob": True,
            }
            try:
                name, reply = await self._ask(body)
            except Unreachable as error:
                retries += 1
                self.retries += 1
                if retries > self.max_retries:
                    raise EngineError(f"{error} (attempt {retries}, rollout.max_retries={self.max_retries})") from None
                await asyncio.sleep(self.backoff_s * 2 ** (retries - 1))
                continue
            tokens, logprobs, versions = parse_reply(reply, name)
            self.sampled_tokens += len(tokens)
            got.extend(tokens, logprobs, versions)
            reason = reply["meta_info"]["finish_reason"] or {}
            if reason.get("type") != "abort":
                return got.finish(str(reason.get("type")), retries)
            if not tokens:  # aborted before it ran: do not ask again at once
                await asyncio.sleep(self.backoff_s)

    async def score(self, input_ids: Sequence[int], start: int = 0) -> list[float]:
        """Log-prob of every token given those before it, at temperature 1, from one prefill.

        As long as ``input_ids``; 0 at position 0 and before ``start``.
        """
        body = {
            "input_ids": list(input_ids),
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": max(start - 1, 0),
        }
        for attempt in range(self.max_retries + 1):
            try:
                name, reply = await self._ask(body)
                return prompt_logprobs(reply, name, len(input_ids), start)
            except Unreachable as error:
                if attempt == self.max_retries:
                    raise EngineError(str(error)) from None
                await asyncio.sleep(self.backoff_s * 2**attempt)
        raise AssertionError("unreachable")

    async def close(self) -> None:
        if self._prober:
            self._prober.cancel()
        if self._session:
            await self._session.close()

    async def _ask(self, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Sends one request to the least loaded engine. Raises Unreachable (ask again) or EngineError (don't)."""
        engine = await self._pick()
        engine.in_flight += 1
        try:
            url = f"{engine.address.url}/generate"
            headers = {"Content-Type": "application/json"}
            async with self._http().post(url, data=orjson.dumps(body), headers=headers) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            message = f"{engine.address.name} at {engine.address.url}: {type(error).__name__}: {error}"
            self._mark_down(engine, message)
            raise Unreachable(message) from error
        finally:
            engine.in_flight -= 1
        if status == 200:
            return engine.address.name, orjson.loads(content)
        message = f"{engine.address.name} answered {status}: {content[:300].decode(errors='replace')}"
        if status >= 500 or status == 429:
            raise Unreachable(message)
        raise EngineError(message)

    async def _pick(self) -> _Engine:
        deadline = time.monotonic() + self.engine_wait_s
        while True:
            up = [e for e in self._engines.values() if e.up]
            if up:
                return min(up, key=lambda e: e.in_flight)
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                known = "; ".join(e.error for e in self._engines.values()) or "no engine is registered"
                raise EngineError(f"no rollout engine was up for {self.engine_wait_s:g} s: {known}") from None

    def _mark_down(self, engine: _Engine, error: str) -> None:
        """Out of traffic until a probe reaches it: one caller's failure must not cost all others a retry."""
        engine.up, engine.error = False, error
        if self._prober is None or self._prober.done():
            self._prober = asyncio.create_task(self._probe_until_up())

    async def _probe_until_up(self) -> None:
        while down := [e for e in self._engines.values() if not e.up]:
            for engine in down:
                engine.up = await self._reachable(engine.address)
                if engine.up:
                    self._wake()
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _reachable(self, address: EngineAddress) -> bool:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self._http().get(f"{address.url}/model_info", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    def _wake(self) -> None:
        self._changed.set()

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S),
                timeout=aiohttp.ClientTimeout(total=self.request_timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            )
        return self._session


def parse_reply(reply: dict[str, Any], engine: str) -> tuple[list[int], list[float], list[VersionRange]]:
    """Tokens, log-probs and version ranges of one reply of ``/generate``."""
    meta = reply["meta_info"]
    rows = meta.get("output_token_logprobs") or []
    tokens = [int(row[1]) for row in rows]
    logprobs = [float(row[0]) for row in rows]
    if reply.get("output_ids") is not None and list(reply["output_ids"]) != tokens:
        raise EngineError(f"{engine}: token ids and log-probs of a reply do not belong together")
    return tokens, logprobs, version_ranges(meta, len(tokens), engine, time.time())


def version_ranges(meta: dict[str, Any], tokens: int, engine: str, now_s: float) -> list[VersionRange]:
    """The version ranges of a reply; raises EngineError unless they cover its tokens without gap or overlap."""
    if tokens == 0:
        return []
    spans = meta.get("weight_versions") or [{"version": meta.get("weight_version"), "start": 0, "end": tokens}]
    ranges = []
    for span in spans:
        try:
            version = int(span["version"])
        except (TypeError, ValueError):
            raise EngineError(f"{engine} reports weight version {span['version']!r}, which is no number") from None
        if span["end"] > span["start"]:
            ranges.append(VersionRange(version, int(span["start"]), int(span["end"]), now_s))
    starts, ends = [r.start for r in ranges], [r.end for r in ranges]
    if not ranges or starts != [0, *ends[:-1]] or ends[-1] != tokens:
        raise EngineError(f"{engine}: weight version ranges {spans} do not cover the {tokens} sampled tokens")
    return ranges


def prompt_logprobs(reply: dict[str, Any], engine: str, tokens: int, start: int) -> list[float]:
    rows = reply["meta_info"].get("input_token_logprobs") or []
    missing = tokens - len(rows)
    if missing > max(start, 1):
        raise EngineError(f"{engine} scored {len(rows)} of {tokens} tokens")
    scored = [0.0] * missing + [0.0 if row[0] is None else float(row[0]) for row in rows]
    first = max(start, 1)
    return [0.0] * min(first, tokens) + scored[first:]
