"""How a target was made, as far as its manifest can be believed.

The recipe of a manifest is planned again, to know what the weights must be. It may not have growkit
read any file outside the two folders, nor start a search: manifests that growkit writes contain
the results of searches.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from shlex import quote

from growkit.base.errors import InputError, plain, reason
from growkit.checkpoint.publishing import MANIFEST
from growkit.checkpoint.reading import Checkpoint, RoundedCheckpoint, Widened
from growkit.families.added import stranger, temporary_family
from growkit.growth.copying import GROUPS
from growkit.planning.operation import SizeOption
from growkit.proof.findings import Origin
from growkit.recipe.manifest import read_record
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import Recipe, Step

NO_FILE = os.path.join(os.devnull, "not read")
"""A path without a file, used in place of a text that a manifest names."""


def origin_of(before: Checkpoint, after: Checkpoint, recipe: Recipe | None) -> Origin:
    """How the target was made, according to the recipe in its manifest.

    Args:
        before: the source.
        after: the target.
        recipe: from the target's manifest.
    """
    if recipe is None:
        return Origin(unknown="no manifest records how the target was made")
    unfit = "the recipe in the target's manifest does not fit this source"
    try:
        steps = tuple(_settled(step) for step in recipe.steps)
        _check_sizes(steps, after)
        lineage = plan_recipe(replace(recipe, steps=steps), before).lineage
    except InputError as error:
        return Origin(unknown=f"{unfit} ({error})")
    except Exception as error:  # a stranger's values may raise anything
        return Origin(unknown=f"{unfit} ({type(error).__name__}: {plain(reason(error))})")
    return Origin(lineage)


def check_order(before: Checkpoint, after: Checkpoint, recipe: Recipe | None) -> None:
    """Refuse a source that was made from the target, according to its manifest.

    The target of an exact growth computes the same function whichever way round, but nothing of how
    it was made can be checked against its own result.

    Args:
        before: what was given as the source.
        after: what was given as the target.
        recipe: from the target's manifest.

    Raises:
        InputError: the source's recipe makes all of its tensors of the target's, and the target's
            recipe, if there is one, does not do so the other way round.
    """
    made = None
    with suppress(InputError):  # a source's manifest may be anything
        made = read_record(before).recipe
    if made is None or _explains(before, after, recipe) or not _explains(after, before, made):
        return
    raise InputError(
        f"the arguments appear to be exchanged: {MANIFEST} in {before.folder} records that this "
        f"model was made from another, and {after.folder} fits as that; the source comes first: "
        f"growkit verify {quote(str(after.folder))} {quote(str(before.folder))} (or remove that "
        "file to compare the two as models of unknown origin)"
    )


def _explains(before: Checkpoint, after: Checkpoint, recipe: Recipe | None) -> bool:
    """Whether a recipe makes tensors of the names and shapes of one model of those of another."""
    with temporary_family(stranger(recipe.family) if recipe else None):
        plans = origin_of(before, after, recipe).plans
    if not plans:
        return False
    made = {name: tuple(rule.info.shape) for name, rule in plans[-1].by_target.items()}
    return made == {name: tuple(info.shape) for name, info in after.tensors.items()}


def as_planned(before: Checkpoint, origin: Origin) -> Checkpoint:
    """The source that the target is held against: rounded, where its recipe asks for that."""
    planned = origin.lineage.source if origin.lineage else None
    narrower = planned.rounded if isinstance(planned, Widened) else None
    return RoundedCheckpoint(before, narrower) if narrower else before


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
    if options.get("symmetry") == "keep" and GROUPS in step.operation.options:
        options.setdefault(GROUPS.name, "part")  # as it was when manifests did not say it
    return type(step)(step.name, options)


def _check_sizes(steps: tuple[Step, ...], after: Checkpoint) -> None:
    """Refuse sizes that no tensor of the target has, before anything of that size is made.

    Layers are as many as there are tensors, at most.
    """
    widest = max((max(info.shape, default=1) for info in after.tensors.values()), default=1)
    most = max(widest, len(after.tensors))
    for step in steps:
        for option in step.operation.options:
            if not isinstance(option, SizeOption):
                continue
            size = str(step.options.get(option.name, "")).removeprefix("x")
            for digits in size.partition(".")[0].split("/"):
                if len(digits) > len(str(most)) or (digits.isdigit() and int(digits) > most):
                    raise InputError(f"no tensor of the target is of size {digits[:20]}")
