"""What the manifest of a folder says of its making: words of a stranger, which are only compared.

A recipe from a manifest is planned again, to know what the weights must be. It may not have growkit
read any file but those of the two folders, nor search for anything: what a search found stands in
the manifests that growkit writes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from growkit.checkpoint.publishing import MANIFEST
from growkit.checkpoint.reading import Checkpoint
from growkit.errors import InputError, plain, reason
from growkit.planner import plan
from growkit.planning.operation import SizeOption
from growkit.proof.findings import Origin
from growkit.recipe.files import parse_recipe
from growkit.recipe.recipe import Recipe
from growkit.recipe.steps import Step
from growkit.results.proof import RankCost

NO_FILE = os.path.join(os.devnull, "not read")
"""The path of no file: what stands for a text that a manifest names."""

MOST_COSTS = 10_000
"""Ranks, at most, whose costs are taken over from a manifest."""


@dataclass(frozen=True)
class Record:
    """What a manifest says.

    Attributes:
        recipe: how the folder was made; None if there is no manifest.
        kl_by_rank: what ranks cost that were tried for it.
    """

    recipe: Recipe | None = None
    kl_by_rank: tuple[RankCost, ...] = ()


def read_record(target: Checkpoint) -> Record:
    """What the manifest of a folder says, if there is one.

    Raises:
        InputError: it is damaged, or says nothing of how the folder was made.
    """
    if not target.opened.has(MANIFEST):
        return Record()
    file = target.folder / MANIFEST
    manifest = target.opened.json(MANIFEST)
    recipe = manifest.get("recipe")
    if not isinstance(recipe, dict):
        raise InputError(f"{file} holds no recipe; remove the file to compare logits alone")
    try:
        found = parse_recipe(recipe, str(file))
    except InputError:
        raise
    except Exception as error:  # a stranger's values may raise anything
        raise InputError(
            f"the recipe in {file} cannot be read ({reason(error)}); remove the file to compare "
            "without it"
        ) from None
    return Record(found, _costs(manifest.get("verification")))


def origin_of(before: Checkpoint, after: Checkpoint, recipe: Recipe | None) -> Origin:
    """How the target was made, as far as a recipe from a manifest says so.

    Args:
        before: the source.
        after: the target.
        recipe: from the target's manifest.
    """
    if recipe is None:
        return Origin(unknown="no manifest says how the target was made")
    unfit = "the recipe in the target's manifest does not fit this source"
    try:
        steps = tuple(_settled(step) for step in recipe.steps)
        _check_sizes(steps, after)
        way = plan(replace(recipe, steps=steps), before)
    except InputError as error:
        return Origin(unknown=f"{unfit} ({error})")
    except Exception as error:  # a stranger's values may raise anything
        return Origin(unknown=f"{unfit} ({type(error).__name__}: {plain(reason(error))})")
    return Origin(way.source, way.plans, way.promise, way.lost)


def _settled(step: Step) -> Step:
    """A step that asks for nothing to be searched or read.

    Raises:
        InputError: it does ask for that.
    """
    options = dict(step.options)
    if options.get("rank") == "auto" or ("calibration" in options and "shrinkage" not in options):
        raise InputError("it does not say what was found for it")
    if "calibration" in options:
        options["calibration"] = NO_FILE
    return type(step)(step.name, options)


def _check_sizes(steps: tuple[Step, ...], after: Checkpoint) -> None:
    """Refuse sizes that no tensor of the target has, before anything of that size is made."""
    most = max((max(info.shape, default=1) for info in after.tensors.values()), default=1)
    for step in steps:
        for option in step.operation.options:
            digits = str(step.options.get(option.name, "")).removeprefix("x")
            if not isinstance(option, SizeOption):
                continue
            if len(digits) > len(str(most)) or (digits.isdigit() and int(digits) > most):
                raise InputError(f"no tensor of the target is of size {digits[:20]}")


def _costs(verification: Any) -> tuple[RankCost, ...]:
    """What ranks cost, as far as a manifest gives whole ranks and finite costs."""
    costs = verification.get("kl_by_rank") if isinstance(verification, dict) else None
    if not isinstance(costs, list):
        return ()
    found = [each for each in costs[:MOST_COSTS] if isinstance(each, Mapping) and _is_cost(each)]
    return tuple(
        RankCost(rank=each["rank"], kl_nats_per_token=each["kl_nats_per_token"]) for each in found
    )


def _is_cost(each: Mapping[str, Any]) -> bool:
    rank, cost = each.get("rank"), each.get("kl_nats_per_token")
    if not isinstance(rank, int) or not isinstance(cost, int | float):
        return False
    return not isinstance(rank, bool) and 0 < rank < 2**31 and abs(cost) < 1e300
