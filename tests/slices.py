"""Random slices of grown and converted models, compared with the written files.

Any rectangular part of any tensor must be, bit for bit, that part of the file; and of the source,
exactly what it copies must be read.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    PreTrainedConfig,
)

import growkit
from growkit.algebra.expansion import NOTHING
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.families.example import Example
from growkit.families.family import family_of
from growkit.growth.copying import MoreRows
from growkit.planning.lineage import Lineage
from growkit.planning.transforms import Constant, Mapped, Section, Slices, Stacked, Transform
from growkit.recipe.files import parse_recipe
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import Recipe
from tests.conftest import save_random
from tests.fuzz.steps import any_operation, options
from tests.sizes import KINDS

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")


@dataclass
class Case:
    """A source, and what is done with it."""

    config: PreTrainedConfig
    dtype: str
    steps: list[dict[str, Any]]
    seed: int


@dataclass
class Counts:
    """What was looked at."""

    slices: int = 0
    local: int = 0
    needed: int = 0
    read: int = 0
    of: int = 0


def any_case(seed: int) -> Case:
    """Any model of any family, and anything that operations say can be done to it."""
    chance = Random(seed)
    while True:
        kind = chance.choice(list(KINDS))
        config = CONFIG_MAPPING[kind](**KINDS[kind].any(chance))
        taken = []
        for _ in range(chance.choice([1, 1, 2])):
            verb, operation = any_operation(chance)
            taken.append({verb: operation.name, **options(chance, operation, 0)})
        if any("calibration" in step or "auto" in step.values() for step in taken):
            continue  # texts are read for these
        content = {"source": "source", "output": "out", "verify": False, "steps": taken}
        settings = json.loads(config.to_json_string(use_diff=False))
        with suppress(InputError, AssertionError):  # numbers that headers do not have
            plan_recipe(
                parse_recipe(content, "recipe"), Example(family_of(settings, kind), settings)
            )
            return Case(config, chance.choice(DTYPES), taken, chance.randrange(10))


def recipe_of(case: Case, folder: Path) -> Recipe:
    """Save the source of a case; what is done with it goes to ``out``."""
    source = save_random(folder / "source", case.config, case.seed)
    file = source / "model.safetensors"
    dtype = getattr(torch, case.dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    content: dict[str, Any] = {"source": str(source), "output": str(folder / "out")}
    content |= {"steps": case.steps, "seed": case.seed, "verify": False}
    return parse_recipe(content, "recipe")


def look(case: Case, folder: Path, chance: Random, each: int, counts: Counts) -> bool:
    """Write the output of a case, and take some slices of its tensors; false if there is none.

    Raises:
        AssertionError: a slice is not that part of the file, or more or less was read than needed.
    """
    recipe = recipe_of(case, folder)
    with suppress(InputError):  # a variant that the model is already, a dtype that rounds
        growkit.run(recipe)
    if not (folder / "out").exists():
        return False
    checkpoint = Checkpoint(recipe.source)
    way = plan_recipe(recipe, checkpoint)
    lineage = way.lineage
    written = load_file(folder / "out" / "model.safetensors")
    for name in chance.choices(sorted(written), k=each):
        whole = written[name]
        where = [slice(*sorted(chance.choices(range(n + 1), k=2))) for n in whole.shape]
        with reading(checkpoint) as read:
            part = lineage.target.read(name, *where)
        _same(part, whole[tuple(where)], f"{case}: {name} {where}")
        counts.slices += 1
        needed = needed_of(lineage, name, where)
        if needed is None:
            continue
        found = {name: places for name, places in read.items() if places}
        expected = {name: places for name, places in needed.items() if places}
        assert found == expected, f"{case}: {name} {where}"
        counts.local += 1
        counts.needed += sum(map(len, needed.values()))
        counts.read += sum(map(len, read.values()))
        counts.of += sum(checkpoint.tensors[name].elements for name in needed)
    return True


def _same(part: Tensor, expected: Tensor, what: str) -> None:
    assert (part.dtype, part.shape) == (expected.dtype, expected.shape), what
    one, other = (each.contiguous().view(torch.uint8) for each in (part, expected))
    assert one.equal(other), what


Places = dict[str, set[tuple[int, int]]]
"""Rows and columns of tensors."""


@contextmanager
def reading(checkpoint: Checkpoint) -> Iterator[Places]:
    """What is read of a checkpoint meanwhile."""
    found: Places = {}
    read = Checkpoint.read

    def noted(self: Checkpoint, name: str, *where: slice | None) -> Tensor:
        length, width = (*self.tensors[name].shape, 1, 1)[:2]
        rows, columns = (*where, None, None)[:2]
        chosen = range(width)[columns or slice(None)]
        found.setdefault(name, set()).update(
            (row, column) for row in range(length)[rows or slice(None)] for column in chosen
        )
        return read(self, name, *where)

    with mock.patch.object(Checkpoint, "read", noted):
        yield found


Chosen = list[NDArray[np.int64]]
"""Coordinates of a part, for every dimension."""


def needed_of(lineage: Lineage, name: str, where: Slices) -> Places | None:
    """What a slice copies, as the maps of all steps say; None if a step needs everything."""
    parts: list[tuple[str, Chosen]] = [(name, [np.arange(w.start, w.stop) for w in where])]
    for each in reversed(lineage.plans):
        copied = [_copied(each.by_target[name].transform, chosen) for name, chosen in parts]
        if None in copied:
            return None
        parts = [part for some in copied if some for part in some]
    found: Places = {}
    for name, chosen in parts:
        rows, columns, *_ = (*chosen, np.zeros(1, np.int64))
        places = {(row, column) for row in rows.tolist() for column in columns.tolist()}
        found.setdefault(name, set()).update(places)
    return found


def _copied(transform: Transform, chosen: Chosen) -> list[tuple[str, Chosen]] | None:
    """What a transform copies into a part of its target."""
    if isinstance(transform, Constant):
        return []
    new = isinstance(transform, MoreRows) and transform.mean
    if not transform.local or (new and (chosen[0] >= transform.maps[0].size).any()):
        return None
    if isinstance(transform, Section):
        moved = [c + begin for c, begin in zip(chosen, transform.begin, strict=True)]
        return _copied(transform.whole, moved)
    if isinstance(transform, Stacked):
        found: list[tuple[str, Chosen]] = []
        for number in chosen[0].tolist():
            end = 0
            for part, count in transform.matrices[number]:
                begin, end = end, end + count
                rows = chosen[1][(chosen[1] >= begin) & (chosen[1] < end)] - begin
                some = _copied(part, [rows, chosen[2]])
                if some is None:
                    return None
                found += some
        return found
    if isinstance(transform, Mapped):
        sources = [m.source[c] for m, c in zip(transform.maps, chosen, strict=True)]
        chosen = [np.unique(each[each != NOTHING]) for each in sources]
    (name,) = transform.sources
    return [(name, chosen)]


def sweep(seeds: Iterator[int], count: int, each: int) -> Counts:
    """Look at so many slices."""
    counts = Counts()
    while counts.slices < count:
        seed = next(seeds)
        with tempfile.TemporaryDirectory() as folder:
            look(any_case(seed), Path(folder), Random(seed), each, counts)
    return counts
