"""Quotas of a train batch: shares become integer counts, and counts are grouped by what they compete for.

Rounding: shares turn into counts by largest remainder, so that a group's minima never sum to more than the
batch. Scope: every count is in single trajectories, not in prompt groups. A quota *group* is one attribute
of a trajectory (its source, its domain, ...): the classes of a group are disjoint, each trajectory has exactly
one class in every group, and the classes of one group compete for the same batch slots (paper §5.1). Minima
are protected by equation (4) (:mod:`knit.buffer.guards`); maxima are checked beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from knit.errors import ConfigError
from knit.types import TrajectoryMeta

Share = int | float | Fraction


@dataclass(frozen=True, slots=True)
class Quota:
    """At least ``minimum`` and at most ``maximum`` trajectories of a train batch."""

    minimum: int
    maximum: int


@dataclass(frozen=True, slots=True)
class QuotaGroup:
    """Quotas that compete for the same slots. ``by`` gives a trajectory's class; unlisted classes are unbounded."""

    name: str
    quotas: Mapping[str, Quota]
    by: Callable[[TrajectoryMeta], str]


def source_of(meta: TrajectoryMeta) -> str:
    return meta.source


def exact(share: Share) -> Fraction:
    """The share as written: 0.24 is 6/25, not its nearest binary number."""
    return Fraction(str(share)) if isinstance(share, float) else Fraction(share)


def counts_from_shares(shares: Mapping[str, Share], size: int, setting: str = "ratio") -> dict[str, int]:
    """Integer counts of a batch of ``size``. An ``int`` is a count already, a float or Fraction is a share.

    Largest remainder: each share is rounded down, then the ones with the largest remainders (ties: first
    listed) are raised until the counts sum to the rounded-down total. The sum never exceeds ``size``.
    Raises ConfigError if a share is negative or if they sum to more than the batch.
    """
    wanted: dict[str, Fraction] = {}
    for name, share in shares.items():
        if share < 0:
            raise ConfigError(f"{setting} of {name!r} is {share}: below 0; give a share between 0 and 1")
        wanted[name] = Fraction(share) if isinstance(share, int) else exact(share) * size
    total = sum(wanted.values(), Fraction(0))
    if total > size:
        listed = ", ".join(f"{name}={share}" for name, share in shares.items())
        raise ConfigError(
            f"{setting}s sum to {float(total):g} of a train batch of {size} trajectories ({listed}): "
            "lower them to at most 1 in sum"
        )
    counts = {name: int(value) for name, value in wanted.items()}
    order = sorted(wanted, key=lambda name: counts[name] - wanted[name])
    for name in order[: int(total) - sum(counts.values())]:
        counts[name] += 1
    return counts


def quota_group(
    name: str,
    size: int,
    minima: Mapping[str, Share],
    maxima: Mapping[str, Share] | None = None,
    by: Callable[[TrajectoryMeta], str] = source_of,
    closed: bool = True,
    setting: str = "ratio",
) -> QuotaGroup:
    """A validated group. ``closed``: no trajectory has a class outside of the listed ones.

    Raises ConfigError if minima exceed the batch, a maximum is below its minimum, or (closed groups) the
    maxima sum to less than the batch.
    """
    low = counts_from_shares(minima, size, setting)
    high = dict.fromkeys(low, size)
    for k, share in (maxima or {}).items():
        high[k] = share if isinstance(share, int) else int(exact(share) * size)
        low.setdefault(k, 0)
        if high[k] < low[k]:
            raise ConfigError(f"maximum of {k!r} is {high[k]} trajectories, below its minimum of {low[k]}: raise it")
    if closed and low and sum(high.values()) < size:
        raise ConfigError(
            f"the maxima of quota group {name!r} sum to {sum(high.values())}, less than the train batch of {size}: "
            "raise them or lower batch.size"
        )
    return QuotaGroup(name, {k: Quota(low[k], high[k]) for k in low}, by)
