"""The process of one SGLang server: ``python -m knit.rollout.server_main <sglang flags>``.

Runs SGLang's own server with its plugins. Three guarantees of ours around it:

- It dies with the process that started it, and SIGTERM ends it and its children at once (SGLang would
  first drain open requests, for as long as they take).
- On the CPU build of torch, torchvision can be imported. The fix stands at module level because SGLang's
  spawned children import this file again, as ``__mp_main__``.
- No child outlives it: whatever ends the server, its process tree is killed.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import torch


def define_vision_ops() -> None:
    """Let torchvision be imported where its compiled ops cannot be loaded (they need libcudart)."""
    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    for op in ("nms", "qnms"):
        library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    globals()["_vision_ops"] = library  # the definitions end with the object


define_vision_ops()


def end_now(signum: int | None = None, frame: FrameType | None = None) -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid(), include_parent=True)


def main(argv: list[str]) -> None:
    from knit.common.procs import die_with_parent

    die_with_parent()
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
