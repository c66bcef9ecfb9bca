"""What a run shows: a line per step, readable sample trajectories, and on a terminal a progress bar."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console as RichConsole
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

Metrics = Mapping[str, float]

SHOWN_CHARACTERS = 600  # of a prompt or response, beginning and end


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory in readable form."""

    trajectory_id: str
    source: str
    prompt: str
    response: str
    reward: float
    versions: tuple[int, ...] = ()  # of its version ranges, in order


class Console:
    """Prints to stdout. Without a terminal: plain lines, no bar, no colour."""

    def __init__(self, steps: int, rich_console: RichConsole | None = None) -> None:
        self._steps = steps
        self._out = rich_console or RichConsole(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._task: Any = None

    def note(self, text: str) -> None:
        self._out.print(escape(text))

    def step(self, step: int, metrics: Metrics) -> None:
        if self._out.is_terminal and self._progress is None:
            self._start_progress()
        self._out.print(escape(step_line(step, self._steps, metrics)))
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        for sample in samples:
            spans = "→".join(str(v) for v in sample.versions) or "?"
            self._out.print(
                f"  [dim]{escape(sample.source)} {sample.trajectory_id}, weights {spans}, "
                f"reward {sample.reward:g}[/dim]\n"
                f"    [dim]prompt  [/dim] {escape(shorten(sample.prompt))}\n"
                f"    [dim]response[/dim] {escape(shorten(sample.response))}"
            )

    def close(self) -> None:
        """Gives the terminal back. Idempotent."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start_progress(self) -> None:
        self._progress = Progress(
            TextColumn("train batches"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=self._out,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=self._steps)
        self._progress.start()


def step_line(step: int, steps: int, metrics: Metrics) -> str:
    """``step 12/60 · v12 · reward 0.52 (gcd 0.40, spell 0.61) · stale 0.4 · wait 1.3+0.0 s · 512 tok/s · 2.2 s``."""
    parts = [f"step {step:>{len(str(steps))}}/{steps}", f"v{_text(metrics, 'sync/version', '.0f')}"]
    rewards = {
        name.split("/")[1]: value
        for name, value in sorted(metrics.items())
        if name.startswith("reward/") and name.endswith("/mean") and math.isfinite(value)
    }
    if rewards:
        average = math.fsum(rewards.values()) / len(rewards)
        each = ", ".join(f"{source} {value:.2f}" for source, value in rewards.items())
        parts.append(f"reward {average:.2f} ({each})")
    parts.append(f"stale {_text(metrics, 'staleness/token/mean', '.2f')}")
    parts.append(f"wait {_text(metrics, 'time/wait_batch', '.1f')}+{_text(metrics, 'time/wait_data', '.1f')} s")
    parts.append(f"{_text(metrics, 'perf/tokens_per_s', '.0f')} tok/s")
    parts.append(f"{_text(metrics, 'time/step', '.1f')} s")
    return " · ".join(parts)


def shorten(text: str, characters: int = SHOWN_CHARACTERS) -> str:
    """On one line, with the middle left out where it is long."""
    flat = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    if len(flat) <= characters:
        return flat
    half = characters // 2
    return f"{flat[:half]} … {len(flat) - 2 * half} characters … {flat[-half:]}"


def result_lines(summary: Mapping[str, Any]) -> list[str]:
    """The end of a run in a few lines, from its summary."""
    evals = summary.get("eval", {})
    lines = [_eval_line(when, evals[when]) for when in ("before", "after") if when in evals]
    if "gain" in evals:
        lines.append(f"  gain    {evals['gain']['avg_at_n']:+.3f} ± {evals['gain']['paired_standard_error']:.3f}")
    ends, stale = summary["trajectories"], summary.get("staleness", {}).get("token", {}).get("mean")
    staleness = "" if stale is None else f", mean token staleness {stale:.2f}"
    lines.append(
        f"{summary['steps']} train batches in {summary['wall_s']:.0f} s, weight version {summary['weight_version']}"
        f"{staleness}; trajectories: {ends['launched']} launched, {ends['trained']} trained, "
        f"{sum(ends['dropped'].values())} dropped, {sum(ends['lost'].values())} lost, {ends['left_over']} left over"
    )
    return lines


def _eval_line(when: str, scores: Mapping[str, Any]) -> str:
    greedy = "" if scores["greedy"] is None else f", greedy {scores['greedy']:.3f}"
    each = ", ".join(f"{source} {s['avg_at_n']:.2f}" for source, s in scores["sources"].items())
    return f"  {when:<7} {scores['avg_at_n']:.3f} ± {scores['standard_error']:.3f}{greedy}  ({each})"


def _text(metrics: Metrics, name: str, form: str) -> str:
    value = metrics.get(name, math.nan)
    return format(value, form) if math.isfinite(value) else "?"
