"""Properties of the real SGLang server, on CPU."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from knit.rollout.client import EngineClient, Generation, Sampling
from knit.rollout.engine import SGLangServer

pytestmark = pytest.mark.sglang
PROMPT = list(range(10, 30))


def post(url: str, path: str, **body: object) -> dict:
    request = urllib.request.Request(
        url + path, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        content = reply.read()
    return json.loads(content) if content.startswith(b"{") else {}


def hf_logprobs(model_path: Path, sequence: list[int]) -> list[float]:
    """Log-prob of tokens 1.. of a sequence under the Hugging Face model."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    ids = torch.tensor([sequence])
    with torch.no_grad():
        logprobs = model(ids).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


async def test_sampled_logprobs_and_scores_equal_those_of_hugging_face(
    rollout_server: SGLangServer, rollout_model: Path
) -> None:
    client = EngineClient()
    client.set_engines([rollout_server.address])
    try:
        out = await client.generate(PROMPT, Sampling(max_new_tokens=40))
        scores = await client.score([*PROMPT, *out.tokens])
        late = await client.score([*PROMPT, *out.tokens], start=len(PROMPT))
    finally:
        await client.close()
    reference = hf_logprobs(rollout_model, [*PROMPT, *out.tokens])
    n = len(PROMPT)
    assert out.logprobs == pytest.approx(reference[n - 1 :], abs=1e-5)
    assert scores == pytest.approx([0.0, *reference], abs=1e-5)
    assert late == pytest.approx([0.0] * n + reference[n - 1 :], abs=1e-5)


async def paused_generation(server: SGLangServer, mode: str, version: str) -> Generation:
    """A long generation with a pause, a new weight version and a continue in its middle."""
    url = server.address.url
    client = EngineClient()
    client.set_engines([server.address])
    request = asyncio.create_task(client.generate(PROMPT, Sampling(max_new_tokens=300, ignore_eos=True)))
    await asyncio.sleep(0.8)
    await asyncio.to_thread(post, url, "/pause_generation", mode=mode)
    await asyncio.sleep(0.3)
    assert not request.done()
    await asyncio.to_thread(post, url, "/update_weight_version", new_version=version, abort_all_requests=False)
    await asyncio.to_thread(post, url, "/continue_generation")
    try:
        return await asyncio.wait_for(request, 60)
    finally:
        await client.close()


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_a_generation_goes_on_after_a_pause_and_reports_both_versions(
    rollout_server: SGLangServer, rollout_model: Path, mode: str
) -> None:
    versions = {"retract": (0, 1), "in_place": (1, 2), "abort": (2, 3)}[mode]
    url = rollout_server.address.url
    await asyncio.to_thread(post, url, "/update_weight_version", new_version=str(versions[0]), abort_all_requests=False)
    out = await paused_generation(rollout_server, mode, str(versions[1]))
    assert len(out.tokens) == 300
    assert [r.version for r in out.versions] == list(versions)
    assert [out.versions[0].start, out.versions[1].end] == [0, 300]
    reference = hf_logprobs(rollout_model, [*PROMPT, *out.tokens])[len(PROMPT) - 1 :]
    assert out.logprobs == pytest.approx(reference, abs=1e-5)


def test_a_killed_server_is_seen_dead_and_restarts_with_its_version(
    rollout_server: SGLangServer, rollout_model: Path
) -> None:
    old_url = rollout_server.address.url
    tree = psutil.Process(rollout_server.pid).children(recursive=True)
    assert rollout_server.alive()
    os.kill(rollout_server.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert not rollout_server.alive()
    address = rollout_server.restart(str(rollout_model), 7)
    assert address.url != old_url
    with urllib.request.urlopen(f"{address.url}/model_info", timeout=10) as reply:
        assert json.loads(reply.read())["weight_version"] == "7"
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def test_stop_is_quick_and_leaves_no_process(rollout_server: SGLangServer, rollout_model: Path) -> None:
    main = psutil.Process(rollout_server.pid)
    tree = [main, *main.children(recursive=True)]
    started = time.monotonic()
    rollout_server.stop()
    assert time.monotonic() - started < 5
    assert not [p for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    rollout_server.start(str(rollout_model), 0)  # the fixture is shared


def test_sigterm_to_the_server_alone_ends_its_children(rollout_server: SGLangServer, rollout_model: Path) -> None:
    main = psutil.Process(rollout_server.pid)
    children = main.children(recursive=True)
    main.send_signal(signal.SIGTERM)
    main.wait(5)
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    rollout_server.start(str(rollout_model), 0)
