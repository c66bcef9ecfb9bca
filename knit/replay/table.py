"""The comparison on the console."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from knit.replay.compare import Comparison, Share, settings
from knit.replay.measure import Result, standard_error

COLUMNS = (
    "policy",
    "token staleness",
    "architectural",
    "batches/h",
    "trainer idle",
    "engine slots idle",
    "unmet quotas",
    "mix skew",
    "mini-batches at (% of step)",
)


def show(comparison: Comparison) -> None:
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
    for share in comparison.shares:
        console.print(_table(comparison, share))
    is_set = settings(comparison.question)
    console.print(
        f"{is_set['scenario']}: {is_set['size']} trajectories in {is_set['mini_batches']} mini-batches of "
        f"{is_set['chunks_per_mini_batch']} chunk(s), schedule {is_set['schedule']}, {is_set['launch']} launching, "
        f"{is_set['engine_slots']} engine slots; {is_set['batches']} batches ({is_set['warm_up']} warm-up) × "
        f"{is_set['seeds']} trace(s)"
    )


def _table(comparison: Comparison, share: Share) -> Table:
    placement = "colocated" if comparison.question.colocated else "disaggregated"
    table = Table(
        title=f"{placement}, training {share.train_s:.4g} s = {share.rho:.0%} of a rollout step", title_justify="left"
    )
    for number, column in enumerate(COLUMNS):
        table.add_column(column, justify="left" if number == 0 else "right")
    for name, result in share.policies.items():
        table.add_row(name, *_cells(result))
    if share is comparison.shares[0]:
        table.add_section()
        table.add_row("colocated replay", *_cells(comparison.colocated))
    return table


def _cells(result: Result) -> list[str]:
    se = standard_error(result.architectural)
    architectural = f"{sum(result.architectural) / len(result.architectural):.3f}"
    unmet = f"{result.unmet_quotas} of {result.train_batches}"
    return [
        f"{result.mean('token_staleness'):.3f}",
        architectural + (f" ± {se:.3f}" if se is not None else ""),
        f"{result.batches_per_hour:.3f}",
        f"{result.mean('idle_train'):.0%}",
        f"{result.mean('idle_rollout'):.0%}",
        f"[red]{unmet}[/red]" if result.unmet_quotas else unmet,
        f"{result.mean('mix_skew'):.2f}",
        " ".join(f"{share * 100:.0f}" for share in result.admissions),
    ]
