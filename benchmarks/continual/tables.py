"""The tables of an experiment, in Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from benchmarks.continual.analysis import Judged, Outcome, Spread, differences, reached
from benchmarks.continual.experiment import Experiment
from benchmarks.continual.wording import amounts, signed, times

LOSSES = ("at", "tokens", "flops", "validation", "test")
"""What is known of every point."""


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
        cells = []
        for share in shares:
            values = outcome.at(share)
            cell = f"{fmean(values.values()):.3f}" if values else ""
            above = differences(values, baseline.at(share))
            if above and name != baseline.name:
                cell += f" ({signed(above)})"
            cells.append(cell)
        edge = " (edge)" * outcome.at_edge
        rows.append([name, f"{outcome.rate:g}{edge}", *cells])
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
    for share in dict.fromkeys((goal.last, goal.shares[-1])):
        rows = []
        for name, outcome in shown.items():
            found = reached(outcome, goal, share)
            if found is None:
                continue
            cells = [
                amounts(found.signs, found.tokens),
                amounts(found.signs, found.flops),
                amounts(found.signs, found.total),
                times(found.signs, found.saved),
                times(found.signs, found.saved_total),
            ]
            rows.append([name, *cells])
        yield (
            f"What it takes to the loss of “{goal.name}” at "
            f"{budget(share, experiment.scale.extra)} the source's compute "
            f"({fmean(goal.at(share).values()):.3f}; between two points in a straight line over "
            "the logarithm; < is the least that was tried, > the most, and the loss was not "
            "reached):\n\n"
        ) + table(
            [
                "arm",
                "extra tokens",
                "extra FLOPs",
                "FLOPs with the source's",
                "times as fast, extra",
                "times as fast, with the source's",
            ],
            rows,
        )


def measures(shown: Mapping[str, Outcome]) -> Iterator[str]:
    """What else was measured at the last point."""
    points: dict[str, list[dict[str, Any]]] = {
        name: [line["points"][-1] for line in each.lines.values()] for name, each in shown.items()
    }
    kinds = [key for key in next(iter(points.values()))[0] if key not in LOSSES]
    if not kinds:
        return
    rows = []
    for name, each in points.items():
        spreads = [Spread(tuple(point[kind] for point in each)) for kind in kinds]
        rows.append([name, *map(_with_margin, spreads)])
    yield "At the last point (mean over seeds):\n\n" + table(["arm", *kinds], rows)


def _with_margin(found: Spread) -> str:
    margin = "" if found.margin is None else f" ± {found.margin:.3f}"
    return f"{found.mean:.3f}{margin}"


def claims(all_of_them: Sequence[Judged]) -> str:
    """Claims, and the differences that were measured."""
    rows = []
    for each in all_of_them:
        found = signed(each.found) if each.found else ""
        rows.append([each.says, found + f" ({each.of})" * (each.of != "test"), each.verdict])
    return table(["claim", "difference here", "does it appear?"], rows)


def rates(experiment: Experiment, made: Mapping[str, Outcome]) -> str:
    """Validation losses with every learning rate."""
    tried = experiment.learning_rates
    rows = []
    for name, outcome in made.items():
        cells = []
        for rate in tried:
            loss = outcome.tried[rate]
            cell = "diverged" if loss is None else f"{loss:.3f}"
            cells.append(f"**{cell}**" if rate == outcome.rate else cell)
        rows.append([name, *cells])
    said = "Validation loss at the last point with every learning rate, on the first seed:\n\n"
    said += table(["", *(f"{each:g}" for each in tried)], rows)
    if edges := [name for name, each in made.items() if each.at_edge]:
        said += f"\nAt the edge of what was tried: {', '.join(edges)}.\n"
    return said
