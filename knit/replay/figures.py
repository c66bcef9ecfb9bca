"""PNG figures in the manner of the paper's 3b, 7, 10a and 10b. The only user of matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from knit.errors import ConfigError
from knit.replay.compare import Comparison, Progress, Question, compare
from knit.replay.measure import Result, standard_error

SHOWN_BATCHES = 6
FIGURE_10 = ("on_completion", "no_guards", "linear", "progressive")
FEW = 8  # sources that get a bar of their own


def check(folder: Path) -> None:
    """Before anything is replayed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--figures needs matplotlib: pip install matplotlib")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--figures {folder}: {error.strerror}") from error


def draw(comparison: Comparison, folder: Path, progress: Progress) -> Iterator[Path]:
    """Draws what the comparison holds, and figure 7 from replays of its own; yields the files."""
    yield _save(_admission_times(comparison), folder / "admission_times.png")
    yield _save(_composition(comparison), folder / "composition.png")
    yield _save(_architectural(comparison), folder / "architectural_staleness.png")
    yield _save(_bars(granularity(comparison.question, progress)), folder / "granularity.png")


def granularity(question: Question, progress: Progress) -> dict[str, dict[str, list[float]]]:
    """Training share → label → architectural staleness by seed: the paper's figure 7, and chunks beside it.

    The batch is the largest below the scenario's that 4 and 8 mini-batches divide.
    """
    size = question.scenario.conf.batch.size // 8 * 8
    cases = [("train batch", "train_batch", 4, 1), ("4 mini-batches", "progressive", 4, 1)]
    cases += [("8 mini-batches", "progressive", 8, 1), ("4 × 5 chunks", "progressive", 4, 5)]
    shown: dict[str, dict[str, list[float]]] = {}
    for label, policy, mini_batches, chunks in cases:
        scenario = question.scenario.with_settings(
            {"size": size, "mini_batches": mini_batches},
            {"chunks_per_mini_batch": chunks, "schedule": "relaxed", "schedules": {}},
        )
        found = compare(replace(question, scenario=scenario, policies=[policy]), progress)
        for share in found.shares:
            shown.setdefault(f"training {share.rho:.0%}", {})[label] = share.policies[policy].architectural
    return shown


def _axes(*shape: int, **options: Any) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained", **options)
    return figure, figure.subplots(*shape, squeeze=False, sharey=True)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    return path


def _admission_times(comparison: Comparison) -> Any:
    """Figure 3b: when each mini-batch starts to train, from one complete rollout step to the next."""
    policies = comparison.shares[0].policies
    figure, axes = _axes(1, len(comparison.shares), figsize=(5 * len(comparison.shares), 0.5 * len(policies) + 1.4))
    for plot, share in zip(axes[0], comparison.shares, strict=True):
        for row, result in enumerate(share.policies.values()):
            for number, at in enumerate(result.admissions):
                plot.plot(
                    100 * at, row, "o", color=f"C{number % 10}", label=None if row else f"mini-batch {number + 1}"
                )
        plot.axvline(100, color="grey", linewidth=0.8)
        plot.set_yticks(range(len(policies)), policies)
        plot.set_xlim(left=0)
        plot.set_xlabel("taken by the trainer (% of the rollout step)")
        plot.set_title(f"training {share.rho:.0%}", fontsize=10)
    axes[0][0].invert_yaxis()
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    return figure


def _composition(comparison: Comparison) -> Any:
    """Figure 10a: what each source gets of a train batch; unmet targets are crossed."""
    results = comparison.shares[0].policies
    names = [name for name in FIGURE_10 if name in results] or list(results)
    figure, axes = _axes(1, len(names), figsize=(3.2 * len(names), 2.8))
    for plot, name in zip(axes[0], names, strict=True):
        if len(comparison.question.scenario.conf.sources) <= FEW:
            _source_bars(plot, comparison, results[name])
        else:
            _source_range(plot, comparison, results[name])
        plot.set_title(name, fontsize=10)
        plot.set_xlabel("train batch")
    axes[0][0].set_ylabel("share of the train batch")
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    return figure


def _source_bars(plot: Any, comparison: Comparison, result: Result) -> None:
    first = comparison.question.scenario.warm_up
    size = comparison.question.scenario.conf.batch.size
    quotas = comparison.question.scenario.rules("progressive").sources
    width = 0.8 / len(quotas)
    for number, (source, quota) in enumerate(quotas.items()):
        shares = result.runs[0].composition[source][first : first + SHOWN_BATCHES]
        at = [step + (number - (len(quotas) - 1) / 2) * width for step in range(1, len(shares) + 1)]
        plot.bar(at, shares, width, label=source, color=f"C{number}")
        target = quota.minimum / size
        missed = [(x, share) for x, share in zip(at, shares, strict=True) if share < target - 1e-9]
        plot.plot([x for x, _ in missed], [share + 0.01 for _, share in missed], "x", color="black", markersize=5)
        plot.axhline(
            target, color=f"C{number}" if len(set(quotas.values())) > 1 else "grey", linewidth=0.8, linestyle="--"
        )


def _source_range(plot: Any, comparison: Comparison, result: Result) -> None:
    """Of many sources: the worst and the best served one, relative to their targets."""
    size = comparison.question.scenario.conf.batch.size
    quotas = {n: q for n, q in comparison.question.scenario.rules("progressive").sources.items() if q.minimum}
    served = [
        [result.runs[0].composition[n][k] * size / q.minimum for n, q in quotas.items()]
        for k in range(result.runs[0].train_batches)
    ]
    steps = range(1, len(served) + 1)
    plot.fill_between(steps, [min(row) for row in served], [max(row) for row in served], alpha=0.3, label="all sources")
    plot.axhline(1, color="grey", linewidth=0.8, linestyle="--", label="final target")


def _architectural(comparison: Comparison) -> Any:
    """Figure 10b, of all policies."""
    values = {
        f"training {share.rho:.0%}": {name: result.architectural for name, result in share.policies.items()}
        for share in comparison.shares
    }
    return _bars(values)


def _bars(values: dict[str, dict[str, list[float]]]) -> Any:
    labels = list(next(iter(values.values())))
    figure, axes = _axes(1, 1, figsize=(1.1 * len(labels) + 1.5, 3.2))
    plot, width = axes[0][0], 0.8 / len(values)
    for number, (title, results) in enumerate(values.items()):
        at = [k + (number - (len(values) - 1) / 2) * width for k in range(len(labels))]
        heights = [fmean(results[label]) for label in labels]
        errors = [standard_error(results[label]) or 0.0 for label in labels]
        bars = plot.bar(at, heights, width, yerr=errors, label=title)
        plot.bar_label(bars, fmt="%.2f", fontsize=7)
    plot.set_xticks(range(len(labels)), labels, fontsize=8)
    plot.set_ylabel("architectural staleness")
    plot.legend(fontsize=7)
    return figure
