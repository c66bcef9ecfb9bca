"""Names that SGLang binds when it is imported but that no path we support calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn


def missing(name: str) -> Callable[..., NoReturn]:
    """A callable that says which kernel the CPU stand-in does not have."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no implementation in the CPU stand-in package")

    call.__name__ = name
    return call
