"""Stand-ins for unit tests of logic: an engine's HTTP side, a buffer and a store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

from knit.config.schema import KnitConf, ModelConf, SourceConf
from knit.recipes.quickstart.tokenizer import EOS_ID, save_tokenizer
from knit.store.unit import Receipt, Unit, receipt
from knit.types import Completion, EngineAddress, GroupReport, Ticket

Handler = Callable[[dict[str, Any]], Awaitable[web.StreamResponse | dict[str, Any]]]


def reply(tokens: Sequence[int], version: int = 0, finish: str = "stop", spans: Any = None) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": finish},
        "weight_version": str(version),
        "output_token_logprobs": [[-0.5 - 0.01 * t, t, None] for t in tokens],
    }
    if spans is not None:
        meta["weight_versions"] = spans
    return {"output_ids": list(tokens), "meta_info": meta}


class FakeEngine:
    """Answers ``/generate`` with what ``handler`` makes of the request; keeps the requests."""

    def __init__(self, name: str, handler: Handler) -> None:
        self.name, self.handler = name, handler
        self.requests: list[dict[str, Any]] = []
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/model_info", self._model_info)
        self.server = TestServer(app)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        answer = await self.handler(body)
        return web.json_response(answer) if isinstance(answer, dict) else answer

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({})

    @property
    def address(self) -> EngineAddress:
        return EngineAddress(self.name, str(self.server.make_url("")).rstrip("/"))


@asynccontextmanager
async def engines(*fakes: FakeEngine) -> AsyncIterator[list[EngineAddress]]:
    for fake in fakes:
        await fake.server.start_server()
    try:
        yield [fake.address for fake in fakes]
    finally:
        for fake in fakes:
            await fake.server.close()


async def right_away(body: dict[str, Any]) -> dict[str, Any]:
    return reply([1, 2, EOS_ID])


class FakeBuffer:
    """Hands out the given tickets once; remembers the order of everything it is told."""

    def __init__(self, tickets: Sequence[Ticket], log: list[str] | None = None) -> None:
        self.tickets = list(tickets)
        self.completions: list[Completion] = []
        self.groups: list[GroupReport] = []
        self.reports = 0
        self.log = log if log is not None else []
        self.most_asked = 0
        self.error: Exception | None = None

    async def acquire(self, worker: str, max_groups: int, wait_s: float) -> list[Ticket]:
        self.most_asked = max(self.most_asked, max_groups)
        taken, self.tickets = self.tickets[:max_groups], self.tickets[max_groups:]
        return taken

    async def report(self, worker: str, completions: list[Completion], groups: list[GroupReport]) -> None:
        if self.error:
            raise self.error
        self.reports += 1
        self.completions += completions
        self.groups += groups
        self.log += [f"report {g.group_id}" for g in groups]

    async def wait_for_groups(self, count: int, timeout_s: float = 10) -> list[GroupReport]:
        async with asyncio.timeout(timeout_s):
            while len(self.groups) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return self.groups


class FakeStore:
    def __init__(self, log: list[str] | None = None) -> None:
        self.units: dict[str, Unit] = {}
        self.log = log if log is not None else []
        self.error: Exception | None = None

    def write(self, units: Sequence[Unit]) -> list[Receipt]:
        if self.error:
            raise self.error
        self.units |= {u.key: u for u in units}
        self.log += [f"write {u.key}" for u in units]
        return [receipt(u) for u in units]


def ticket(group_id: int, size: int = 4, source: str = "a", prompt_index: int = 0) -> Ticket:
    return Ticket(group_id, source, prompt_index, 1, 0, size, 0, 0.0, 1e12)


def conf_in(folder: Path, **rollout: Any) -> KnitConf:
    """A configuration with a character tokenizer and two JSONL sources ``a`` and ``b``."""
    save_tokenizer(folder)
    (folder / "data.jsonl").write_text('{"prompt": "one", "label": "!"}\n{"prompt": "two", "label": "!"}\n')
    path = str(folder / "data.jsonl")
    reward = "tests.rollout.fakes:first_token_reward"
    conf = KnitConf(
        model=ModelConf(path=str(folder)),
        sources=[SourceConf(name=n, path=path, reward=reward, shuffle=False) for n in ("a", "b")],
    )
    conf.engine.start_timeout_s = 5
    conf.batch.group_size = 4
    for key, value in rollout.items():
        setattr(conf.rollout, key, value)
    return conf


def first_token_reward(sample: Any) -> float:
    return float(sample.tokens[0])
