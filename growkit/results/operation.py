"""What an operation reports: the result that Python returns and ``--json`` prints."""

from __future__ import annotations

from typing import TypedDict

from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import TORCH_NAMES, main_dtype, total_bytes, total_parameters
from growkit.families.family import family_of
from growkit.planner import Way
from growkit.planning.lineage import Lineage
from growkit.planning.plan import Plan
from growkit.recipe.recipe import Recipe
from growkit.results.proof import VerifyResult


class PlannedTensor(TypedDict):
    """One line of a dry run: a tensor of the output, and how it comes about.

    Attributes:
        tensor: its name in the output.
        sources: names of the source's tensors that it is made of.
        source_shapes: the shapes of these.
        shape: its own.
        dtype: as safetensors names it, e.g. ``BF16``.
        why: what is done, step by step.
    """

    tensor: str
    sources: list[str]
    source_shapes: list[list[int]]
    shape: list[int]
    dtype: str
    why: str


class GrowResult(TypedDict):
    """What an operation did, as ``--json`` prints it.

    Attributes:
        source: the source folder.
        output: the folder that was written (``OUT.rejected`` if a promise was broken), or would be.
        promise: ``exact``, ``bounded`` or ``different``.
        lost: what is lost, in one line; null if nothing is.
        kept: whether the proof held; null if there was none (dry run, ``--no-verify``).
        source_parameters: number of parameters of the source, ties counted once.
        parameters: the same of the output.
        bytes: size of the output's tensors.
        dtype: torch name of the dtype that holds most of them.
        loads_with: what runs the output, where that is not transformers as it is; else null.
        copies: for each step, the number of copies of every grown axis.
        write_seconds: from reading the first tensor to writing the last; null in a dry run.
        dry_run: whether nothing was written.
        plan: in a dry run, every tensor of the output; else empty.
        dropped: source tensors that are not in the output, and why.
        verification: the verdict; null if there was none.
    """

    source: str
    output: str
    promise: str
    lost: str | None
    kept: bool | None
    source_parameters: int
    parameters: int
    bytes: int
    dtype: str
    loads_with: str | None
    copies: list[dict[str, int]]
    write_seconds: float | None
    dry_run: bool
    plan: list[PlannedTensor]
    dropped: dict[str, str]
    verification: VerifyResult | None


def describe(recipe: Recipe, source: Checkpoint, way: Way) -> GrowResult:
    """The result as far as it is known before anything is done."""
    grown, plans = way.target, way.plans
    return GrowResult(
        source=recipe.source,
        output=recipe.output,
        promise=way.promise,
        lost=way.lost or None,
        kept=None,
        source_parameters=total_parameters(
            {n: t for n, t in source.tensors.items() if n not in plans[0].dropped}
        ),
        parameters=total_parameters(grown.tensors),
        bytes=total_bytes(grown.tensors),
        dtype=TORCH_NAMES[main_dtype(grown.tensors)],
        loads_with=family_of(grown.config, recipe.output).loads_with,
        copies=[dict(plan.copies) for plan in plans if plan.copies],
        write_seconds=None,
        dry_run=False,
        plan=[],
        dropped={name: why for plan in plans for name, why in plan.dropped.items()},
        verification=None,
    )


def planned_tensors(source: Checkpoint, plans: list[Plan]) -> list[PlannedTensor]:
    """Every tensor of the output, traced back through all steps to the files."""
    lineage = Lineage(source, plans)
    lines = []
    for rule in plans[-1].rules:
        steps = lineage.steps(rule.target)
        names = [name for origin in steps[-1] for name in origin.sources]
        lines.append(
            PlannedTensor(
                tensor=rule.target,
                sources=names,
                source_shapes=[list(source.tensors[name].shape) for name in names],
                shape=list(rule.info.shape),
                dtype=rule.info.dtype,
                why="; ".join(each.why for rules in reversed(steps) for each in reversed(rules)),
            )
        )
    return lines
