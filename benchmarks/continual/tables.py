"""The tables of an experiment, in Markdown, and figures as they are printed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.continual.analysis import REVERSED, Judged, Outcome, differences, interval, reached
from benchmarks.continual.experiment import Experiment
from growkit.report.drawing import Interval

UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
LOSSES = ("at", "tokens", "flops", "validation", "test")
"""What is known of every point."""


def count(value: float) -> str:
    """A large number with three digits."""
    size, letter = unit_of(value)
    return f"{value / size:.3g}{letter}"


def unit_of(value: float) -> tuple[float, str]:
    """The largest unit that is not above a value, and its letter."""
    return next((unit for unit in UNITS if value >= unit[0]), UNITS[-1])


def with_margin(found: Interval, sign: str = "") -> str:
    """A mean with its interval."""
    margin = f" ± {found.high - found.mean:.3f}" if len(found.each) > 1 else ""
    return f"{found.mean:{sign}.3f}{margin}"


def signed(found: Interval) -> str:
    """A difference with its interval."""
    return with_margin(found, "+").replace("-", "−")


def times(signs: Sequence[str], logarithms: Sequence[float]) -> str:
    """A ratio from its logarithms, with its interval; a bound where not all seeds have one.

    Args:
        signs: of the seeds: ``=``, or ``<`` and ``>`` where only a bound is known.
        logarithms: of the seeds.
    """
    if ">" in signs:
        return f"< {math.exp(max(logarithms)):.2f}" if set(signs) == {">"} else ""
    if "<" in signs:
        return f"> {math.exp(min(logarithms)):.2f}"
    found = interval(logarithms)
    middle, low, high = (f"{math.exp(each):.2f}" for each in (found.mean, found.low, found.high))
    return middle if found.low == found.high else f"{middle} ({low} to {high})"


def amounts(signs: Sequence[str], values: Sequence[float]) -> str:
    """The mean where all seeds have one, else each seed's."""
    if set(signs) == {"="}:
        low, high = count(min(values)), count(max(values))
        return count(fmean(values)) + (f" ({low} to {high})" if high != low else "")
    pairs = zip(signs, values, strict=True)
    each = [f"{sign.strip('=')} {count(value)}".strip() for sign, value in pairs]
    return each[0] if len({*each}) == 1 else ", ".join(each)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Rows under their head."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def budget(share: float | str, extra: float) -> str:
    """A point's compute, in multiples of the source's.

    Args:
        share: of the extra compute, or ``total``.
        extra: what an arm may compute, in multiples of what its source took.
    """
    return f"{extra + 1 if share == 'total' else float(share) * extra:g} ×"


def losses(experiment: Experiment, shown: Mapping[str, Outcome], baseline: Outcome) -> str:
    """Test losses at all points, and how far they are from those of the baseline."""
    shares = list(dict.fromkeys(share for each in shown.values() for share in each.shares))
    rows = []
    for name, outcome in shown.items():
        rows.append([name, f"{outcome.rate:g}{' (edge)' * outcome.at_edge}"])
        for share in shares:
            values = outcome.at(share)
            cell = f"{fmean(values.values()):.3f}" if values else ""
            above = differences(values, baseline.at(share))
            compared = above and name != baseline.name
            rows[-1].append(f"{cell} ({signed(above)})" if above and compared else cell)
    heads = [budget(share, experiment.scale.extra) for share in shares]
    return (
        "Test loss where the rate has decayed, by extra compute in multiples of the source's (mean "
        f"over seeds), and how far it is above that of “{baseline.name}”, seed by seed:\n\n"
        + table(["arm", "rate", *heads], rows)
    )


def compute_to(
    experiment: Experiment, shown: Mapping[str, Outcome], goal: Outcome
) -> Iterator[str]:
    """Tokens and FLOPs of all arms to the last losses of one of them.

    Args:
        experiment: whose arms they are.
        shown: arms by name.
        goal: whose losses are to be reached.
    """
    heads = ["arm", "extra tokens", "extra FLOPs", "FLOPs with the source's"]
    heads += ["times as fast, extra", "times as fast, with the source's"]
    for share in dict.fromkeys((goal.last, goal.shares[-1])):
        rows = []
        for name, outcome in shown.items():
            if found := reached(outcome, goal, share):
                signs = [each.sign for each in found]
                spent = ([e.tokens for e in found], [e.flops for e in found])
                saved = ([e.saved for e in found], [e.saved_total for e in found])
                cells = [amounts(signs, each) for each in (*spent, [e.total for e in found])]
                rows.append([name, *cells, *(times(signs, each) for each in saved)])
        yield (
            f"What it takes to the loss of “{goal.name}” at "
            f"{budget(share, experiment.scale.extra)} the source's compute "
            f"({fmean(goal.at(share).values()):.3f}; between two points in a straight line over "
            "the logarithm; < is the least that was tried, > the most, and the loss was not "
            "reached):\n\n"
        ) + table(heads, rows)


def measures(shown: Mapping[str, Outcome]) -> Iterator[str]:
    """What else was measured at the last point."""
    points: dict[str, list[dict[str, Any]]] = {
        name: [line["points"][-1] for line in each.lines.values()] for name, each in shown.items()
    }
    kinds = [key for key in next(iter(points.values()))[0] if key not in LOSSES]
    if not kinds:
        return
    rows = [
        [name, *(with_margin(interval([point[kind] for point in each])) for kind in kinds)]
        for name, each in points.items()
    ]
    yield "At the last point (mean over seeds):\n\n" + table(["arm", *kinds], rows)


def claims(every: Sequence[Judged]) -> str:
    """Claims, and the differences that were measured, in bold where the opposite appears."""
    rows = []
    for each in every:
        found = signed(each.found) if each.found else each.verdict
        found = f"**{found}**" if each.verdict == REVERSED else found
        rows.append([each.says, found + f" ({each.of})" * (each.of != "test")])
    return table(["claim", "difference here"], rows)


def rates(experiment: Experiment, made: Mapping[str, Outcome]) -> str:
    """Validation losses with every learning rate."""
    rows = []
    for name, outcome in made.items():
        rows.append([name])
        for rate in experiment.learning_rates:
            loss = outcome.tried.get(rate)
            cell = "" if loss is None else f"{loss:.3f}" if math.isfinite(loss) else "diverged"
            rows[-1].append(f"**{cell}**" if rate == outcome.rate else cell)
    seeds = "the first seed" if experiment.tuned_with == 1 else f"{experiment.tuned_with} seeds"
    text = f"Validation loss at the last point with every learning rate, on {seeds}:\n\n"
    text += table(["", *(f"{each:g}" for each in experiment.learning_rates)], rows)
    if edges := [name for name, each in made.items() if each.at_edge]:
        text += f"\nAt the edge of what was tried: {', '.join(edges)}.\n"
    return text
