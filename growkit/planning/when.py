"""When growing a trained model pays, as measured: from which age of the source on.

The age is the number of tokens that the source was trained with, for each of its parameters.
``python -m benchmarks.continual report`` writes the measurements into ``when.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from growkit.base.settings import check_number

FILE = Path(__file__).with_name("when.json")

LONG = ("1", "2")
"""Extra compute of which the sentence speaks, in multiples of the source's."""

TOKENS = (1, 1e18)
"""Limits of the tokens with which a source was trained."""


@dataclass(frozen=True)
class Crossing:
    """The age at which a way of growing begins to lead over training the source on.

    Attributes:
        sign: ``from`` or ``until``, if the lead begins or ends there; ``always`` or ``never``, if
            some seed leads at every measured age and the others from ``age``, or if none leads at
            the greatest; ``differs`` if seeds differ otherwise.
        age: mean over seeds of the logarithm, as an age; of ``always``, the least age from which
            every seed leads; of ``never``, the greatest measured age.
        low: lower end of the 95 % interval; of ``differs``, the least of any seed.
        high: upper end, likewise.
        seeds: number of seeds.
    """

    sign: str
    age: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        between = f"{self.low:.0f} to {self.high:.0f}"
        reach = f"({between})" if self.seeds > 1 else "(one seed)"
        return {
            "from": f"{self.age:.0f} {reach}",
            "until": f"until {self.age:.0f} {reach}",
            "always": f"{self.age:.0f} or less",
            "never": f"not up to {self.age:.0f}",
            "differs": f"seeds differ, {between}",
        }[self.sign]


@cache
def measured(file: Path = FILE) -> Mapping[str, Any]:
    """What was measured.

    Args:
        file: where it was written.

    Returns:
        ``least``: the smallest extra compute that was tried, in multiples of the source's;
        ``ways``: by name the ``steps`` of its recipe and ``sizes``, each with ``parameters`` of
        the source, ``ages``, whether it is ``complete``, and ``crossings`` (each a ``Crossing`` by
        its fields) by the extra compute, in multiples of the source's.
    """
    return json.loads(file.read_text("utf-8"))  # type: ignore[no-any-return]


def check_tokens(trained_tokens: float | None) -> None:
    """Refuse a number of tokens that no source was trained with.

    Raises:
        InputError: the number is beyond its limits.
    """
    if trained_tokens is not None:
        check_number("trained_tokens", trained_tokens, TOKENS, whole=False)


def when_growing_pays(
    steps: Sequence[Mapping[str, Any]],
    parameters: int,
    trained_tokens: float | None,
    file: Path = FILE,
) -> str | None:
    """Compare a source's age with the ages from which on its growths were ahead, in a sentence.

    Args:
        steps: of a recipe, or of several, as plain data.
        parameters: number of parameters of the source.
        trained_tokens: number of tokens with which it was trained; None if unknown.
        file: see ``measured``.

    Returns:
        The sentence, without its full stop; None without that number.
    """
    if trained_tokens is None:
        return None
    asked = {_kind(step) for step in steps if "grow" in step}
    every = measured(file)["ways"]
    ways = {name: way for name, way in every.items() if _kind(way["steps"][0]) in asked}
    age = trained_tokens / parameters
    here = f"the source has seen {age:{',.0f' if age >= 10 else '.2g'}} tokens for each parameter"
    if not ways:
        return f"{here}; whether this growth pays was not measured"
    sizes = [size for way in ways.values() for size in way["sizes"].values()]
    most, oldest = (max(found) for found in zip(*map(_reach, sizes), strict=True))
    beyond = [f"sources of more than {most:,} parameters"] if parameters > most else []
    if age > oldest:
        beyond.append(f"more than {oldest:.0f} tokens for each parameter")
    limits = f" ({' and '.join(beyond)} were not measured)" if beyond else ""
    return (
        f"{here}; growing was ahead of training on with equal compute from these on: "
        f"{'; '.join(_found(ways))}{limits}"
    )


def _kind(step: Mapping[str, Any]) -> tuple[str, str]:
    return step["grow"], str(step.get("blocks", "identity"))


def _reach(size: Mapping[str, Any]) -> tuple[int, float]:
    return size["parameters"], max(size["ages"])


def _found(ways: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """What was measured of every way, at every size."""
    for name, way in ways.items():
        for size in way["sizes"].values():
            each = [f"{Crossing(**size['crossings'][extra])} with {extra} ×" for extra in LONG]
            yield (
                f"{name} {', '.join(each)} the compute of the source's training, in models of "
                f"{size['parameters']:,} parameters{'' if size['complete'] else ', unfinished'}"
            )


def short_probe(share: float, file: Path = FILE) -> str | None:
    """Warn of a probe that is shorter than all that was measured; None if it is not.

    Args:
        share: its compute for each model, in multiples of what the source was trained with.
        file: see ``measured``.
    """
    least = measured(file)["least"]
    if share >= least:
        return None
    return (
        f"the probe spends {share:.2g} times the compute of the source's training; leads were "
        f"measured from {least:g} times on, and an exact copy that is ahead in a short run may not "
        "stay there (arXiv 2604.04281); take more --steps"
    )
