"""What is tried: recipes, each with a name, all for one source."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path

from growkit.base.errors import InputError
from growkit.base.paths import name_of
from growkit.checkpoint.inputs import Inputs
from growkit.checkpoint.made import MANIFEST
from growkit.checkpoint.sources.hub import address_of
from growkit.checkpoint.sources.source import Source
from growkit.engine.texts import read_text
from growkit.recipe.files import load_recipe, recipe_file, shipped_recipes
from growkit.recipe.recipe import Recipe

MOST_CANDIDATES = 50

NOWHERE = "grown"
"""The output of a recipe that has none; a probe writes somewhere else."""


@dataclass(frozen=True)
class Candidate:
    """A recipe that is tried.

    Attributes:
        name: what it is called, no two alike.
        folder: the name of the folder for what it makes.
        recipe: how it is made; its output is not written, and its optimizer left out.
        file: where the recipe stands; None if it was given as it is.
        optimizer: the state of an optimizer that the recipe names; None without one.
    """

    name: str
    folder: str
    recipe: Recipe
    file: Path | None
    optimizer: str | None = None


def candidates_of(
    given: Sequence[Recipe | str | Path] | Recipe | str | Path, source: str, found: Source
) -> list[Candidate]:
    """The candidates.

    A recipe is for the source if it names it, or names none. Of recipes that ship with growkit,
    the source is an example, and of a manifest, a name.

    Args:
        given: recipes, or what ``growkit.run`` takes for one.
        source: as it was given.
        found: where that is.

    Raises:
        InputError: there are none, one cannot be read, or one is for another source.
    """
    given = [given] if isinstance(given, Recipe | str | Path) else given
    if not 1 <= len(given) <= MOST_CANDIDATES:
        raise InputError(f"{len(given)} candidates were given; give 1 to {MOST_CANDIDATES} recipes")
    chosen: list[Candidate] = []
    for number, each in enumerate(given, 1):
        if isinstance(each, Recipe):
            name, file, recipe = name_of(each.output), None, each
            _check_source(recipe.source, source, found, f"the recipe of {each.output}")
        else:
            file = recipe_file(Path(each))
            name = name_of(str(file.parent)) if file.name == MANIFEST else file.stem
            with _naming(file):
                recipe = load_recipe(file, otherwise={"source": source, "output": NOWHERE})
                for text in recipe.texts:
                    read_text(text)  # before anything that takes time
            if file not in shipped_recipes().values():
                _check_source(recipe.source, source, found, str(file))
        slug = re.sub(r"[^a-zA-Z0-9._-]+", "-", name)[:60]
        # The source has no optimizer state to continue from.
        made = replace(recipe, source=source, optimizer=None)
        called = _unused(name, {name_of(found.name), *(other.name for other in chosen)})
        chosen.append(Candidate(called, f"{number:02}-{slug}", made, file, recipe.optimizer))
    return chosen


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Say of which of several recipes an error is."""
    try:
        yield
    except InputError as error:
        if str(InputError(str(file))) in str(error):
            raise
        raise InputError(f"{file}: {error}") from error


def _unused(name: str, names: Collection[str]) -> str:
    """A name that is not among those there are; a number is put behind one that is."""
    numbered = (f"{name} ({number})" for number in count(2))
    return next(each for each in chain([name], numbered) if each not in names)


def _check_source(named: str, source: str, found: Source, where: str) -> None:
    """Refuse a recipe for something else."""
    address = address_of(named)
    if named in (source, found.name) or (address and address == address_of(source)):
        return
    if not os.path.lexists(named) and named == name_of(source):  # as manifests have it
        return
    with suppress(OSError):
        if os.path.samefile(named, found.folder):
            return
    raise InputError(
        f"source in {where} is {named}, but {source} is probed; leave the source out of the "
        "recipe, or probe that one"
    )


def inputs_of(found: Source, candidates: Sequence[Candidate], text: str | Path) -> Inputs:
    """Everything that a probe reads."""
    texts = [each for candidate in candidates for each in candidate.recipe.texts]
    files = [candidate.file for candidate in candidates if candidate.file]
    return Inputs([found.folder, text, *texts, *files])
