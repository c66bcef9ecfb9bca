from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from knit.config.schema import EngineConf, ModelConf
from knit.errors import EngineError
from knit.rollout import engine as engine_module
from knit.rollout.engine import SGLangServer, flags, server_args, server_env


def command(device: str, **engine: object) -> str:
    conf = EngineConf(**engine)
    args = server_args(
        conf, ModelConf(dtype="bfloat16"), device=device, model_path="/m", version=3, host="h", port=9, seed=4
    )
    return " ".join(args)


def test_command_line_on_cpu() -> None:
    assert command("cpu", context_length=256, max_running_requests=160, max_total_tokens=32768, mem_fraction=0.05) == (
        "--model-path /m --host h --port 9 --weight-version 3 --dtype bfloat16 --tp-size 1 --context-length 256 "
        "--max-running-requests 160 --max-total-tokens 32768 --mem-fraction-static 0.05 --random-seed 4 "
        "--skip-server-warmup --log-level-http warning --device cpu --attention-backend torch_native "
        "--sampling-backend pytorch "
        "--grammar-backend none --disable-cuda-graph --sleep-on-idle"
    )


def test_command_line_on_cuda_has_no_cpu_flags() -> None:
    assert command("cuda", tp=4) == (
        "--model-path /m --host h --port 9 --weight-version 3 --dtype bfloat16 --tp-size 4 --context-length 4096 "
        "--max-running-requests 128 --mem-fraction-static 0.8 --random-seed 4 --skip-server-warmup "
        "--log-level-http warning"
    )


def test_raw_arguments_win_over_what_knit_sets() -> None:
    line = command("cpu", extra={"attention-backend": "fa3", "sleep_on_idle": False, "chunked_prefill_size": 512})
    assert "--attention-backend fa3" in line
    assert "--sleep-on-idle" not in line
    assert line.endswith("--chunked-prefill-size 512")


def test_flags_of_every_kind_of_value() -> None:
    assert flags({"a_b": 1, "c": True, "d": False, "e": None, "f": [1, 2], "g": {"x": 1}}) == [
        "--a-b", "1", "--c", "--f", "1", "2", "--g", '{"x":1}',
    ]  # fmt: skip


def test_environment_of_a_tensor_parallel_cpu_server_gives_every_rank_its_core() -> None:
    env = server_env(EngineConf(tp=2, threads=1), "cpu")
    assert len(env["SGLANG_CPU_OMP_THREADS_BIND"].split("|")) == 2
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_env(EngineConf(), "cuda")


def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, timeout_s: float) -> SGLangServer:
    """A server whose process runs ``script`` instead of SGLang."""
    real = engine_module.subprocess.Popen
    monkeypatch.setattr(
        engine_module.subprocess, "Popen", lambda command, **kw: real([sys.executable, "-c", script], **kw)
    )
    conf = EngineConf(start_timeout_s=timeout_s)
    return SGLangServer("e0", conf, ModelConf(), device="cpu", log_path=str(tmp_path / "e0.log"))


def test_a_server_that_dies_while_starting_shows_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake_server(tmp_path, monkeypatch, "print('no such model'); raise SystemExit(3)", 20)
    with pytest.raises(EngineError, match=r"(?s)e0 ended with code 3 while starting.*no such model"):
        server.start("/m", 0)
    assert server.pid is None


def test_a_server_that_does_not_come_up_is_ended_at_the_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = fake_server(tmp_path, monkeypatch, "import time; time.sleep(60)", 1)
    started = time.monotonic()
    with pytest.raises(EngineError, match=r"not up within engine\.start_timeout_s=1"):
        server.start("/m", 0)
    assert time.monotonic() - started < 8
    assert server.pid is None
    assert not server.alive()


def test_a_port_that_was_taken_meanwhile_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = fake_server(tmp_path, monkeypatch, "print('[Errno 98] address already in use'); raise SystemExit(1)", 20)
    with pytest.raises(EngineError):
        server.start("/m", 0)
    assert server.starts == 2
