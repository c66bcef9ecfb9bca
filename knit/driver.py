"""A run: from a checked configuration to its summary, with its processes started and ended around the loop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from knit.config.resolved import Resolved
from knit.config.schema import KnitConf
from knit.debug import RolloutOnly, TrainOnly
from knit.fleet import Failure
from knit.launch import launch
from knit.loop import Loop
from knit.track.tracker import Tracker

LOOPS = {"none": Loop, "rollout_only": RolloutOnly, "train_only": TrainOnly}


def run(conf: KnitConf, resolved: Resolved, tracker: Tracker) -> dict[str, Any]:
    """Trains to the end and returns the summary. Ctrl-C and SIGTERM end it within seconds (KeyboardInterrupt)."""
    return asyncio.run(_run(conf, resolved, tracker))


async def _run(conf: KnitConf, resolved: Resolved, tracker: Tracker) -> dict[str, Any]:
    with _signals_cancel(asyncio.current_task()):
        failure = Failure()
        engines, ranks = len(resolved.engine_bundles), len(resolved.train_bundles)
        tracker.note(f"starting Ray, {engines} engine(s) and {ranks} training rank(s)")
        async with launch(conf, resolved, failure) as crew:
            return await failure.guard(LOOPS[conf.debug.mode](conf, crew, tracker, failure).run())


@contextmanager
def _signals_cancel(task: asyncio.Task[Any] | None) -> Iterator[None]:
    """SIGINT and SIGTERM cancel ``task`` once; its cleaning up is not interrupted by more of them."""
    loop = asyncio.get_running_loop()
    seen: list[int] = []

    def cancel(number: int) -> None:
        if not seen and task is not None:
            task.cancel()
        seen.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, cancel, number)
    try:
        yield
    except asyncio.CancelledError:
        if seen:
            raise KeyboardInterrupt from None
        raise
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
