"""Planning of a recipe from the headers of its source."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from growkit.base import tensors
from growkit.base.tensors import TORCH_NAMES, Config
from growkit.engine.transformers_class import write_defaults_out
from growkit.engine.written_config import config_to_write
from growkit.model.checkpoint.reading import Widened, rounded
from growkit.model.families.family_parts import EAGER_EXPERTS
from growkit.model.model import Model
from growkit.planning.operation import PROMISES, Change, complete
from growkit.planning.own_class import as_own
from growkit.planning.plan import Lineage, Plan, Planned
from growkit.planning.recipe import Recipe, Step
from growkit.planning.transforms import AS_IT_IS
from growkit.planning.updates import other_loss
from growkit.results.growth_result import ConfigChange, GrowResult, PlannedTensor, RankTried


@dataclass(frozen=True)
class Prepared:
    """The plan of a recipe for a source.

    Attributes:
        lineage: the plans from the source, in the dtype of the output, to the output.
        steps: the steps, with the options that planning determined.
        ranks: every rank that was tried, if one was searched for.
        warnings: warnings for users of the output.
        eager_experts: whether transformers refuses to multiply with all experts at once.
    """

    lineage: Lineage
    steps: tuple[Step, ...]
    ranks: Sequence[RankTried] = ()
    warnings: Sequence[str] = ()
    eager_experts: bool = False

    @property
    def kl_by_rank(self) -> Mapping[int, float]:
        """The cost of every rank that was tried, in nats per token."""
        costs = ((trial["rank"], trial["kl_nats_per_token"]) for trial in self.ranks)
        return {rank: cost for rank, cost in costs if cost is not None}


ROW_OF_EXPERTS = 16
"""Grouped products need rows of a multiple of this many bytes."""


def plan_recipe(recipe: Recipe, source: Model) -> Prepared:
    """Plan all steps, from headers alone (and the few numbers that decide on a promise).

    Raises:
        InputError: a step cannot be taken.
    """
    wide = source if recipe.dtype is None else Widened(source, recipe.dtype)
    narrower = rounded(source, recipe.dtype)
    grown: Model = wide
    plans: list[Plan] = []
    steps: list[Step] = []
    changes: list[Change] = []
    for step in recipe.steps:
        taken = change(step, grown, recipe.seed)
        changes.append(taken)
        steps.append(type(step)(step.name, {**step.options, **taken.settled}))
        for plan in taken.plans:
            plans.append(plan)
            before, grown = grown, Planned(grown, plan)
            if before.published and step is not recipe.steps[-1]:
                grown.published = config_to_write(Lineage(before, [plan]))
    warnings = [warning for taken in changes for warning in taken.warnings]
    if narrower:
        warnings.insert(
            0,
            f"the source is rounded to {narrower} once, before all steps, and the promise holds "
            "for the rounded source",
        )
    if source.quantised:
        warnings.insert(0, f"{source.where()} is quantised with {source.quantised}")
    if ragged := _ragged_experts(grown):
        warnings.append(ragged)
    inexact = [taken for taken in changes if taken.promise != "exact"]
    lineage = Lineage(
        wide,
        plans,
        max(("exact", *(taken.promise for taken in changes)), key=PROMISES.index),
        "; ".join(taken.lost for taken in changes if taken.lost),
        by_rounding=all(taken.by_rounding or taken.by_ties for taken in inexact),
        by_ties=all(taken.by_ties for taken in inexact),
    )
    if other := other_loss(wide, grown):
        warnings.append(other)
    return Prepared(
        lineage,
        tuple(steps),
        [rank for taken in changes for rank in taken.ranks],
        warnings,
        eager_experts=bool(ragged),
    )


def _with_defaults(source: Model, plan: Plan) -> Plan:
    """Write the defaults of the source's class into the config of a plan for another class."""
    config = write_defaults_out(source, Planned(source, plan))
    return replace(plan, config=config, defaults=config.keys() - plan.config.keys())


def _ragged_experts(grown: Model) -> str:
    """Warn of experts that transformers' grouped products refuse; empty if there are none."""
    family = grown.family
    for member in family.members(grown.config) if family.experts else ():
        first, *others = member.pattern.dimensions
        info = grown.tensors[member.name]
        stacked = first.axes == {"experts"} and len(others) > 1
        rows = [size * info.element_bytes for size in info.shape[-2:]]
        row = next((row for row in reversed(rows) if row % ROW_OF_EXPERTS), 0)
        if (stacked or (member.tensor.counts == "experts" and others)) and row:
            return (
                f"rows of experts have {row} bytes (first {member.name}), but transformers "
                "multiplies with all experts at once only where that is a multiple of "
                f"{ROW_OF_EXPERTS}; load the output with {EAGER_EXPERTS}, or choose other sizes"
            )
    return ""


def change(step: Step, source: Model, seed: int, *, complete_configs: bool = True) -> Change:
    """Plan one step.

    If the source's family cannot hold the outcome, the source is first turned into a model of a
    class of growkit's own.

    Args:
        step: the step.
        source: the model.
        seed: seed of random splits.
        complete_configs: whether configs of another class get the defaults of the source's class,
            which imports transformers; without them, only the promise and the class are right.

    Raises:
        InputError: the step is not possible.
    """
    family = source.family
    options = complete(step.operation, step.options)
    _ = source.unused  # refuses tensors that do not fit the config, before an operation uses them
    before, model = list[Plan](), source
    if not step.operation.expresses(family, source.config, options):
        before.append(as_own(source))
        options = dict(step.operation.portable(family, source.config, options))
        model = Planned(source, before[0])
    taken = step.operation.plan(model, options, seed)
    plans = [*before, *taken.plans]
    if complete_configs:  # not before the operation may refuse, as it takes seconds
        plans = [_with_defaults(source, plan) for plan in plans]
    return replace(taken, plans=plans)


def planned_result(recipe: Recipe, source: Model, prepared: Prepared) -> GrowResult:
    """Make the part of the result that the plan determines."""
    lineage = prepared.lineage
    grown, plans = lineage.target, lineage.plans
    family = grown.family
    return GrowResult(
        source=recipe.source,
        output=recipe.output,
        promise=lineage.promise,
        lost=lineage.lost or None,
        source_parameters=tensors.total_parameters(
            {n: t for n, t in source.tensors.items() if n not in plans[0].dropped}
        ),
        parameters=tensors.total_parameters(grown.tensors),
        bytes=tensors.total_bytes(grown.tensors),
        dtype=TORCH_NAMES[tensors.main_dtype(grown.tensors)],
        rounded=rounded(source, recipe.dtype),
        loads_with=_loads_with(recipe, family.loads_with),
        copies=[dict(plan.copies) for plan in plans if plan.copies],
        dry_run=False,
        plan=[],
        dropped={name: why for plan in plans for name, why in plan.dropped.items()},
        config=config_changes(
            source.published or source.config,
            config_to_write(lineage),
        ),
        ranks=list(prepared.ranks),
        inferred=source.described.inferred if source.described else None,
        warnings=list(prepared.warnings),
    )


def _loads_with(recipe: Recipe, transformers: str | None) -> str | None:
    """What loads the output, if it is not the current transformers."""
    if recipe.file_format and not recipe.file_format.read_by_transformers:
        return recipe.file_format.title
    return "torch.distributed.checkpoint" if recipe.format == "dcp" else transformers


def config_changes(before: Config, after: Config) -> list[ConfigChange]:
    """List the changed keys of a config, with both values as JSON."""
    old, new = (
        {key: json.dumps(value, ensure_ascii=False) for key, value in config.items()}
        for config in (before, after)
    )
    return [
        ConfigChange(key=key, before=old.get(key), after=new.get(key))
        for key in old | new
        if old.get(key) != new.get(key)
    ]


def planned_tensors(source: Model, lineage: Lineage) -> list[PlannedTensor]:
    """List every tensor of the output, traced back through all steps to the source's files."""
    lines = []
    for rule in lineage.plans[-1].rules:
        steps = lineage.steps(rule.target)
        names = [name for origin in steps[-1] for name in origin.sources]
        done = [earlier.why for rules in reversed(steps) for earlier in reversed(rules)]
        lines.append(
            PlannedTensor(
                tensor=rule.target,
                sources=names,
                source_shapes=[list(source.tensors[name].shape) for name in names],
                shape=list(rule.info.shape),
                dtype=rule.info.dtype,
                why="; ".join([why for why in done if why != AS_IT_IS] or done[:1]),
            )
        )
    return lines
