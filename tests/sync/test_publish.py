"""Publishing to two real SGLang servers: what it leaves behind when it works, and when it does not."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from knit.config.schema import SyncConf
from knit.errors import PublishError
from knit.sync.engine_api import EngineClient
from knit.sync.publisher import WeightPublisher
from tests.sync.reference import PROMPTS, largest_difference, named_tensors, random_model, stream

pytestmark = pytest.mark.sglang
SMALL_MB = 0.04  # eight buckets for the tiny model


@pytest.fixture
def engines(servers):
    """Both engines alive, on whatever version they have."""
    return [s.address for s in servers]


@pytest.fixture
def publisher(servers, model_folder, tmp_path):
    """Makes publishers that carry on from the version the engines are at; ends them with the test."""
    made = []

    def make(
        transport="distributed", pause_mode="retract", timeout_s=40.0, bucket_mb=SMALL_MB, model_path=model_folder
    ):
        conf = SyncConf(transport=transport, bucket_mb=bucket_mb, timeout_s=timeout_s)
        version = max(engine_version(s.address) for s in servers)
        made.append(
            WeightPublisher(conf, pause_mode=pause_mode, model_path=model_path, folder=tmp_path, version=version)
        )
        return made[-1]

    yield make
    for p in made:
        p.close()


def engine_version(address) -> int:
    client = EngineClient(address)
    try:
        return int(client.version(10))
    finally:
        client.close()


class Requests:
    """Long requests to every engine; all are being answered when the constructor returns."""

    def __init__(self, engines, tokens=400):
        jobs = [(e.url, prompt, threading.Event()) for e in engines for prompt in PROMPTS]
        self._pool = ThreadPoolExecutor(len(jobs))
        self._replies = [self._pool.submit(stream, url, prompt, tokens, flows.set) for url, prompt, flows in jobs]
        assert all(flows.wait(60) for _, _, flows in jobs)

    def join(self):
        replies = [r.result(timeout=120) for r in self._replies]
        self._pool.shutdown()
        return replies


def export(model, action):
    """The model's tensors; ``action`` happens when some buckets are loaded already and others are not."""
    named = named_tensors(model)
    for i, item in enumerate(named):
        if i == len(named) - 7:
            action()
        yield item


@pytest.mark.parametrize("transport", ["distributed", "disk"])
def test_after_a_publish_every_engine_runs_exactly_the_published_weights(publisher, engines, transport):
    p = publisher(transport)
    before = p.version
    for seed in (1, 2):
        model = random_model(seed)
        result = p.publish(p.version + 1, named_tensors(model), engines)
        assert result.size_bytes == sum(t.nbytes for _, t in named_tensors(model))
        for engine in engines:
            assert largest_difference(engine.url, model) < 1e-5
    assert p.version == before + 2
    assert [engine_version(e) for e in engines] == [before + 2] * 2


def test_the_group_is_formed_again_when_the_engine_list_changes(publisher, engines):
    p = publisher()
    for some in (engines[:1], engines, engines[1:], engines):
        model = random_model(p.version)
        p.publish(p.version + 1, named_tensors(model), some)
        for engine in some:
            assert largest_difference(engine.url, model) < 1e-5


@pytest.mark.parametrize("pause_mode", ["retract", "in_place"])
def test_requests_in_flight_go_on_and_carry_both_versions(publisher, engines, pause_mode):
    p = publisher(pause_mode=pause_mode)
    p.publish(p.version + 1, named_tensors(random_model(3)), engines)
    requests = Requests(engines)
    p.publish(p.version + 1, named_tensors(random_model(4)), engines)
    replies = requests.join()
    for reply in replies:
        ranges = reply["meta_info"]["weight_versions"]
        assert [r["version"] for r in ranges] == [str(p.version - 1), str(p.version)]
        assert ranges[-1]["end"] == 400


def test_abort_ends_requests_in_flight_and_the_engine_generates_again(publisher, engines):
    p = publisher(pause_mode="abort")
    requests = Requests(engines)
    model = random_model(5)
    p.publish(p.version + 1, named_tensors(model), engines)
    assert all(r["meta_info"]["finish_reason"]["type"] == "abort" for r in requests.join())
    assert largest_difference(engines[0].url, model) < 1e-5


def test_an_engine_that_refuses_in_the_middle_ends_the_publish_and_keeps_the_old_weights(publisher, engines):
    p = publisher()
    old = random_model(6)
    p.publish(p.version + 1, named_tensors(old), engines)
    before = p.version

    def close_session():  # behind the publisher's back: the next bucket is refused
        client = EngineClient(engines[1])
        client.end_update(10)
        client.close()

    requests = Requests(engines, 200)
    started = time.monotonic()
    with pytest.raises(PublishError, match=r"engine-1 .*must run between .*kept version") as e:
        p.publish(before + 1, export(random_model(7), close_session), engines)
    took_s = time.monotonic() - started
    assert took_s < 10
    assert (e.value.failed, e.value.confirmed) == (("engine-1",), ())
    assert p.version == before
    assert len(requests.join()) == 6
    for engine in engines:
        assert engine_version(engine) == before
        assert largest_difference(engine.url, old) < 1e-5

    p.publish(before + 1, named_tensors(random_model(7)), engines)
    assert largest_difference(engines[1].url, random_model(7)) < 1e-5


def test_tensors_that_the_engine_cannot_load_are_reported_with_its_own_words(publisher, engines):
    p = publisher()
    old = random_model(8)
    p.publish(p.version + 1, named_tensors(old), engines)
    p._shapes = {}  # without our own check
    exported = iter(named_tensors(random_model(9, vocab_size=128)))
    with pytest.raises(PublishError, match=r"engine engine-0 .*HTTP 400: Failed to update") as e:
        p.publish(p.version + 1, exported, engines)
    assert e.value.failed == ("engine-0", "engine-1")
    assert next(exported, None) is None, "the export is always consumed: it is a collective"
    for engine in engines:
        assert engine_version(engine) == p.version
        assert largest_difference(engine.url, old) < 1e-5


def test_a_tensor_of_another_shape_than_the_models_never_reaches_an_engine(publisher, engines):
    p = publisher()
    old = random_model(17)
    p.publish(p.version + 1, named_tensors(old), engines)
    bad = [(n, t[:, :-1] if "1.self_attn.o_proj" in n else t) for n, t in named_tensors(random_model(18))]
    with pytest.raises(PublishError, match=r"o_proj.weight \[64, 63\], but \[64, 64\] in "):
        p.publish(p.version + 1, bad, engines)
    for engine in engines:
        assert engine_version(engine) == p.version
        assert largest_difference(engine.url, old) < 1e-5


def test_an_error_of_the_export_leaves_the_engines_at_work_on_the_old_weights(publisher, engines):
    p = publisher()
    old = random_model(10)
    p.publish(p.version + 1, named_tensors(old), engines)

    def fail():
        raise FloatingPointError("not today")

    with pytest.raises(FloatingPointError, match="not today"):
        p.publish(p.version + 1, export(random_model(11), fail), engines)
    assert largest_difference(engines[0].url, old) < 1e-5
    p.publish(p.version + 1, named_tensors(old), engines)


def test_versions_only_grow(publisher, engines):
    p = publisher()
    with pytest.raises(PublishError, match="versions only grow"):
        p.publish(p.version, named_tensors(random_model(1)), engines)
    assert largest_difference(engines[0].url, random_model(1)) > 1e-3


def test_a_silent_engine_ends_the_publish_by_its_deadline_and_may_come_back(publisher, servers, engines):
    p = publisher(timeout_s=16.0)
    p.publish(p.version + 1, named_tensors(random_model(12)), engines)
    processes = [psutil.Process(servers[1].pid), *psutil.Process(servers[1].pid).children(recursive=True)]

    def suspend():
        for process in processes:
            process.suspend()

    started = time.monotonic()
    try:
        with pytest.raises(PublishError, match=r"engine engine-1 .*did not answer") as e:
            p.publish(p.version + 1, export(random_model(13), suspend), engines)
        took_s = time.monotonic() - started
        assert e.value.failed == ("engine-1",)
        assert largest_difference(engines[0].url, random_model(12)) < 1e-5
    finally:
        for process in processes:
            process.resume()
    assert took_s < 16.5
    time.sleep(1.0)
    p.publish(p.version + 1, named_tensors(random_model(13)), engines)
    assert largest_difference(engines[1].url, random_model(13)) < 1e-5


def test_a_killed_engine_is_named_the_others_go_on_and_it_comes_back_with_the_published_weights(
    publisher, servers, engines, tmp_path
):
    p = publisher()
    old = random_model(14)
    p.publish(p.version + 1, named_tensors(old), engines)
    before = p.version

    def kill():
        os.killpg(servers[1].pid, signal.SIGKILL)

    requests = Requests(engines[:1], 200)
    started = time.monotonic()
    with pytest.raises(PublishError, match=r"engine engine-1 .*is gone") as e:
        p.publish(before + 1, export(random_model(15), kill), engines)
    took_s = time.monotonic() - started
    assert took_s < 10
    assert e.value.failed == ("engine-1",)
    assert len(requests.join()) == 3
    assert largest_difference(engines[0].url, old) < 1e-5

    with pytest.raises(PublishError, match="engine-1"):
        p.publish(before + 1, named_tensors(random_model(15)), engines)
    new = random_model(15)
    p.publish(before + 1, named_tensors(new), engines[:1])
    assert largest_difference(engines[0].url, new) < 1e-5

    assert p.save_published(tmp_path / "start") == p.version
    address = servers[1].restart(str(tmp_path / "start"), p.version)
    assert engine_version(address) == p.version
    assert largest_difference(address.url, new) < 1e-5
    newest = random_model(16)
    p.publish(p.version + 1, named_tensors(newest), [engines[0], address])
    assert largest_difference(address.url, newest) < 1e-5
