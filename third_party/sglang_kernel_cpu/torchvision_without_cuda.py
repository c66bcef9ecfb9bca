"""Lets ``import torchvision`` succeed where its compiled ops cannot be loaded.

The torchvision wheel of the general package index is linked against CUDA. Beside a CPU build of torch its
``_C.so`` fails to load, and then ``torchvision/_meta_registrations.py`` fails as well, because it registers fakes
for the ops ``nms`` and ``qnms`` unconditionally. SGLang and the model classes of transformers import torchvision,
so every process that uses either would end there. Declaring the two ops is enough; calling one still raises.

torch runs :func:`declare_missing_ops` at the end of its own import (entry point group ``torch.backends``,
https://pytorch.org/tutorials/unstable/python_extension_autoload.html), in every process of the environment.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_declared = []  # a Library withdraws its definitions when it is garbage-collected


def declare_missing_ops() -> None:
    """Declare ``torchvision::nms`` and ``torchvision::qnms`` unless torchvision can load its own."""
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _declared:
        return
    try:
        for compiled in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(compiled))
    except OSError:
        library = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
