"""Real runs of the command, each in its own process; ``processes`` finds whatever it left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e
SMALL = ("recipe=quickstart", "track.wandb=off", "eval.limit=10", "eval.samples_per_prompt=2")
DEADLINE_S = 480


@dataclass
class Run:
    process: subprocess.Popen
    folder: Path
    output: Path

    def wait(self, timeout_s=DEADLINE_S):
        """Exit code; on a time-out the run is ended and the test fails with the end of its output."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"not ended after {timeout_s} s:\n{self.text()[-3000:]}")

    def wait_for(self, pattern, timeout_s=DEADLINE_S):
        """Until the output matches, or the run ends."""
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.text()):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.end()
                pytest.fail(f"{pattern!r} never appeared:\n{self.text()[-3000:]}")
            time.sleep(0.2)

    def end(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)

    def text(self):
        return self.output.read_text()

    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self):
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def events(self):
        return [json.loads(line) for line in (self.folder / "events.jsonl").read_text().splitlines()]

    def processes(self):
        """All processes of this run that still exist: they carry its mark in their environment."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("KNIT_TEST_RUN") == str(self.folder) and process.status() != "zombie":
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def process_of(self, *words):
        """The first process of this run whose command line has all the words."""
        for process in self.processes():
            line = " ".join(process.cmdline())
            if all(w in line for w in words):
                return process
        raise AssertionError(f"no process of the run has {words} in its command line")


@pytest.fixture(scope="session")
def start_run(tmp_path_factory):
    """``start_run(*overrides) -> Run``; whatever still runs at the end of the session is ended."""
    runs = []

    def start(*overrides):
        folder = tmp_path_factory.mktemp("run") / "run"
        output = folder.with_suffix(".out")
        environment = os.environ | {"KNIT_TEST_RUN": str(folder)}
        command = [sys.executable, "-m", "knit.cli", "train", *SMALL, f"track.dir={folder}", *overrides]
        with open(output, "w") as out:
            process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        runs.append(Run(process, folder, output))
        return runs[-1]

    yield start
    for run in runs:
        run.end()


@pytest.fixture(scope="session")
def short_run(start_run):
    """One finished run of the default settings with three train batches, shared by the tests that only read."""
    run = start_run("steps=3")
    assert run.wait() == 0, run.text()[-3000:]
    return run
