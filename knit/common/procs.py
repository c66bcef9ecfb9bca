"""Processes that this run starts: they die with their parent, end as a tree, and write to a log."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
# Loaded at import: between fork and exec no library may be looked up.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """For ``subprocess.Popen(preexec_fn=die_with_parent)``: the kernel kills the child when its parent is gone.

    The parent, to the kernel, is the *thread* that forked: start the child from a thread that lives as
    long as the child should. Linux only; elsewhere it does nothing.
    """
    if _LIBC is None:
        return
    if _LIBC.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def terminate_tree(pid: int, grace_s: float = 5.0, kill_wait_s: float = 5.0) -> None:
    """End a process and all its descendants: SIGTERM to the root, SIGKILL to whatever is left after ``grace_s``.

    Returns when all are gone; a process that is gone already is no error. Only processes that are (or
    became, meanwhile) descendants of ``pid`` are touched, each checked by its start time. Raises
    ``TimeoutError`` naming those that outlive SIGKILL by ``kill_wait_s``.
    """
    try:
        root = psutil.Process(pid)
    except psutil.NoSuchProcess:
        return
    tree = {root, *_descendants(root)}
    _send(root, signal.SIGTERM)
    _wait_until_gone(tree, grace_s, root)
    for process in _running(tree):
        tree.update(_descendants(process))
    for process in _running(tree):
        _send(process, signal.SIGKILL)
    stubborn = _wait_until_gone(tree, kill_wait_s, root)
    if stubborn:
        names = ", ".join(str(p.pid) for p in stubborn)
        raise TimeoutError(f"processes {names} outlived SIGKILL by {kill_wait_s:g} s")


def _wait_until_gone(tree: set[psutil.Process], timeout_s: float, root: psutil.Process) -> list[psutil.Process]:
    """Waits until nothing of ``tree`` runs, adding what ``root`` starts meanwhile; returns what still does."""
    deadline = time.monotonic() + timeout_s
    while (alive := _running(tree)) and time.monotonic() < deadline:
        tree.update(_descendants(root))
        time.sleep(0.02)
    return alive


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _running(tree: set[psutil.Process]) -> list[psutil.Process]:
    """Zombies count as gone: reaping them, and reading their exit code, is up to whoever started them."""
    return [p for p in tree if p.is_running() and _status(p) != psutil.STATUS_ZOMBIE]


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_ZOMBIE)


def _send(process: psutil.Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        return


def redirect_output(log_path: str | Path) -> None:
    """Send stdout and stderr of this process, and of children it starts later, to the end of ``log_path``.

    Works on the file descriptors, so output of native code is caught too. Lines appear as they are written.
    """
    path = Path(log_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def tail(path: str | Path, lines: int = 20, max_bytes: int = 65536) -> str:
    """The last ``lines`` lines of a file (of its last ``max_bytes``); empty when there is no such file."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
