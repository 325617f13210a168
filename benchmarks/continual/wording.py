"""Figures as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from benchmarks.continual.analysis import Spread

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def count(value: float) -> str:
    """A large number with three digits."""
    size, letter = _unit(value)
    return f"{value / size:.3g}{letter}"


def counts(values: Sequence[float]) -> list[str]:
    """Numbers of an axis, all in the unit of the largest."""
    size, letter = _unit(max(values, default=1.0))
    return [f"{value / size:.3g}{letter}" for value in values]


def _unit(value: float) -> tuple[float, str]:
    return next((unit for unit in UNITS if value >= unit[0]), UNITS[-1])


def signed(found: Spread) -> str:
    """A difference with its interval."""
    margin = "" if found.margin is None else f" ± {found.margin:.3f}"
    return f"{found.mean:+.3f}{margin}".replace("-", "−")


def times(signs: Sequence[str], found: Spread) -> str:
    """A ratio from its logarithms, with its interval; a bound where not all seeds have one.

    Args:
        signs: of the seeds: ``=``, or ``<`` and ``>`` where only a bound is known.
        found: logarithms.
    """
    if ">" in signs:
        return f"< {math.exp(max(found.values)):.2f}" if set(signs) == {">"} else ""
    if "<" in signs:
        return f"> {math.exp(min(found.values)):.2f}"
    middle = math.exp(found.mean)
    if not found.margin:
        return f"{middle:.2f}"
    low, high = math.exp(found.mean - found.margin), math.exp(found.mean + found.margin)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def amounts(signs: Sequence[str], values: Sequence[float]) -> str:
    """The mean where all seeds have one, else each seed's."""
    if set(signs) == {"="}:
        low, high = count(min(values)), count(max(values))
        return count(fmean(values)) + (f" ({low} to {high})" if high != low else "")
    pairs = zip(signs, values, strict=True)
    said = [f"{sign.strip('=')} {count(value)}".strip() for sign, value in pairs]
    return said[0] if len({*said}) == 1 else ", ".join(said)
