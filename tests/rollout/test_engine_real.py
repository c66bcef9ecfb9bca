"""Properties of the real SGLang server, on CPU."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from knit.errors import EngineError
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


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def tree_of(server: SGLangServer) -> list[psutil.Process]:
    main = psutil.Process(server.pid)
    return [main, *main.children(recursive=True)]


def served_version(url: str) -> str:
    with urllib.request.urlopen(f"{url}/model_info", timeout=10) as reply:
        return str(json.loads(reply.read())["weight_version"])


def test_a_killed_server_is_seen_dead_restarts_with_its_version_and_stops_without_a_trace(
    own_server: SGLangServer, rollout_model: Path
) -> None:
    first = own_server.start(str(rollout_model), 0)
    tree = tree_of(own_server)
    assert len(tree) >= 3
    assert own_server.alive()
    os.kill(own_server.pid, signal.SIGKILL)
    time.sleep(0.5)
    assert not own_server.alive()
    second = own_server.restart(str(rollout_model), 7)
    assert not alive(tree)
    assert second.url != first.url
    assert served_version(second.url) == "7"
    tree = tree_of(own_server)
    started = time.monotonic()
    own_server.stop()
    assert time.monotonic() - started < 5
    assert not alive(tree)


@pytest.mark.slow
def test_sigterm_to_the_server_alone_ends_its_children(own_server: SGLangServer, rollout_model: Path) -> None:
    own_server.start(str(rollout_model), 0)
    main, *children = tree_of(own_server)
    main.send_signal(signal.SIGTERM)
    main.wait(5)
    _, left = psutil.wait_procs(children, timeout=5)
    assert not left
    assert not own_server.alive()


@pytest.mark.slow
@pytest.mark.parametrize("after_s", [3, 6, 9, 12, 15])
def test_a_server_killed_while_starting_leaves_no_child(
    own_server: SGLangServer, rollout_model: Path, after_s: float
) -> None:

    def start() -> None:
        with contextlib.suppress(EngineError):
            own_server.start(str(rollout_model), 0)

    starting = threading.Thread(target=start)
    starting.start()
    time.sleep(after_s)
    tree = tree_of(own_server)
    tree[0].kill()
    starting.join(20)
    _, left = psutil.wait_procs(tree, timeout=20)
    assert not alive(left)
