"""Inputs of a probe: the settings of its training, and its candidates."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import name_of
from growkit.base.options import check_options, documented, option
from growkit.base.settings import DEVICES
from growkit.engine.prompts import read_text
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.planning.operation import parse_size
from growkit.planning.recipe import Recipe, load_recipe, recipe_file, shipped_recipes
from growkit.sources import Source

COMPUTED = ("float32", "bfloat16")
"""Dtypes of computation in a training; weights and moments are float32."""

MAX_TOKENS, MAX_RATES, MAX_CANDIDATES = 1 << 24, 20, 50
"""Largest numbers of tokens per step, of learning rates, and of recipes."""

LARGEST = 1e15
"""Largest learning rate or decay, so that updates stay within float32."""

SIZES_TRIED = 8
"""Limit of the sizes tried for a shipped recipe."""

UNUSED = "grown"
"""Placeholder for the missing source or output of a recipe; a probe replaces both."""


@documented
@dataclass(frozen=True)
class ProbeSettings:
    """Settings of the training of every candidate and of the source."""

    steps: int = option(120, "AdamW steps of each training.", limits=(1, 100_000))
    seeds: int = option(
        3, "Trainings per model, each with another order of the text.", limits=(2, 100)
    )
    lr: tuple[float, ...] = option(
        (1e-4,),
        "Learning rates of SRC; candidates follow by the law of updates, ranked at their best.",
        "RATE…",
        limits=(None, LARGEST),
    )
    weight_decay: float = option(
        0.1, "Weight decay of all but norms and biases, as in Trainer.", limits=(0, LARGEST)
    )
    warmup: int = option(
        10, "Steps until the learning rate is reached; it is constant then.", limits=(0, 100_000)
    )
    batch: int = option(4, "Windows per step.", limits=(1, MAX_TOKENS))
    length: int = option(128, "Longest window, in tokens.", limits=(2, MAX_TOKENS))
    dtype: str | None = option(
        None,
        "Dtype of computation: float32, or bfloat16 by autocast, the default on a GPU.",
        values=COMPUTED,
    )
    device: str = option("auto", "Device of the trainings: auto, cpu, cuda, …", values=DEVICES)

    def __post_init__(self) -> None:
        rates: Any = self.lr if isinstance(self.lr, list | tuple) else (self.lr,)
        object.__setattr__(self, "lr", tuple(rates))
        check_options(self)
        object.__setattr__(self, "lr", tuple(dict.fromkeys(map(float, rates))))
        if not 1 <= len(self.lr) <= MAX_RATES:
            raise InputError(f"{len(self.lr)} learning rates were given; give 1 to {MAX_RATES}")
        if self.batch * self.length > MAX_TOKENS:
            raise InputError(
                f"{self.batch:,} windows of {self.length:,} tokens are too many for a step; give "
                f"fewer or shorter ones, with at most {MAX_TOKENS:,} tokens in all"
            )


@dataclass(frozen=True)
class Candidate:
    """A recipe to try.

    Attributes:
        name: unique name in the result.
        folder: name of the folder for the grown model.
        recipe: the recipe; its output is not written, and no optimizer's state is grown.
        file: file of the recipe; None if it was given as an object.
        note: a warning about the recipe; empty if there is none.
    """

    name: str
    folder: str
    recipe: Recipe
    file: Path | None
    note: str = ""


def candidates_of(
    recipes: Sequence[Recipe | str | Path] | Recipe | str | Path, source: str, origin: Source
) -> list[Candidate]:
    """Read the candidates; the source of every recipe is replaced.

    Args:
        recipes: recipes, in any form that ``growkit.run`` accepts.
        source: the source as given by the user.
        origin: the resolved source.

    Raises:
        InputError: there are none or too many, or one cannot be read.
    """
    recipes = [recipes] if isinstance(recipes, Recipe | str | Path) else recipes
    if not 1 <= len(recipes) <= MAX_CANDIDATES:
        raise InputError(
            f"{len(recipes)} candidates were given; give 1 to {MAX_CANDIDATES} recipes"
        )
    taken, chosen = {name_of(origin.name)}, []
    for number, candidate in enumerate(recipes, 1):
        file = None
        if isinstance(candidate, Recipe):
            name, recipe = name_of(candidate.output), candidate
        else:
            file = recipe_file(Path(candidate))
            name = name_of(str(file.parent)) if file.name == MANIFEST else file.stem
            recipe = _read(file)
        folder = f"{number:02}-{re.sub(r'[^a-zA-Z0-9._-]+', '-', name)[:60]}"
        names = chain([name], (f"{name} ({n})" for n in count(2)))
        unused = next(name for name in names if name not in taken)
        taken.add(unused)
        chosen.append(Candidate(unused, folder, replace(recipe, source=source), file))
    return chosen


def _read(file: Path) -> Recipe:
    """Read a recipe, and name its file in every error."""
    try:
        recipe = load_recipe(file, otherwise={"source": UNUSED, "output": UNUSED})
        for text in recipe.texts:
            read_text(text)  # before any work that takes time
    except InputError as error:
        if str(InputError(str(file))) in str(error):
            raise
        raise InputError(f"{file}: {error}") from error
    return recipe


def fitting(candidate: Candidate, origin: Source) -> Candidate:
    """Give a shipped recipe the next larger size if the source cannot have the recipe's own.

    Args:
        candidate: any candidate; all but shipped recipes are returned as they are.
        origin: the source.
    """
    recipe = candidate.recipe
    if candidate.file not in shipped_recipes().values() or _is_possible(recipe):
        return candidate
    for number, step in enumerate(recipe.steps):
        for name, value in step.options.items():
            factor = parse_size(str(value), 1) if str(value).startswith("x") else None
            if factor is None or factor == 1:
                continue
            by_layers = name == "layers"
            least = int(factor * (_layers(origin) if by_layers else 1)) + 1
            for size in range(least, least + SIZES_TRIED):
                larger = str(size) if by_layers else f"x{size}"
                changed = replace(step, options={**step.options, name: larger})
                steps = (*recipe.steps[:number], changed, *recipe.steps[number + 1 :])
                if _is_possible(tried := replace(recipe, steps=steps)):
                    note = f"{candidate.name} grows {name} to {larger}, as {value} is not possible"
                    return replace(candidate, recipe=tried, note=note)
    return candidate


def _layers(origin: Source) -> int:
    """The number of layers of a source; 1 if no family is known."""
    from growkit.sources import family_for

    try:
        model = origin.headers(family_for(origin, None))
        return model.family.sizes(model.config)["layers"]
    except InputError:
        return 1


def _is_possible(recipe: Recipe) -> bool:
    from growkit.extras.inspection.large_plan import plan  # takes a second

    try:
        plan(recipe)
    except InputError:
        return False
    return True
