"""What a probe is asked for: how it trains, and the recipes that it tries."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import name_of
from growkit.base.settings import DEVICES, check_options, option
from growkit.checkpoint.publishing import MANIFEST
from growkit.engine.prompts import read_text
from growkit.recipe.recipe import Recipe, load_recipe, recipe_file
from growkit.sources import Source

COMPUTED = ("float32", "bfloat16")
"""Dtypes that a training computes in; weights and moments are float32."""

MOST_TOKENS, MOST_RATES, MOST_CANDIDATES = 1 << 24, 20, 50
"""Limits: of the tokens of a step, of learning rates, and of recipes."""

LARGEST = 1e15
"""Rate or decay, so that updates stay within float32."""

NOWHERE = "grown"
"""The source and the output of a recipe that has none; a probe replaces both."""


@dataclass(frozen=True)
class ProbeSettings:
    """How every candidate and the source are trained.

    Attributes:
        steps: of AdamW that each takes.
        seeds: trainings of each, on as many orders of the same windows, the same for all.
        lr: learning rates of the source; every candidate gets the best of them, and its own
            follow from each by the law of updates.
        weight_decay: of all but norms and biases, as transformers' Trainer has it.
        warmup: steps until the rate is reached. Then it stays, so that a training is one of its
            length wherever it is cut.
        batch: windows in a step.
        length: tokens in a window, at most as many as the source takes.
        dtype: ``float32``, or ``bfloat16`` by autocast; None for bfloat16 on a GPU alone.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
    """

    steps: int = option(120, "Steps of AdamW that each takes.", limits=(1, 100_000))
    seeds: int = option(3, "Trainings of each, on other orders of the text.", limits=(2, 100))
    lr: tuple[float, ...] = option(
        (1e-4,),
        "Learning rates of SRC; each candidate gets the best, by the law of updates.",
        "RATE…",
        limits=(None, LARGEST),
    )
    weight_decay: float = option(
        0.1, "Of all but norms and biases, as in Trainer.", limits=(0, LARGEST)
    )
    warmup: int = option(10, "Steps until the rate is reached; then it stays.", limits=(0, 100_000))
    batch: int = option(4, "Windows in a step.", limits=(1, MOST_TOKENS))
    length: int = option(128, "Tokens in a window, at most.", limits=(2, MOST_TOKENS))
    dtype: str | None = option(
        None,
        "What is computed in: float32, or bfloat16 by autocast, the default on a GPU.",
        values=COMPUTED,
    )
    device: str = option("auto", "Where it trains: auto, cpu or cuda.", values=DEVICES)

    def __post_init__(self) -> None:
        rates: Any = self.lr if isinstance(self.lr, list | tuple) else (self.lr,)
        object.__setattr__(self, "lr", tuple(rates))
        check_options(self)
        object.__setattr__(self, "lr", tuple(dict.fromkeys(map(float, rates))))
        if not 1 <= len(self.lr) <= MOST_RATES:
            raise InputError(f"{len(self.lr)} learning rates were given; give 1 to {MOST_RATES}")
        if self.batch * self.length > MOST_TOKENS:
            raise InputError(
                f"{self.batch:,} windows of {self.length:,} tokens are too many for a step; give "
                f"fewer or shorter ones, of at most {MOST_TOKENS:,} tokens in all"
            )


@dataclass(frozen=True)
class Candidate:
    """A recipe that is tried.

    Attributes:
        name: in the result, no two alike.
        folder: name of the folder that it is grown in.
        recipe: how it is grown; its output is not written, and no optimizer's state is grown.
        file: of the recipe; None if it was given as an object.
    """

    name: str
    folder: str
    recipe: Recipe
    file: Path | None


def candidates_of(
    given: Sequence[Recipe | str | Path] | Recipe | str | Path, source: str, found: Source
) -> list[Candidate]:
    """The candidates; the source of every recipe is replaced.

    Args:
        given: recipes, or what ``growkit.run`` takes for one.
        source: as it was given.
        found: where that is.

    Raises:
        InputError: there are none, or one cannot be read.
    """
    given = [given] if isinstance(given, Recipe | str | Path) else given
    if not 1 <= len(given) <= MOST_CANDIDATES:
        raise InputError(f"{len(given)} candidates were given; give 1 to {MOST_CANDIDATES} recipes")
    taken, chosen = {name_of(found.name)}, []
    for number, each in enumerate(given, 1):
        file = None
        if isinstance(each, Recipe):
            name, recipe = name_of(each.output), each
        else:
            file = recipe_file(Path(each))
            name = name_of(str(file.parent)) if file.name == MANIFEST else file.stem
            recipe = _read(file)
        folder = f"{number:02}-{re.sub(r'[^a-zA-Z0-9._-]+', '-', name)[:60]}"
        names = chain([name], (f"{name} ({n})" for n in count(2)))
        unused = next(name for name in names if name not in taken)
        taken.add(unused)
        chosen.append(Candidate(unused, folder, replace(recipe, source=source), file))
    return chosen


def _read(file: Path) -> Recipe:
    """A recipe, with its file in every error, as there are several."""
    try:
        recipe = load_recipe(file, otherwise={"source": NOWHERE, "output": NOWHERE})
        for text in recipe.texts:
            read_text(text)  # before anything that takes time
    except InputError as error:
        if str(InputError(str(file))) in str(error):
            raise
        raise InputError(f"{file}: {error}") from error
    return recipe
