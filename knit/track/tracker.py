"""One place for what a run reports: JSON lines always, wandb beside it, the console for people."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import orjson

from knit.common.jsonl import JsonlWriter
from knit.config.resolved import Resolved
from knit.config.schema import KnitConf
from knit.track.console import Console, Sample, result_lines
from knit.track.names import refuse_unknown
from knit.track.wandb_run import WandbRun


class Tracker:
    """Writes ``metrics.jsonl``, ``samples.jsonl`` and ``summary.json`` into the run directory, which exists.

    ``step`` is the only axis: a train batch, 0 before the first. Unknown metric names raise ``ValueError``.
    """

    def __init__(self, conf: KnitConf, resolved: Resolved) -> None:
        self.folder = resolved.run_dir
        self._metrics = JsonlWriter(self.folder / "metrics.jsonl")
        self._samples = JsonlWriter(self.folder / "samples.jsonl")
        self._console = Console(conf.steps)
        self._wandb: WandbRun | None = None
        if conf.track.wandb != "off":
            name = conf.track.name or self.folder.name
            config = dataclasses.asdict(conf)
            self._wandb = WandbRun(conf.track.wandb, self.folder, conf.track.project, name, config)
            if self._wandb.mode != conf.track.wandb:
                self.note(f"wandb: no API key, so this run is tracked offline; later: wandb sync {self.folder}/wandb/*")

    def step(
        self,
        step: int,
        metrics: Mapping[str, float],
        times: Mapping[str, float],
        samples: Sequence[Sample] = (),
    ) -> None:
        """All metrics of a train batch, once, its console line, and perhaps some of its trajectories."""
        together = {**metrics, **times}
        self.log(step, together)
        self._console.step(step, together)
        if samples:
            self.samples(step, samples)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Further metrics of a step: an evaluation."""
        refuse_unknown(metrics)
        self._metrics.write({"step": step, "time_s": time.time(), **metrics})
        if self._wandb is not None:
            self._wandb.log(step, metrics)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Readable trajectories, to the console, to ``samples.jsonl`` and as a wandb table."""
        self._console.samples(step, samples)
        for sample in samples:
            self._samples.write({"step": step, **dataclasses.asdict(sample)})
        if self._wandb is not None and samples:
            columns = [f.name for f in dataclasses.fields(Sample)]
            rows = [[_cell(getattr(s, c)) for c in columns] for s in samples]
            self._wandb.table(step, "samples", columns, rows)

    def note(self, text: str) -> None:
        """A line for people: what is being started, what was restarted."""
        self._console.note(text)

    def summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Writes ``summary.json``, shows the result and returns the summary."""
        self._console.close()
        (self.folder / "summary.json").write_bytes(orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        if self._wandb is not None:
            self._wandb.summary(summary)
        for line in result_lines(summary):
            self.note(line)
        self.note(f"everything is in {self.folder}")
        return summary

    def close(self, exit_code: int = 0) -> None:
        """Within seconds, however wandb is. Idempotent."""
        self._console.close()
        self._metrics.close()
        self._samples.close()
        if self._wandb is not None:
            run, self._wandb = self._wandb, None
            run.finish(exit_code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close(exit_code=0 if error is None else 1)


def _cell(value: Any) -> Any:
    return "→".join(map(str, value)) if isinstance(value, tuple) else value
