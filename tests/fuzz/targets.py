"""What is made odd, and how often."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.fuzz import lines, pairs, sources, steps
from tests.fuzz.case import Case
from tests.fuzz.sources import Places

TARGETS: dict[str, tuple[Callable[[Random, Places], Case], float]] = {
    "config": (sources.config, 30),
    "weights": (sources.weights, 18),
    "index": (sources.index, 8),
    "pickled": (sources.pickled, 8),
    "folder": (sources.folder, 2),
    "recipe": (lines.recipe, 13),
    "arguments": (lines.arguments, 13),
    "steps": (steps.steps, 20),
    "manifest": (pairs.manifest, 4),
    "growth": (sources.growth, 0.6),
    "text": (pairs.text, 0.3),
    "proof": (pairs.proof, 0.15),
    "tokenizer": (pairs.tokenizer, 0.15),
    "generation": (pairs.generation, 0.05),
}
"""Every target, and its share of the inputs: what runs models takes a hundred times as long."""


def draw(seed: int, number: int, places: Places, only: str | None = None) -> tuple[str, Case]:
    """The input of a number: its target, and what is odd."""
    random = Random(f"{seed}/{number}")
    target = only or random.choices(list(TARGETS), [share for _, share in TARGETS.values()])[0]
    return target, TARGETS[target][0](random, places)
