"""The plan of an adapter: every tensor goes through the plan of the weight that it adapts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.adapters.magnitudes import Direction, Magnitudes
from growkit.adapters.methods import MAGNITUDE, MERGE, scaling
from growkit.adapters.parts import Entry, Parts
from growkit.base.errors import InputError
from growkit.base.tensors import TensorInfo, Weights
from growkit.planning.plan import Lineage, Plan, Planned, Rule
from growkit.planning.transforms import Kept, Mapped, Transform

FACTORS = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
"""Those that magnitudes belong to: of linear layers, and of embeddings."""


def followed(parts: Parts, lineage: Lineage) -> tuple[Lineage, dict[str, Entry]]:
    """The lineage of an adapter's tensors from that of the weights, and what it makes.

    Raises:
        InputError: nothing follows for one of them.
    """
    stage: Weights = parts
    entries, plans = parts.entries, []
    for base, plan in zip(lineage.stages, lineage.plans, strict=False):
        made = _Step(parts, base, stage, entries).through(plan)
        entries = {entry.name: entry for entry, _ in made}
        plans.append(Plan(plan.config, tuple(rule for _, rule in made), layers=plan.layers))
        stage = Planned(stage, plans[-1])
    how = lineage.promise, lineage.lost
    return Lineage(parts, plans, *how, by_rounding=lineage.by_rounding), entries


class _Step:
    """One step of an adapter.

    Args:
        parts: of the source.
        base: the model before the step.
        stage: the adapter before the step.
        entries: its tensors, by name.
    """

    def __init__(
        self, parts: Parts, base: Weights, stage: Weights, entries: Mapping[str, Entry]
    ) -> None:
        self._parts, self._base, self._stage, self._entries = parts, base, stage, entries

    def through(self, plan: Plan) -> list[tuple[Entry, Rule]]:
        """What a plan makes of it, and how.

        Raises:
            InputError: nothing follows for a tensor.
        """
        of: dict[str, list[Entry]] = {}
        for entry in self._entries.values():
            of.setdefault(entry.tensor, []).append(entry)
        made, used = [], set[str]()
        for rule in plan.rules:
            for origin in rule.sources or (rule.transform.like,):
                for entry in of.get(origin, ()):
                    if self._goes(entry, rule.target, plan):
                        made.append(self._made(entry, rule))
                        used.add(entry.name)
        for name, entry in self._entries.items():
            if name not in used:
                raise self._refusal(entry, f"is dropped ({plan.dropped.get(entry.tensor)})")
        return made

    def _goes(self, entry: Entry, target: str, plan: Plan) -> bool:
        """Whether a tensor goes with this target of its weight.

        A head that was tied to the embedding may become a weight of its own.
        """
        if entry.tied:
            return target == entry.parameter or entry.parameter not in plan.by_target
        return target == entry.tensor or not self._parts.is_tied(target)

    def _made(self, entry: Entry, rule: Rule) -> tuple[Entry, Rule]:
        """What becomes of a tensor, and how."""
        shape = rule.info.shape
        if entry.dimensions is not None:
            pairs = zip(entry.dimensions, entry.info.shape, strict=True)
            shape = tuple(size if d is None else shape[d] for d, size in pairs)
        tied = entry.tied and rule.target != entry.parameter
        new = replace(entry, tensor=rule.target, tied=tied, info=replace(entry.info, shape=shape))
        transform = rule.transform.beside(entry.beside(new.name))
        if transform is not None and entry.tail.endswith(MAGNITUDE):
            transform = self._magnitudes(entry, rule, transform)
            new = replace(new, info=TensorInfo(shape, "F64"))
        if transform is None:
            raise self._refusal(entry, f"does not stay a product ({rule.why})")
        return new, Rule(new.name, new.info, transform)

    def _magnitudes(self, entry: Entry, rule: Rule, copied: Transform) -> Transform | None:
        """How magnitudes of DoRA are made; None if nothing follows for them."""
        stem = entry.name.removesuffix(MAGNITUDE)
        pairs = [[self._entries.get(stem + kind) for kind in kinds] for kinds in FACTORS]
        low, high = next((pair for pair in pairs if all(pair)), (None, None))
        if low is None or high is None:
            raise InputError(
                f"the adapter in {self._parts.where()} has {MAGNITUDE} of {entry.tensor}, but no "
                "factors; save it again"
            )
        if not isinstance(copied, Kept | Mapped) or not rule.sources:
            return None
        turned = entry.dimensions == (1,)
        module = entry.origin.rpartition(".")[0]
        scale = scaling(self._parts.adapter.config, module, low.info.shape[0])
        model = Planned(self._base, Plan({}, (rule,)))
        rules = tuple(made for _, made in (self._made(low, rule), self._made(high, rule)))
        adapter, names = Planned(self._stage, Plan({}, rules)), (rules[0].target, rules[1].target)
        narrow = entry.info.dtype != "F64"
        return Magnitudes(
            copied,
            Direction(self._base, entry.tensor, turned, self._stage, (low.name, high.name), scale),
            Direction(model, rule.target, turned, adapter, names, scale),
            rule.transform,
            entry.info.dtype,
            holds=narrow,
        )

    def _refusal(self, entry: Entry, why: str) -> InputError:
        return InputError(
            f"the adapter in {self._parts.where()} adapts {entry.tensor}, which {why}; {MERGE}"
        )
