"""The set-up's decisions, on a copy of its files with a recorded stand-in for Python and pip. Nothing is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOLS = """
    awk basename bash cat cp cut df dirname du env find flock grep id mkdir mktemp mv rm sed sha256sum sleep sort tail
    xargs
"""
FAKE_PYTHON = r"""#!/bin/bash
echo "$*" >>"$CALLS"
case "$*" in
  *"-m venv"*)
    folder=${@: -1}
    rm -rf "$folder" && mkdir -p "$folder/bin" "$folder/lib/python3.11/site-packages"
    echo "VIRTUAL_ENV=\"$folder\"" >"$folder/bin/activate"
    cp "$0" "$folder/bin/python" ;;
  *"-m pip install"*)
    sleep "${PIP_SECONDS:-0}"
    case "$*" in *"${PIP_FAILS_AT:-(never)}"*) echo "ERROR: No matching distribution found"; exit 1 ;; esac ;;
  *pip._internal*) ;;
  *ctypes.CDLL*) exit "${LIBRARY_STATUS:-0}" ;;
  *) exec "$REAL_PYTHON" "$@" ;;
esac
"""


class Checkout:
    """A checkout with just what the set-up reads, at a path with a space."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bin = root.parent / "bin"
        self.calls = root.parent / "calls"
        for folder in ("scripts", "requirements", "third_party"):
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("build", "*.egg-info", "__py*"))
        shutil.copy(ROOT / "setup.py", root)
        self.bin.mkdir()
        for tool in TOOLS.split():
            found = shutil.which(tool)
            assert found, f"{tool} is not on PATH"
            (self.bin / tool).symlink_to(found)
        self.tool("python3.11", FAKE_PYTHON)
        self.tool("cc", "#!/bin/bash\n")

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def tool(self, name: str, text: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def start(self, **env: str) -> subprocess.Popen[str]:
        base = {"PATH": str(self.bin), "CALLS": str(self.calls), "REAL_PYTHON": sys.executable, "KNIT_FLAVOR": "cpu"}
        code = f"set -euo pipefail; source '{self.root}/scripts/_setup.sh'; knit_setup || exit; echo ready"
        return subprocess.Popen(
            ["bash", "-c", code],
            env=base | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def set_up(self, **env: str) -> tuple[int, list[str]]:
        """Exit code and the lines on stderr."""
        process = self.start(**env)
        out, err = process.communicate(timeout=50)
        assert (out == "ready\n") == (process.returncode == 0)
        return process.returncode, err.splitlines()

    def pip_calls(self) -> list[str]:
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [c for c in calls if "-m pip install" in c]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "a checkout")


def test_a_second_run_does_nothing_and_takes_less_than_a_second(checkout):
    assert checkout.set_up()[0] == 0
    assert len(checkout.pip_calls()) == 4
    started = time.monotonic()
    assert checkout.set_up() == (0, [])
    assert time.monotonic() - started < 1
    assert len(checkout.pip_calls()) == 4


def test_changed_pins_are_installed(checkout):
    checkout.set_up()
    with open(checkout.root / "requirements/cpu.txt", "a") as pins:
        pins.write("one-more==1\n")
    assert checkout.set_up()[0] == 0
    assert len(checkout.pip_calls()) == 8


@pytest.mark.parametrize("where", ["cpu.txt", "--editable"])
def test_a_failed_install_shows_its_end_and_is_not_taken_for_done(checkout, where):
    status, lines = checkout.set_up(PIP_FAILS_AT=where)
    assert status == 1
    assert "ERROR: No matching distribution found" in lines
    assert "that failed" in lines[-1]
    assert checkout.set_up()[0] == 0
    assert checkout.set_up() == (0, [])


def test_after_a_failed_change_the_old_pins_are_not_taken_for_installed(checkout):
    checkout.set_up()
    pins = checkout.root / "requirements/cpu.txt"
    old = pins.read_text()
    pins.write_text(old + "one-more==1\n")
    assert checkout.set_up(PIP_FAILS_AT="--editable")[0] == 1
    pins.write_text(old)
    before = len(checkout.pip_calls())
    assert checkout.set_up()[0] == 0
    assert len(checkout.pip_calls()) == before + 4


def test_a_killed_install_is_gone_on_with_and_half_a_package_is_installed_again(checkout):
    process = checkout.start(PIP_SECONDS="20")
    while not checkout.pip_calls():
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=10)
    packages = checkout.venv / "lib/python3.11/site-packages"
    for name, files in {"whole": ["METADATA", "RECORD", "INSTALLER"], "half": ["METADATA", "RECORD"]}.items():
        (packages / f"{name}-1.dist-info").mkdir()
        for file in files:
            (packages / f"{name}-1.dist-info" / file).touch()
    (packages / "~orch").mkdir()
    assert checkout.set_up()[0] == 0
    assert [p.name for p in packages.iterdir()] == ["whole-1.dist-info"]


def test_two_set_ups_at_once_install_once(checkout):
    both = [checkout.start(PIP_SECONDS="0.3") for _ in range(2)]
    errors = [process.communicate(timeout=50)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert len(checkout.pip_calls()) == 4
    assert sum("waiting for it" in error for error in errors) == 1


def test_a_moved_checkout_gets_a_venv_of_its_own(checkout, tmp_path):
    checkout.set_up()
    checkout.root = checkout.root.rename(tmp_path / "moved")
    assert checkout.set_up()[0] == 0
    assert str(checkout.venv) in (checkout.venv / "bin/activate").read_text()


def test_an_old_python_is_refused_in_one_line(checkout):
    (checkout.bin / "python3.11").unlink()
    checkout.tool("python3", '#!/bin/bash\ncase "$*" in --version) echo Python 3.10.13 ;; *) exit 1 ;; esac\n')
    status, lines = checkout.set_up()
    assert status == 1
    assert len(lines) == 1
    assert "lacks Python 3.11 or newer" in lines[0]
    assert "found Python 3.10.13" in lines[0]


def test_a_missing_compiler_is_said_in_one_line(checkout):
    (checkout.bin / "cc").unlink()
    status, lines = checkout.set_up()
    assert status == 1
    assert len(lines) == 1
    assert "lacks a C compiler" in lines[0]


def test_too_little_disk_is_said_in_one_line(checkout):
    checkout.tool("df", "#!/bin/bash\necho Filesystem 1024-blocks Used Available\necho /dev/x 9 9 3145728 9% /\n")
    status, lines = checkout.set_up()
    assert status == 1
    assert len(lines) == 1
    assert "need 8 GB for .venv, 3 GB are free" in lines[0]


def test_missing_libraries_without_apt_are_named_and_the_rest_goes_on(checkout):
    status, lines = checkout.set_up(LIBRARY_STATUS="1")
    assert status == 0
    assert [line for line in lines if "libibverbs1 libnuma1 libcurl4" in line and "Mooncake" in line]


def test_the_flavour_is_found_and_can_be_overridden(checkout):
    checkout.tool("nvidia-smi", "#!/bin/bash\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\n")
    checkout.tool("df", "#!/bin/bash\necho Filesystem 1024-blocks Used Available\necho /dev/x 9 9 99999999 9% /\n")
    assert checkout.set_up(KNIT_FLAVOR="")[0] == 0
    assert "gpu.txt" in checkout.pip_calls()[0]
    status, lines = checkout.set_up(KNIT_FLAVOR="cpu")
    assert status == 1
    assert len(lines) == 1
    assert "made for gpu hosts" in lines[0]
    status, lines = checkout.set_up(KNIT_FLAVOR="tpu")
    assert (status, len(lines)) == (2, 1)


@pytest.mark.parametrize("script", ["_setup.sh", "quickstart.sh", "test.sh"])
def test_scripts_are_valid_bash(script):
    subprocess.run(["bash", "-n", str(ROOT / "scripts" / script)], check=True)


def test_every_pin_of_the_cpu_environment_is_installed_as_pinned():
    """What runs the tests is the environment that the lock describes."""
    from importlib.metadata import version

    if os.environ.get("KNIT_FLAVOR") == "gpu" or not (ROOT / ".venv/knit.stamp").exists():
        pytest.skip("this is not the CPU environment made by the set-up")
    lines = [line.strip() for line in (ROOT / "requirements/cpu.txt").read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins.pop("triton")  # a CUDA build of torch brings its own
    assert {name: version(name).split("+")[0] for name in pins} == pins
