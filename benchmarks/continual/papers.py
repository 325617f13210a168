"""What papers claim about when growing pays, held against the experiments on it.

Claims about the age of a source are computed at equal extra compute, those about compute from all
of it, the source's included. Every figure is an interval over seeds; a claim appears if it is on
the claimed side alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.continual import ages, tables
from benchmarks.continual.analysis import Outcome, interval, reached
from benchmarks.continual.sections import Section
from growkit.report.drawing import Interval

Measured = Mapping[str, Interval]
"""Figures by what was grown."""


def rows(compared: Sequence[Section], scratch: Sequence[Section]) -> Iterator[list[str]]:
    """A line for each claim: what it says, figures of the largest models, and whether it appears.

    Args:
        compared: experiments with sources of several ages.
        scratch: experiments in which models from scratch set the goals.
    """
    for claim in CLAIMS:
        cell = ""
        verdicts: dict[str, list[str]] = {}
        for section in compared if claim.by_age else scratch:
            found, name = claim.test(section), section.experiment.scale_name
            each = ", ".join(f"{what} {claim.shown(value)}" for what, value in found.items())
            if each:
                cell = f"{name}: {each}"
                verdicts.setdefault(verdict(found, claim.beyond), []).append(name)
        shown = [f"{', '.join(sizes)}: {outcome}" for outcome, sizes in verdicts.items()]
        if len(verdicts) == 1:
            shown = [*verdicts]
        link = f"[{claim.number}](https://arxiv.org/abs/{claim.number})"
        yield [f"{claim.says} ({link})", cell, "; ".join(shown) or "not run"]


def verdict(found: Measured, beyond: float = 0.0) -> str:
    """Whether a claim appears.

    Args:
        found: what was measured.
        beyond: what its intervals must be above.
    """
    several = [name for name, each in found.items() if len(each.each) > 1]
    if not several:
        return "not run"
    ahead = [name for name in several if found[name].low > beyond]
    if len(ahead) == len(several):
        return "appears"
    if any(found[name].high == math.inf for name in several):
        return "not testable here"
    return f"appears for {', '.join(ahead)} only" if ahead else "does not appear"


def _paired(pairs: Mapping[str, Mapping[int, float]]) -> dict[str, Interval]:
    return {name: interval([*each.values()], name) for name, each in pairs.items() if each}


def shrinking(section: Section) -> Measured:
    """By how much more a grown model leads over one from scratch at its least budget, in nats."""
    found = {}
    for kind, name in (("width", "wide after 25 %"), ("depth", "deep after 25 % (stack)")):
        pair = section.arms.get(name), section.arms.get(f"{name.split()[0]} from scratch")
        if all(pair):
            grown, new = (each for each in pair if each)
            shares = [share for share in grown.shares if share in new.shares]
            first, last = (_apart(new.at(at), grown.at(at)) for at in (shares[0], shares[-1]))
            found[kind] = _apart(first, last)
    return _paired(found)


BRIEF = {"wide": "twice as wide", "stack": "twice as deep (stack)", "experts": "four experts"}
"""Ways of growing that papers speak of."""


def _by_age(section: Section, *brief: str) -> Iterator[tuple[str, list[Outcome]]]:
    """Ways of growing with their outcomes from the youngest source to the oldest."""
    known = ages.ways(section.experiment)
    for name in (each for each in brief if BRIEF[each] in known):
        by_source = known[BRIEF[name]]
        sources = sorted(by_source, key=section.experiment.source_tokens)
        arms = [section.arms.get(by_source[source]) for source in sources]
        if all(arms):
            yield name, [arm for arm in arms if arm]


def slower(section: Section) -> Measured:
    """How much smaller the exponent of the loss over tokens is for the oldest source.

    Taken between the first and the last point, without a loss that cannot be reduced.
    """
    found = {}
    for way, arms in _by_age(section, "wide", "stack"):
        found[way] = _apart(*(_exponents(arm) for arm in (arms[0], arms[-1])))
    return _paired(found)


def _exponents(arm: Outcome) -> dict[int, float]:
    found = {}
    for seed, line in arm.lines.items():
        first, last = line["points"][0], line["points"][-1]
        fallen = math.log(first["test"] / last["test"])
        found[seed] = fallen / math.log(last["tokens"] / first["tokens"])
    return found


def _apart(one: Mapping[int, float], other: Mapping[int, float]) -> dict[int, float]:
    """How far one is above the other, by seed."""
    return {seed: value - other[seed] for seed, value in one.items() if seed in other}


def sunk(section: Section) -> Measured:
    """How far the oldest source ends ahead of the next one at the same extra compute, in nats."""
    found = {}
    shares = [*ages.budgets(section.experiment).values()]
    for way, arms in _by_age(section, "stack", "experts"):
        young, old = (
            section.experiment.source_tokens(section.experiment.arms[arm.name].source)
            for arm in arms[-2:]
        )
        equal = [(a, b) for a in shares for b in shares if a * young == b * old]
        if equal:
            own, older = max(equal)
            found[way] = _apart(arms[-2].at(own), arms[-1].at(older))
    return _paired(found)


def saved(arm: Outcome, goal: Outcome) -> Interval | None:
    """The logarithm of a goal's compute over the arm's to its loss, the source's included.

    A seed that does not reach it has saved nothing. If one is there at its first point already, the
    interval has no upper end.
    """
    found = reached(arm, goal, goal.last)
    least = [min(each.saved_total, 0.0) if each.sign == ">" else each.saved_total for each in found]
    if not least:
        return None
    bounded = "<" not in {each.sign for each in found}
    mean = interval(least, arm.name)
    return mean if bounded else replace(mean, high=math.inf)


def _best(section: Section, goal: str, names: Sequence[str]) -> Measured:
    """The arm that saves most."""
    arms = section.arms
    every = [saved(arms[name], arms[goal]) for name in names if name in arms and goal in arms]
    found = [each for each in every if each]
    return {each.name: each for each in [max(found, key=lambda each: each.mean)]} if found else {}


def one_layer(section: Section) -> Measured:
    """Compute that models grown from one layer save."""
    names = [f"deep after {n} % ({how})" for n in (25, 50, 80) for how in ("identity", "stack")]
    return _best(section, "deep from scratch", names)


def mid_training(section: Section) -> Measured:
    """Compute that models save whose width is doubled on the way, with new moments."""
    names = [f"wide after {n} %, new moments" for n in (25, 50, 80)]
    return _best(section, "wide from scratch", names)


NEVER = "not reached"


def share(found: Interval) -> str:
    """A logarithm of compute saved as the share that is left."""
    if max(found.each) <= 0:
        return NEVER
    middle, low, high = (math.exp(-each) for each in (found.mean, found.high, found.low))
    return f"{middle:.2f} ({low:.2f} to {high:.2f})" if low else f"less than {middle:.2f}"


@dataclass(frozen=True)
class Claim:
    """What a paper says.

    Attributes:
        number: of arXiv.
        says: the claim.
        test: measures it in an experiment.
        by_age: whether that has sources of several ages; else models from scratch set its goals.
        beyond: what intervals must be above for the claim to appear.
        shown: prints a figure.
    """

    number: str
    says: str
    test: Callable[[Section], Measured]
    by_age: bool = False
    beyond: float = 0.0
    shown: Callable[[Interval], str] = tables.signed


CLAIMS = (
    Claim(
        "2605.13405",
        "leads over a new model shrink with the budget (by, nats)",
        shrinking,
    ),
    Claim(
        "2510.06548",
        "older sources: the loss falls more slowly after growing (exponent of the tokens)",
        slower,
        by_age=True,
    ),
    Claim(
        "2510.08008",
        "older sources end ahead, with equal compute after growing (by, nats)",
        sunk,
        by_age=True,
    ),
    Claim(
        "2511.04981",
        "from one layer: at most a third of the compute from scratch (share)",
        one_layer,
        beyond=math.log(3),
        shown=share,
    ),
    Claim(
        "2602.02472",
        "width × 2 on the way, with new moments: up to 35 % less compute (share left)",
        mid_training,
        shown=share,
    ),
)
