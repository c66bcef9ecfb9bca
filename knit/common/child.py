"""Python code in a process of its own: for what may import torch, take long or crash, and must not stay in memory."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from knit.common.paths import search_here
from knit.common.procs import die_with_parent, terminate_tree


def run_module(module: str, argument: Any, timeout_s: float, output: IO[bytes] | int, **env: str) -> tuple[int, bytes]:
    """Runs ``python -m module RESULT_FILE`` with ``argument`` pickled on stdin; returns exit code and result.

    The module's output goes to ``output``. It sees the same import path as this process. It is ended, with
    all it started, when this process is interrupted or dies; after ``timeout_s`` TimeoutError is raised.
    """
    search_here()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1", **env}
    with tempfile.TemporaryDirectory(prefix="knit-") as folder:
        result = Path(folder) / "result"
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(result)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            preexec_fn=die_with_parent,
        )
        try:
            process.communicate(pickle.dumps(argument), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{module} took longer than {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                terminate_tree(process.pid)
                process.wait()
        return process.returncode, result.read_bytes() if result.exists() else b""
