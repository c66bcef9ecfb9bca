import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from knit.common.child import run_module
from knit.common.net import free_port, node_ip
from knit.common.procs import die_with_parent, tail, terminate_tree


def wait_until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def start_tree(trap=""):
    """A shell with a child; both live for a minute."""
    process = subprocess.Popen(["bash", "-c", f"{trap} sleep 60 & echo $!; sleep 60"], stdout=subprocess.PIPE)
    return process, int(process.stdout.readline())


def test_a_tree_is_ended_and_its_exit_code_is_left_to_its_owner():
    process, child = start_tree()
    terminate_tree(process.pid, grace_s=1.0)
    assert gone(child)
    assert process.wait(1) == -signal.SIGTERM


def test_what_ignores_sigterm_is_killed_after_the_grace():
    process, child = start_tree("trap '' TERM;")
    started = time.monotonic()
    terminate_tree(process.pid, grace_s=0.3)
    assert 0.3 <= time.monotonic() - started < 3
    assert gone(child)
    assert process.wait(1) == -signal.SIGKILL


def test_ending_what_is_gone_is_no_error():
    process = subprocess.Popen(["true"])
    process.wait()
    terminate_tree(process.pid)


def test_a_child_dies_with_its_parent():
    code = (
        "import subprocess, time; from knit.common.procs import die_with_parent\n"
        "p = subprocess.Popen(['sleep', '60'], preexec_fn=die_with_parent); print(p.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    child = int(parent.stdout.readline())
    assert not gone(child)
    parent.kill()
    parent.wait()
    wait_until(lambda: gone(child))


def test_output_of_python_native_code_and_children_goes_to_the_log(tmp_path):
    log = tmp_path / "logs" / "a.log"
    code = (
        "import os, sys, subprocess; from knit.common.procs import redirect_output\n"
        f"redirect_output({str(log)!r}); print('python'); os.write(2, b'native\\n'); subprocess.run(['echo', 'child'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert done.stdout == done.stderr == b""
    assert log.read_text().split() == ["python", "native", "child"]


def test_tail_shows_the_last_lines(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("".join(f"{n}\n" for n in range(50_000)))
    assert tail(log, 2) == "49998\n49999"
    assert tail(tmp_path / "none.log") == ""


def test_a_free_port_can_be_bound():
    assert 0 < free_port() < 65536
    assert node_ip().count(".") == 3


def test_a_module_runs_in_a_process_of_its_own_and_is_ended_at_its_deadline(tmp_path, monkeypatch):
    (tmp_path / "module_of_test.py").write_text(
        "import pickle, sys, time\n"
        "argument = pickle.load(sys.stdin.buffer); print('noise')\n"
        "open(sys.argv[1], 'w').write(argument['say']); time.sleep(argument['sleep'])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    code, result = run_module("module_of_test", {"say": "hi", "sleep": 0}, 10.0, subprocess.DEVNULL)
    assert (code, result) == (0, b"hi")
    with pytest.raises(TimeoutError, match=r"module_of_test took longer than 0\.5 s"):
        run_module("module_of_test", {"say": "hi", "sleep": 60}, 0.5, subprocess.DEVNULL)
    assert not [p for p in psutil.Process().children() if "module_of_test" in " ".join(p.cmdline())]


def test_die_with_parent_is_a_preexec_function():
    done = subprocess.run(["true"], preexec_fn=die_with_parent, check=False, env=dict(os.environ))
    assert done.returncode == 0
