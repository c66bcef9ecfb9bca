"""Progressive readiness targets: how fast a quota must fill while a train batch is admitted (paper §5.1).

A schedule is n exact coefficients 0 ≤ α_1 ≤ … ≤ α_n = 1, one for each mini-batch. Targets are compared with
integer counts, so they are rounded up: s ≥ τ exactly when s ≥ ceil(τ). No floats take part.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction
from math import ceil
from typing import Any

from knit.buffer.quotas import exact
from knit.errors import ConfigError

Schedule = tuple[Fraction, ...]


def linear(n: int) -> Schedule:
    return tuple(Fraction(t, n) for t in range(1, n + 1))


def relaxed(n: int) -> Schedule:
    """Zeros in the first half, then linear to 1: (0, 0, 1/2, 1) for n = 4."""
    zeros = n // 2
    return tuple(Fraction(max(0, t - zeros), n - zeros) for t in range(1, n + 1))


def power(n: int, p: float) -> Schedule:
    """(t/n)^p: p > 1 is late, p < 1 early. The last coefficient is exactly 1."""
    if p <= 0:
        raise ConfigError(f"admission.schedule=power:{p:g} is not monotone: give an exponent above 0")
    return (*(Fraction((t / n) ** p).limit_denominator(10**6) for t in range(1, n)), Fraction(1))


def at_end(n: int) -> Schedule:
    """Only the final target counts: (0, …, 0, 1)."""
    return (Fraction(0),) * (n - 1) + (Fraction(1),)


def explicit(coefficients: Sequence[Any], n: int) -> Schedule:
    """A listed schedule. Raises ConfigError unless it has n values, rises monotonically in [0, 1] and ends in 1."""
    shown = f"admission.schedule={list(coefficients)}"
    try:
        values = tuple(exact(c) for c in coefficients)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{shown} has a value that is not a number ({error})") from error
    if len(values) != n:
        raise ConfigError(f"{shown} has {len(values)} values for batch.mini_batches={n}: give one per mini-batch")
    if any(a > b for a, b in itertools.pairwise(values)) or values[0] < 0:
        raise ConfigError(f"{shown} is not monotone from 0 up: each value must be at least the one before it")
    if values[-1] != 1:
        raise ConfigError(f"{shown} ends in {float(values[-1]):g}: the last value must be 1, or quotas go unmet")
    return values


def parse_schedule(spec: Any, n: int) -> Schedule:
    """``linear``, ``relaxed``, ``end``, ``power:<p>`` or a list of n coefficients; raises ConfigError."""
    if isinstance(spec, str):
        name, _, argument = spec.partition(":")
        if name == "power":
            try:
                return power(n, float(argument))
            except ValueError as error:
                raise ConfigError(f"admission.schedule={spec!r}: write power:<p>, e.g. power:2") from error
        named = {"linear": linear, "relaxed": relaxed, "end": at_end}
        if spec not in named:
            raise ConfigError(f"admission.schedule={spec!r} is unknown: use linear, relaxed, end, power:<p> or a list")
        return named[spec](n)
    if isinstance(spec, Sequence):
        return explicit(spec, n)
    raise ConfigError(f"admission.schedule={spec!r} is neither a name nor a list")


def target(start: int, final: int, coefficient: Fraction) -> int:
    """τ_i,t = s_i(0) + α_i,t (τ_i − s_i(0)), rounded up; s_i(0) is capped at τ_i (paper equation 3)."""
    start = min(start, final)
    return start + ceil(coefficient * (final - start))


def targets(start: int, final: int, schedule: Schedule) -> tuple[int, ...]:
    """The targets of all mini-batches: (0, 0, 2, 4) for start 0, final 4 and the relaxed schedule of n = 4."""
    return tuple(target(start, final, coefficient) for coefficient in schedule)
