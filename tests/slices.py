"""Random slices of grown and converted models, compared with the written files.

Any rectangular part of any tensor must be, bit for bit, that part of the file.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    PreTrainedConfig,
)

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.families.family import family_of
from growkit.families.headers import Headers
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import Recipe, parse_recipe
from tests.conftest import save_random
from tests.fuzz.targets import any_operation, chosen_options
from tests.sizes import KINDS

DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2")


@dataclass
class Case:
    """A source, and what is done with it."""

    config: PreTrainedConfig
    dtype: str
    steps: list[dict[str, Any]]
    seed: int


def any_case(seed: int) -> Case:
    """Any model of any family, and anything that operations say can be done to it."""
    chance = Random(seed)
    while True:
        kind = chance.choice(list(KINDS))
        config = CONFIG_MAPPING[kind](**KINDS[kind].any(chance))
        taken = []
        for _ in range(chance.choice([1, 1, 2])):
            verb, operation = any_operation(chance)
            taken.append({verb: operation.name, **chosen_options(chance, operation, 0)})
        if any("calibration" in step or "auto" in step.values() for step in taken):
            continue  # texts are read for these
        content = {"source": "source", "output": "out", "verify": False, "steps": taken}
        settings = json.loads(config.to_json_string(use_diff=False))
        with suppress(InputError, AssertionError):  # numbers that headers do not have
            plan_recipe(
                parse_recipe(content, "recipe"),
                Headers(family_of(settings, kind), settings, "an example"),
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


def look(case: Case, folder: Path, chance: Random, count: int) -> bool:
    """Write the output of a case, and compare slices of its tensors; false if there is none.

    Raises:
        AssertionError: a slice is not that part of the file.
    """
    recipe = recipe_of(case, folder)
    with suppress(InputError):  # a variant that the model is already, a dtype that rounds
        growkit.run(recipe)
    if not (folder / "out").exists():
        return False
    target = plan_recipe(recipe, Checkpoint(recipe.source)).lineage.target
    written = load_file(folder / "out" / "model.safetensors")
    for name in chance.choices(sorted(written), k=count):
        whole = written[name]
        where = [slice(*sorted(chance.choices(range(n + 1), k=2))) for n in whole.shape]
        part, expected = target.read(name, *where), whole[tuple(where)]
        assert (part.dtype, part.shape) == (expected.dtype, expected.shape), f"{case}: {name}"
        bits = [each.contiguous().view(torch.uint8) for each in (part, expected)]
        assert bits[0].equal(bits[1]), f"{case}: {name} {where}"
    return True
