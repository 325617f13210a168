"""The plans of an adapter: every tensor follows the plans of the weight that it adapts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.adapters.folder import MAGNITUDE, MERGE, scaling
from growkit.adapters.magnitudes import Direction, Magnitudes
from growkit.adapters.tensors import AdapterTensors, Entry
from growkit.base.errors import InputError
from growkit.base.tensors import TensorInfo, Weights
from growkit.planning.plan import Lineage, Plan, Planned, Rule
from growkit.planning.transforms import Kept, Mapped, Transform

FACTORS = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
"""The factors of LoRA in linear layers and in embeddings."""


def adapter_lineage(parts: AdapterTensors, lineage: Lineage) -> tuple[Lineage, dict[str, Entry]]:
    """Derive the lineage of an adapter's tensors from that of the weights.

    Returns:
        The lineage, and the tensors of the grown adapter by name.

    Raises:
        InputError: a step does not determine a transform for one of the tensors.
    """
    stage: Weights = parts
    entries, plans = parts.entries, []
    for base, plan in zip(lineage.stages, lineage.plans, strict=False):
        made = _Step(parts, base, stage, entries).rules(plan)
        entries = {entry.name: entry for entry, _ in made}
        plans.append(Plan(plan.config, tuple(rule for _, rule in made), layers=plan.layers))
        stage = Planned(stage, plans[-1])
    how = lineage.promise, lineage.lost
    return Lineage(parts, plans, *how, by_rounding=lineage.by_rounding), entries


class _Step:
    """One step of an adapter's growth.

    Args:
        parts: the tensors of the source's adapter.
        base: the model before the step.
        stage: the adapter before the step.
        entries: the tensors of the adapter before the step, by name.
    """

    def __init__(
        self, parts: AdapterTensors, base: Weights, stage: Weights, entries: Mapping[str, Entry]
    ) -> None:
        self._parts, self._base, self._stage, self._entries = parts, base, stage, entries

    def rules(self, plan: Plan) -> list[tuple[Entry, Rule]]:
        """Derive the tensors after the step, and their rules.

        Args:
            plan: the plan of the model.

        Raises:
            InputError: the plan does not determine a transform for a tensor.
        """
        attached: dict[str, list[Entry]] = {}
        for entry in self._entries.values():
            attached.setdefault(entry.tensor, []).append(entry)
        made, used = [], set[str]()
        for rule in plan.rules:
            for origin in rule.sources or (rule.transform.like,):
                for entry in attached.get(origin, ()):
                    if self._follows(entry, rule.target, plan):
                        made.append(self._rule(entry, rule))
                        used.add(entry.name)
        for name, entry in self._entries.items():
            if name not in used:
                raise self._refusal(entry, f"is dropped ({plan.dropped.get(entry.tensor)})")
        return made

    def _follows(self, entry: Entry, target: str, plan: Plan) -> bool:
        """Whether a tensor follows its weight to this target.

        A head that was tied to the embedding may become separate.
        """
        if entry.tied:
            return target == entry.parameter or entry.parameter not in plan.by_target
        return target == entry.tensor or not self._parts.is_tied(target)

    def _rule(self, entry: Entry, rule: Rule) -> tuple[Entry, Rule]:
        """Derive a tensor after the step, and its rule, from the rule of its weight."""
        shape = rule.info.shape
        if entry.dimensions is not None:
            pairs = zip(entry.dimensions, entry.info.shape, strict=True)
            shape = tuple(size if d is None else shape[d] for d, size in pairs)
        tied = entry.tied and rule.target != entry.parameter
        new = replace(entry, tensor=rule.target, tied=tied, info=replace(entry.info, shape=shape))
        transform = rule.transform.attached(entry.attached(new.name))
        if transform is not None and entry.tail.endswith(MAGNITUDE):
            transform = self._magnitudes(entry, rule, transform)
            new = replace(new, info=TensorInfo(shape, "F64"))
        if transform is None:
            raise self._refusal(entry, f"would not be a low-rank update any more ({rule.why})")
        return new, Rule(new.name, new.info, transform)

    def _magnitudes(self, entry: Entry, rule: Rule, copied: Transform) -> Transform | None:
        """Make the transform of DoRA's magnitudes; None if the step does not determine one."""
        stem = entry.name.removesuffix(MAGNITUDE)
        pairs = [[self._entries.get(stem + kind) for kind in kinds] for kinds in FACTORS]
        low, high = next((pair for pair in pairs if all(pair)), (None, None))
        if low is None or high is None:
            raise InputError(
                f"the adapter in {self._parts.where()} has {MAGNITUDE} for {entry.tensor}, but not "
                "its factors; save it again"
            )
        if not isinstance(copied, Kept | Mapped) or not rule.sources:
            return None
        transposed = entry.dimensions == (1,)
        module = entry.origin.rpartition(".")[0]
        scale = scaling(self._parts.adapter.config, module, low.info.shape[0])
        model = Planned(self._base, Plan({}, (rule,)))
        rules = tuple(made for _, made in (self._rule(low, rule), self._rule(high, rule)))
        adapter, names = Planned(self._stage, Plan({}, rules)), (rules[0].target, rules[1].target)
        narrow = entry.info.dtype != "F64"
        return Magnitudes(
            copied,
            Direction(
                self._base, entry.tensor, transposed, self._stage, (low.name, high.name), scale
            ),
            Direction(model, rule.target, transposed, adapter, names, scale),
            rule.transform,
            entry.info.dtype,
            holds=narrow,
        )

    def _refusal(self, entry: Entry, why: str) -> InputError:
        return InputError(
            f"the adapter in {self._parts.where()} adapts {entry.tensor}, which {why}; {MERGE}"
        )
