"""The process of one SGLang server: ``python -m knit.rollout.server_main <sglang flags>``.

Runs SGLang's own server with its plugins. Our guarantees around it:

- SIGTERM ends it and its children at once (SGLang would first drain open requests, for as long as they take).
- Its children die with it from their first moment on: they import this file again, as ``__mp_main__``. SGLang ties
  them to it only when their imports are done.
- Whatever ends the server, its process tree is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from types import FrameType

from knit.common.procs import die_with_parent


def tie_to_parent() -> None:
    """In a spawned child: end with the parent, also if that is gone already."""
    die_with_parent()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid != os.getppid():
        os._exit(1)


if __name__ == "__mp_main__":
    tie_to_parent()


def end_now(signum: int | None = None, frame: FrameType | None = None) -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=True)


def main(argv: list[str]) -> None:
    signal.signal(signal.SIGTERM, end_now)

    from sglang.launch_server import run_server
    from sglang.srt.managers import tokenizer_manager
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    # SGLang installs its own handler with the first request; replace what it does.
    tokenizer_manager.SignalHandler.sigterm_handler = lambda self, signum=None, frame=None: end_now()
    load_plugins()
    try:
        run_server(prepare_server_args(argv))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
