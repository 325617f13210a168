"""Where a recipe reads and writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from growkit.base.errors import InputError
from growkit.checkpoint.elsewhere import STORE, address_in
from growkit.checkpoint.inputs import Inputs
from growkit.recipe.recipe import Recipe


def output_path(recipe: Recipe) -> Path:
    """Where the output goes, absolute: the name must lead there also when OUT itself is moved.

    Raises:
        InputError: it is an address, where nothing is written.
    """
    output = Path(recipe.output)
    if STORE.fullmatch(recipe.output.lower()) and not os.path.lexists(output.parts[0]):
        raise InputError(
            f"{address_in(recipe.output)} is an address, and models are written to folders on this "
            "machine; name a folder, and upload that"
        )
    if ".." in output.parts:  # which leads elsewhere behind a link
        output = Path(os.path.realpath(output.parent)) / output.name
    return Path(os.path.abspath(output))


def inputs_of(recipe: Recipe, reads: Sequence[str | Path] = ()) -> Inputs:
    """Everything that a recipe reads, and its own file or the like."""
    paths: list[str | Path] = [recipe.source, *recipe.texts, *reads]
    states: list[Path] = []
    if recipe.optimizer:
        from growkit.optimizer.optimizer import formats

        path = Path(recipe.optimizer)
        # Any other folder, which may be the whole system, is refused and not looked through.
        (states if any(each.holds(path) for each in formats()) else paths).append(path)
    return Inputs(paths, states)
