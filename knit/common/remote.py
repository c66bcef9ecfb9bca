"""Calls to Ray actors with a deadline, whose errors read like local ones."""

from __future__ import annotations

import asyncio
from typing import Any

from knit.errors import DeadlineError, KnitError, RunError


def call(ref: Any, timeout_s: float, what: str) -> Any:
    """``ray.get`` with a deadline. ``what`` names the thing waited for.

    Raises the actor's own KnitError as it was raised there, DeadlineError on time-out, and RunError when
    the actor died or failed otherwise.
    """
    import ray

    try:
        return ray.get(ref, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise DeadlineError(f"{what} did not answer within {timeout_s:g} s") from None
    except ray.exceptions.RayError as error:
        raise _readable(error, what) from error


async def acall(ref: Any, timeout_s: float | None, what: str) -> Any:
    """The asynchronous twin of :func:`call`; ``timeout_s=None`` is for waits that something else ends."""
    import ray

    try:
        return await asyncio.wait_for(_await(ref), timeout_s)
    except TimeoutError:
        raise DeadlineError(f"{what} did not answer within {timeout_s:g} s") from None
    except ray.exceptions.RayError as error:
        raise _readable(error, what) from error


async def _await(ref: Any) -> Any:
    return await ref


def _readable(error: Exception, what: str) -> KnitError:
    import ray

    cause = getattr(error, "cause", None)
    if isinstance(cause, KnitError):
        return cause
    if isinstance(error, ray.exceptions.ActorDiedError | ray.exceptions.ActorUnavailableError):
        return ActorLostError(f"{what}: its process died")
    if isinstance(error, ray.exceptions.RayTaskError):
        return RunError(f"{what} failed: {type(cause).__name__}: {cause}")
    return RunError(f"{what} failed: {type(error).__name__}: {str(error).splitlines()[0]}")


class ActorLostError(RunError):
    """The process of an actor is gone."""
