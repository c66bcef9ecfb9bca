from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web

from knit.errors import EngineError
from knit.rollout.client import EngineClient, Sampling, version_ranges
from knit.types import VersionRange
from tests.rollout.fakes import FakeEngine, engines, reply, right_away

PROMPT = [5, 6, 7]


def spans(*parts: tuple[int, int, int]) -> list[dict[str, Any]]:
    return [{"version": str(v), "start": s, "end": e} for v, s, e in parts]


def ranges(versions: tuple[VersionRange, ...]) -> list[tuple[int, int, int]]:
    return [(r.version, r.start, r.end) for r in versions]


async def test_tokens_logprobs_and_versions_come_out_as_the_engine_gave_them() -> None:
    async def handler(body: dict[str, Any]) -> dict[str, Any]:
        return reply([1, 2, 3], spans=spans((3, 0, 1), (4, 1, 3)))

    engine = FakeEngine("e0", handler)
    async with engines(engine) as addresses:
        client = EngineClient()
        client.set_engines(addresses)
        out = await client.generate(PROMPT, Sampling(max_new_tokens=8, temperature=0.7, stop_token_ids=(9,)))
        await client.close()
    assert out.tokens == (1, 2, 3)
    assert out.logprobs == (-0.51, -0.52, -0.53)
    assert ranges(out.versions) == [(3, 0, 1), (4, 1, 3)]
    assert out.finish_reason == "stop"
    sent = engine.requests[0]
    assert sent["input_ids"] == PROMPT
    assert sent["sampling_params"]["temperature"] == 0.7
    assert sent["sampling_params"]["stop_token_ids"] == [9]


async def test_an_aborted_request_goes_on_with_what_it_has_and_merges_versions() -> None:
    replies = [
        reply([], finish="abort"),
        reply([1, 2], version=1, finish="abort"),
        reply([3], version=1, finish="abort"),
        reply([4, 5], version=2, finish="length"),
    ]

    async def handler(body: dict[str, Any]) -> dict[str, Any]:
        return replies.pop(0)

    engine = FakeEngine("e0", handler)
    async with engines(engine) as addresses:
        client = EngineClient(backoff_s=0.01)
        client.set_engines(addresses)
        out = await client.generate(PROMPT, Sampling(max_new_tokens=5))
        await client.close()
    assert out.tokens == (1, 2, 3, 4, 5)
    assert ranges(out.versions) == [(1, 0, 3), (2, 3, 5)]
    assert (out.finish_reason, out.retries) == ("length", 0)
    assert engine.requests[-1]["input_ids"] == [*PROMPT, 1, 2, 3]
    assert engine.requests[-1]["sampling_params"]["max_new_tokens"] == 2


async def test_an_abort_at_the_token_limit_ends_the_generation() -> None:
    async def handler(body: dict[str, Any]) -> dict[str, Any]:
        return reply([1, 2], finish="abort")

    async with engines(FakeEngine("e0", handler)) as addresses:
        client = EngineClient()
        client.set_engines(addresses)
        out = await client.generate(PROMPT, Sampling(max_new_tokens=2))
        await client.close()
    assert (out.tokens, out.finish_reason) == ((1, 2), "length")


async def test_server_errors_and_broken_connections_are_retried_and_counted() -> None:
    calls = 0

    async def handler(body: dict[str, Any]) -> Any:
        nonlocal calls
        calls += 1
        if calls == 1:
            return web.json_response({"error": "updating weights"}, status=503)
        if calls == 2:
            raise asyncio.CancelledError  # the connection breaks without an answer
        return reply([1])

    async with engines(FakeEngine("e0", handler)) as addresses:
        client = EngineClient(backoff_s=0.01)
        client.set_engines(addresses)
        out = await client.generate(PROMPT, Sampling(max_new_tokens=8))
        await client.close()
    assert (out.tokens, out.retries, client.retries) == ((1,), 2, 2)


async def test_retries_are_bounded_and_the_error_names_the_engine() -> None:
    async def handler(body: dict[str, Any]) -> Any:
        return web.json_response({"error": "no"}, status=500)

    engine = FakeEngine("e0", handler)
    async with engines(engine) as addresses:
        client = EngineClient(max_retries=2, backoff_s=0.01)
        client.set_engines(addresses)
        with pytest.raises(EngineError, match=r"e0 answered 500.*attempt 3"):
            await client.generate(PROMPT, Sampling(max_new_tokens=8))
        await client.close()
    assert len(engine.requests) == 3


async def test_a_bad_request_is_not_repeated() -> None:
    async def handler(body: dict[str, Any]) -> Any:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    engine = FakeEngine("e0", handler)
    async with engines(engine) as addresses:
        client = EngineClient()
        client.set_engines(addresses)
        with pytest.raises(EngineError, match="too long"):
            await client.generate(PROMPT, Sampling(max_new_tokens=8))
        await client.close()
    assert len(engine.requests) == 1


async def test_a_dead_engine_costs_one_retry_and_then_waits_for_a_new_list() -> None:
    dead = FakeEngine("e0", right_away)
    async with engines(dead) as addresses:
        pass
    client = EngineClient(max_retries=1, backoff_s=0.01, engine_wait_s=5)
    client.set_engines(addresses)
    request = asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=8)))
    await asyncio.sleep(0.2)
    assert not request.done()
    async with engines(FakeEngine("e1", right_away)) as fresh:
        client.set_engines(fresh)
        out = await request
        await client.close()
    assert out.retries == 1


async def test_without_any_engine_the_wait_has_a_deadline_that_says_why() -> None:
    client = EngineClient(engine_wait_s=0.1)
    with pytest.raises(EngineError, match=r"no rollout engine was up for 0\.1 s: no engine is registered"):
        await client.generate(PROMPT, Sampling(max_new_tokens=8))
    await client.close()


async def test_requests_go_to_the_least_loaded_engine() -> None:
    gate = asyncio.Event()

    async def slow(body: dict[str, Any]) -> dict[str, Any]:
        await gate.wait()
        return reply([1])

    first, second = FakeEngine("e0", slow), FakeEngine("e1", slow)
    async with engines(first, second) as addresses:
        client = EngineClient()
        client.set_engines(addresses)
        tasks = [asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=8))) for _ in range(10)]
        await asyncio.sleep(0.2)
        assert (len(first.requests), len(second.requests)) == (5, 5)
        gate.set()
        await asyncio.gather(*tasks)
        await client.close()


async def test_scores_have_the_length_of_the_input_and_start_where_asked() -> None:
    async def handler(body: dict[str, Any]) -> dict[str, Any]:
        ids, first = body["input_ids"], body["logprob_start_len"]
        rows = [[None if k == first else -float(k), t, None] for k, t in enumerate(ids) if k >= first]
        return {"meta_info": {"input_token_logprobs": rows, "finish_reason": {"type": "length"}}}

    engine = FakeEngine("e0", handler)
    async with engines(engine) as addresses:
        client = EngineClient()
        client.set_engines(addresses)
        assert await client.score([7, 7, 7, 7]) == [0.0, -1.0, -2.0, -3.0]
        assert await client.score([7, 7, 7, 7], start=2) == [0.0, 0.0, -2.0, -3.0]
        await client.close()
    assert engine.requests[0]["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(
    "meta",
    [
        {"weight_version": "default"},
        {"weight_version": None},
        {"weight_versions": spans((1, 0, 2))},
        {"weight_versions": spans((1, 0, 2), (2, 3, 4))},
        {"weight_versions": spans((1, 1, 4))},
    ],
)
def test_a_reply_whose_tokens_have_no_known_version_is_an_error(meta: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="e0"):
        version_ranges(meta, 4, "e0", 0.0)
