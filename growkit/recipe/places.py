"""Where a recipe reads and writes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from growkit.checkpoint.folder import MOST_ENTRIES
from growkit.checkpoint.inputs import Inputs, below
from growkit.recipe.recipe import Recipe


def output_path(recipe: Recipe) -> Path:
    """Where the output goes, absolute: the name must lead there also when OUT itself is moved."""
    output = Path(recipe.output)
    if ".." in output.parts:  # which leads elsewhere behind a link
        output = Path(os.path.realpath(output.parent)) / output.name
    return Path(os.path.abspath(output))


def inputs_of(recipe: Recipe, reads: Sequence[str | Path] = ()) -> Inputs:
    """Everything that a recipe reads, and its own file or the like."""
    states = [Path(recipe.optimizer)] if recipe.optimizer else []
    inside = [each for path in states for each in islice(below(path), MOST_ENTRIES)]
    return Inputs([recipe.source, *recipe.texts, *reads, *states, *inside])
