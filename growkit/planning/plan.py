"""The plan: which target tensor is made from which source tensors, and why; from headers alone.

The plans of all steps form the lineage of a target.

A plan is checked before anything is computed: every source tensor is used or dropped by name, and
every target tensor is written exactly once, with the shape that its pattern predicts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any

from growkit.algebra.growth_law import Rows
from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import AT_A_TIME, Config, TensorInfo, Weights, Where
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import Family, Layer
from growkit.model.model import RECOMPUTED, Model, predicting, predicts
from growkit.planning.transforms import Transform
from growkit.results.proof_result import Spectrum

SMALL = 1 << 26
"""Limit for source tensors that are read once as a whole, not part by part, in bytes."""


@dataclass(frozen=True)
class Rule:
    """One target tensor: its name, its header, and the transform that makes it."""

    target: str
    info: TensorInfo
    transform: Transform

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the source tensors."""
        return self.transform.sources

    @property
    def replaced(self) -> tuple[str, ...]:
        """The source tensors, or the one that the target replaces if it contains nothing of it."""
        like = self.transform.like
        return self.sources or ((like,) if like else ())

    @property
    def why(self) -> str:
        """The reason, as a phrase for users."""
        return self.transform.why


@dataclass(frozen=True)
class TargetCheck:
    """A check of tensors whose last bits depend on the machine.

    Attributes:
        sources: names of the source tensors.
        targets: names of tensors that belong together; the first represents all of them.
        judge: maps sources and targets, each in order, to whether the targets keep the promise, and
            how good they are.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    judge: Callable[[Sequence[Tensor], Sequence[Tensor]], tuple[bool, Spectrum]]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a target that has fewer than its source.

    Attributes:
        kept: their ids in the source, in the order of their ids in the target.
        select: opens the source with these tokens alone, under the target's ids.
        write: makes the copied tokenizer and settings in the folder of the target those of the
            target; None if the ids stay.
    """

    kept: Sequence[int]
    select: Callable[[Checkpoint], AbstractContextManager[Checkpoint]]
    write: Callable[[Folder], None] | None = None


@dataclass(frozen=True)
class Plan:
    """All rules of one step.

    Attributes:
        config: the target's ``config.json``.
        rules: one rule per target tensor, in the order of writing.
        copies: number of copies of every grown axis.
        layers: the target's layers; None if the plan does not change layers.
        contradicting: keys of the source's published config that contradict the kinds of these
            layers, so that the target has none.
        dropped: source tensors that no rule uses, with the reason.
        duplicates: dropped tensors that must equal another source tensor, with its name.
        checks: checks of targets that are not repeatable.
        lost: the loss, in one line; empty if nothing is lost.
        waits: targets that get a gradient only after other targets have made a first step.
        divergence: why no settings of the optimizer make the target train like the source; empty if
            some do.
        defaults: keys of the config that hold defaults of the source's class, as the target's
            class has others; the operation did not plan them.
        tokens: the tokens that are left; None for all of them.
        again: makes the source again from the target, bit for bit, if it does; None if no step is
            known that would.
    """

    config: Config
    rules: tuple[Rule, ...]
    copies: Mapping[str, int] = field(default_factory=dict)
    layers: tuple[Layer, ...] | None = field(default=None, kw_only=True)
    contradicting: Collection[str] = field(default=(), kw_only=True)
    dropped: Mapping[str, str] = field(default_factory=dict)
    duplicates: Mapping[str, str] = field(default_factory=dict)
    checks: tuple[TargetCheck, ...] = ()
    lost: str = ""
    waits: Collection[str] = ()
    divergence: str = ""
    defaults: Collection[str] = field(default=(), kw_only=True)
    tokens: Tokens | None = field(default=None, kw_only=True)
    again: Callable[[Model], Lineage] | None = field(default=None, kw_only=True)

    @cached_property
    def by_target(self) -> Mapping[str, Rule]:
        """The rules by the names of their targets."""
        return {rule.target: rule for rule in self.rules}

    @cached_property
    def recomputed_sources(self) -> Mapping[str, str]:
        """Source tensors that survive only in computed targets, with the reason.

        Only logits can show that such tensors are preserved.
        """
        kept = {name for rule in self.rules if rule.transform.holds for name in rule.sources}
        computed = (rule for rule in self.rules if not rule.transform.holds)
        return {name: r.why for r in computed for name in r.sources if name not in kept}

    @property
    def left_out(self) -> list[str]:
        """Trained tensors of the source that the target lacks."""
        return [
            name
            for name, why in self.dropped.items()
            if name not in self.duplicates and why != RECOMPUTED
        ]

    @classmethod
    def checked(
        cls,
        source: Model,
        config: Config,
        transforms: Mapping[str, Transform],
        family: Family | None = None,
        unread: str = "",
        **more: Any,
    ) -> Plan:
        """Make a plan; check that it uses or drops every source tensor and makes every target.

        Args:
            source: the source.
            config: config of the target; layers that predict further tokens are counted out if it
                has none.
            transforms: the transform of every target, in the order of writing.
            family: family of the target; None for that of the source.
            unread: reason to drop tensors that the source's class reads and no transform does;
                empty if there are none.
            **more: other attributes.
        """
        family = family or source.family
        patterns, sizes = family.patterns(config), family.sizes(config)
        if not any(predicts(name, config, sizes["layers"]) for name in transforms):
            config = {**config, **dict.fromkeys(predicting(config), 0)}
        assert transforms.keys() == patterns.keys(), "the targets are not those of the pattern"
        rules = []
        for name, transform in transforms.items():
            like = source.tensors[transform.sources[0]].dtype if transform.sources else None
            dtype = transform.dtype or like or tensors.main_dtype(source.tensors)
            rules.append(Rule(name, TensorInfo(patterns[name].shape(sizes), dtype), transform))
        dropped, duplicates = source.unused
        used = {name for transform in transforms.values() for name in transform.sources}
        rest = sorted(source.tensors.keys() - used - dropped.keys())
        assert unread or not rest, "a source tensor was forgotten"
        assert used <= source.tensors.keys() - dropped.keys(), "a dropped tensor is used"
        dropped = dropped | dict.fromkeys(rest, unread)
        plan = cls(config, tuple(rules), dropped=dropped, duplicates=duplicates, **more)
        checked = {name for check in plan.checks for name in check.targets}
        assert all(
            transform.repeatable or name in checked for name, transform in transforms.items()
        ), "unchecked"
        assert checked <= transforms.keys(), "a check of a tensor that is not written"
        assert all(used.issuperset(check.sources) for check in plan.checks), "an unused source"
        return plan


class Planned(Model):
    """The model that a plan makes from another one, computed when it is read.

    It can be written, or be the source of the next plan, so that several steps take one pass over
    the files.

    Args:
        source: the other checkpoint.
        plan: the plan.
        published: see ``Weights``.

    Raises:
        InputError: (while reading) a tensor differs from one that it must equal.
    """

    def __init__(self, source: Weights, plan: Plan) -> None:
        self.config, self.plan = plan.config, plan
        self.described = source.described if isinstance(source, Model) else None
        self.tensors = {rule.target: rule.info for rule in plan.rules}
        self.source = source

    def where(self, name: str | None = None) -> str:
        """The file of the tensor's first source."""
        sources = self.plan.by_target[name].sources if name else ()
        return self.source.where(sources[0] if sources else None)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """Compute the tensor, a few rows at a time if its transform can."""
        rule = self.plan.by_target[name]
        self.check_duplicates(rule.sources)
        rows, *others = rule.info.shape or (1,)
        step = max(1, AT_A_TIME // max(1, prod(others))) if rule.transform.local else max(rows, 1)
        source = _Once(self.source)
        for start in range(0, max(rows, 1), step):
            yield _made(rule, source, [slice(start, min(start + step, rows))])

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Compute a part of a tensor."""
        if any(where):
            return _made(self.plan.by_target[name], self.source, where)
        blocks = list(self.blocks(name))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def cuts(self, name: str) -> int:
        """The cuts of its sources, if a part of it needs only parts of them."""
        rule = self.plan.by_target[name]
        cuts = (self.source.cuts(name) for name in rule.sources)
        return min(cuts, default=tensors.ANYWHERE) if rule.transform.local else 0

    def check_duplicates(self, of: Collection[str]) -> None:
        """Check that dropped duplicates equal their originals.

        Args:
            of: names of originals whose duplicates are checked.

        Raises:
            InputError: a duplicate differs.
        """
        for name, original in self.plan.duplicates.items():
            for rows in tensors.parts(self.source, name) if original in of else ():
                if not self.source.read(name, rows).equal(self.source.read(original, rows)):
                    raise InputError(
                        f"{name} in {self.source.where(name)} differs from the embedding that it "
                        "is tied to; set tie_word_embeddings to false, or remove it"
                    )


def _made(rule: Rule, source: Weights, where: Where) -> Tensor:
    """Compute a part of a rule's target; an empty part needs no source."""
    slices = tensors.full(rule.info.shape, where)
    sizes = [part.stop - part.start for part in slices]
    if 0 in sizes:
        return torch.empty(sizes, dtype=rule.info.torch_dtype)
    return rule.transform.part(source, slices)


class _Once(Weights):
    """A cache of small source tensors, which are read once for all parts made from them."""

    def __init__(self, source: Weights) -> None:
        self._source = source
        self.tensors = source.tensors
        self._read: dict[str, Tensor] = {}

    def where(self, name: str | None = None) -> str:
        return self._source.where(name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        if self._source.cuts(name) and self.tensors[name].bytes > SMALL:
            return self._source.read(name, *where)
        if name not in self._read:
            self._read[name] = self._source.read(name)
        return tensors.cut(self._read[name], where)


class LostError(Exception):
    """The source of a tensor cannot be recovered from it."""


@dataclass(frozen=True, eq=False)
class Lineage:
    """All steps from a source to a target.

    Attributes:
        source: the source of the first plan.
        plans: plans of all steps, in order.
        promise: the weakest promise of all steps.
        lost: the loss, in one line; empty if nothing is lost.
        by_rounding: whether only rounding changes the function.
        by_ties: whether only equal router logits do; see ``Change``.
        unknown: why it is not known how the target was made, so that there are no plans; empty if
            it is known.
    """

    source: Model
    plans: Sequence[Plan]
    promise: str = "exact"
    lost: str = ""
    by_rounding: bool = field(default=False, kw_only=True)
    by_ties: bool = field(default=False, kw_only=True)
    unknown: str = field(default="", kw_only=True)

    @cached_property
    def stages(self) -> tuple[Model, ...]:
        """The source, and the result of every step, computed when it is read."""
        stages: list[Model] = [self.source]
        for plan in self.plans:
            stages.append(Planned(stages[-1], plan))
        return tuple(stages)

    @property
    def target(self) -> Model:
        """The result of the last step."""
        return self.stages[-1]

    @cached_property
    def layers(self) -> tuple[Layer, ...] | None:
        """The target's layers, by those of the source; None if no step changes layers."""
        layers: tuple[Layer, ...] | None = None
        for plan in self.plans:
            if plan.layers and layers:
                layers = tuple(layer.after(layers[layer.of]) for layer in plan.layers)
            else:
                layers = plan.layers or layers
        return layers

    @property
    def tokens(self) -> list[int] | None:
        """The source's ids of the target's tokens; None if no step leaves any out."""
        kept: list[int] | None = None
        for plan in self.plans:
            if plan.tokens:
                before = range(self.source.sizes["vocab"]) if kept is None else kept
                # Tokens that a step added are behind those of the source.
                kept = [before[token] for token in plan.tokens.kept if token < len(before)]
        return kept

    def write_sidecars(self, folder: Folder) -> bool:
        """Change the files that were copied into the folder of the target, where a step does.

        Returns:
            Whether a step does.
        """
        writing = [plan.tokens.write for plan in self.plans if plan.tokens and plan.tokens.write]
        for write in writing:
            write(folder)
        return bool(writing)

    def check_values(self) -> None:
        """Compare tensors that must be equal, and compute those that a step may refuse.

        Raises:
            InputError: one differs, or is refused.
        """
        for stage in self.stages[1:]:
            assert isinstance(stage, Planned)
            stage.check_duplicates(stage.plan.duplicates.values())
            for rule in stage.plan.rules:
                if rule.transform.refuses:
                    stage.read(rule.target)

    @property
    def deciding(self) -> list[str]:
        """The targets that a step may refuse for their values."""
        rules = (rule for plan in self.plans for rule in plan.rules)
        return [rule.target for rule in rules if rule.transform.refuses]

    def replaced(self, target: str) -> list[str]:
        """The source tensors from which a tensor is made, or that it replaces."""
        names = [target]
        for plan in reversed(self.plans):
            names = [name for target in names for name in plan.by_target[target].replaced]
        return list(dict.fromkeys(names))

    def steps(self, target: str) -> list[list[Rule]]:
        """The rules that lead to a tensor, the last step first."""
        names, steps = {target: None}, []  # a dictionary keeps its order
        for plan in reversed(self.plans):
            rules = [plan.by_target[name] for name in names]
            steps.append(rules)
            names = {name: None for rule in rules for name in rule.sources}
        return steps

    def origin(self, target: str) -> str | None:
        """The source tensor that can be recovered from a tensor; None if there is none."""
        for plan in reversed(self.plans):
            rule = plan.by_target[target]
            if not rule.transform.holds:
                return None
            (target,) = rule.sources
        return target

    def repeatable(self, target: str) -> bool:
        """Whether every step that leads to a tensor gives the same bits on every machine."""
        return all(rule.transform.repeatable for rules in self.steps(target) for rule in rules)

    def recovered(self, written: Weights, target: str) -> Rows:
        """Recover the source tensor from a written tensor.

        Args:
            written: a checkpoint of the target.
            target: name of the written tensor.

        Returns:
            A function that reads rows of the source tensor, and raises ``LostError`` if they cannot
            be recovered.

        Raises:
            LostError: no source tensor can be recovered from this tensor.
        """
        rows: Rows = partial(written.read, target)
        for plan in reversed(self.plans):
            rule = plan.by_target[target]
            if not rule.transform.holds:
                raise LostError
            rows, (target,) = partial(_undo, rule.transform, rows), rule.sources
        return rows


def _undo(transform: Transform, rows: Rows, of: slice) -> Tensor:
    back = transform.undo(rows, of)
    if back is None:
        raise LostError
    return back
