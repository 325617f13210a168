"""Growth of an adapter with its model: every tensor follows the plans of the weight that it adapts.

The adapter is read and checked before anything is written. It is written after the weights, into a
folder inside the model's folder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from growkit.algebra.growth_law import Rows
from growkit.algebra.update_law import Update
from growkit.base import __version__
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.progress import current
from growkit.base.tensors import AT_ONCE, TensorInfo, Weights, total_bytes, total_parameters
from growkit.extras.adapters.adapter_folder import (
    COLUMNS,
    MAGNITUDE,
    MERGE,
    AdapterFolder,
    check_patterns,
    scaling,
)
from growkit.extras.adapters.adapter_tensors import AdapterTensors, Assembly, Entry
from growkit.extras.adapters.attached import attached_to
from growkit.extras.adapters.modules import Modules, retarget
from growkit.extras.adapters.results.adapter_growth import AdapterResult
from growkit.model.checkpoint.folder import ADAPTER, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from growkit.model.checkpoint.publishing import MANIFEST, write_json
from growkit.model.checkpoint.reading import Checkpoint, outlined
from growkit.model.checkpoint.writing import Hashes, shards_of, write_shards
from growkit.planning.plan import Lineage, Plan, Planned, Rule
from growkit.planning.transforms import Kept, Mapped, Slices, Transform
from growkit.planning.updates import Law, law_of, recorded_law, summary


class Adapter:
    """An adapter of a source, which grows with it.

    Args:
        path: the adapter's folder.
        source: the model that it adapts.
        lineage: the plans from the source to the target.
        output: name of the target in the grown adapter.

    Attributes:
        folder: the source's adapter.
        files: all files that growkit reads.
        of_class: the same adapter with the names of the source's class; an adapter of a multimodal
            model has other names.
        lineage: the plans of its tensors.
        target: the grown tensors.
        config: the contents of the grown ``adapter_config.json``.
        bytes: size of the grown tensors.

    Raises:
        InputError: the adapter is damaged, belongs to another model, or cannot follow the plans.
    """

    def __init__(self, path: Path, source: Checkpoint, lineage: Lineage, output: str) -> None:
        self.folder, self._base, own = AdapterFolder(path), lineage, Modules(source)
        self.files, where = self.folder.files, str(self.folder.opened.path / ADAPTER)
        check_patterns(self.folder.config, (name for name, _ in own.model.named_modules()), where)
        parts = AdapterTensors(self.folder, own)
        same = Assembly(parts, parts.entries, own, path)
        self.of_class = copy(self.folder)
        self.of_class.config = retarget(self.folder, same.adapted, own)
        self.of_class.tensors = same
        self._of_source = self._law_of_source(same)
        self.lineage, entries = _lineage_of(parts, lineage)
        with outlined(lineage.target, lineage.target.config) as outline:
            modules = Modules(outline)
        self.target = Assembly(self.lineage.target, entries, modules, path)
        self.bytes = total_bytes(self.target.tensors)
        config = retarget(self.folder, self.target.adapted, modules)
        self.config = {**config, "base_model_name_or_path": output, "revision": None}

    warnings = ()

    def _law_of_source(self, same: Assembly) -> Law | None:
        """The law of updates of an adapter that growkit made; None if it begins here."""
        if not self.folder.opened.has(MANIFEST):
            return None
        law = recorded_law(self.folder.opened, self.folder.file.tensors)
        known = [(name, key) for key, names in same.parts.items() for name in names]
        return Law({name: law.updates[key] for name, key in known if key in law.updates}, law.why)

    def result(self) -> AdapterResult:
        """Describe the growth."""
        own, model = law_of(self.lineage, self._of_source), law_of(self._base)
        updates = {key: own.updates[names[0]] for key, names in self.target.parts.items()}
        # If the model reads copies in unequal parts, their gradients are unequal as well.
        law = Law(updates, tuple(dict.fromkeys((*own.why, *model.why))))
        return AdapterResult(
            path=str(self.folder.opened.path),
            method=str(self.folder.config["peft_type"]),
            tensors=len(self.target.tensors),
            source_parameters=total_parameters(self.folder.file.tensors),
            parameters=total_parameters(self.target.tensors),
            bytes=self.bytes,
            updates=summary(law, self.target.tensors),
        )

    def write(self, folder: Path, law: Law, hashes: Hashes) -> AdapterResult:
        """Write the grown adapter into the folder of the written target.

        Args:
            folder: folder of the target.
            law: not used; the law of the adapter follows from its own plans.
            hashes: receives the hashes of the files.

        Raises:
            InputError: a tensor of the adapter cannot be read.
        """
        inside = folder / ADAPTER_FOLDER
        inside.mkdir()
        self.folder.opened.carry_over(inside)
        (shard,) = shards_of(self.target.tensors, self.bytes + 1)
        with current().bytes("adapter", self.bytes) as advance:
            shard = replace(shard, name=ADAPTER_WEIGHTS[0])
            write_shards(self.target, inside, [shard], advance, hashes)
        write_json(inside / ADAPTER, self.config)
        result = self.result()
        write_json(inside / MANIFEST, {"growkit": __version__, "updates": result["updates"]})
        return result


FACTORS = ("lora_A.weight", "lora_B.weight"), ("lora_embedding_A", "lora_embedding_B")
"""The factors of LoRA in linear layers and in embeddings."""


def _lineage_of(parts: AdapterTensors, lineage: Lineage) -> tuple[Lineage, dict[str, Entry]]:
    """Derive the lineage of an adapter's tensors from that of the weights.

    Returns:
        The lineage, and the tensors of the grown adapter by name.

    Raises:
        InputError: a step does not determine a transform for one of the tensors.
    """
    stage: Weights = parts
    entries, plans = parts.entries, []
    for base, plan in zip(lineage.stages, lineage.plans, strict=False):
        derived = _Step(parts, base, stage, entries).rules(plan)
        entries = {entry.name: entry for entry, _ in derived}
        plans.append(Plan(plan.config, tuple(rule for _, rule in derived), layers=plan.layers))
        stage = Planned(stage, plans[-1])
    how = lineage.promise, lineage.lost
    rounding, ties = lineage.by_rounding, lineage.by_ties
    return Lineage(parts, plans, *how, by_rounding=rounding, by_ties=ties), entries


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
        derived, used = [], set[str]()
        for rule in plan.rules:
            for origin in rule.replaced:
                for entry in attached.get(origin, ()):
                    if self._follows(entry, rule.target, plan):
                        derived.append(self._rule(entry, rule))
                        used.add(entry.name)
        for name, entry in self._entries.items():
            if name not in used:
                raise self._refusal(entry, f"is dropped ({plan.dropped.get(entry.tensor)})")
        return derived

    def _follows(self, entry: Entry, target: str, plan: Plan) -> bool:
        """Whether a tensor follows its weight to this target.

        A head that was tied to the embedding may become separate.

        Raises:
            InputError: it adapts tokens in both, of which it has one tensor.
        """
        if entry.tied:
            return target == entry.parameter or entry.parameter not in plan.by_target
        if target == entry.tensor or not self._parts.is_tied(target):
            return True
        if COLUMNS in entry.kind.sides:
            raise self._refusal(entry, "is the head as well, but only until --untie splits them")
        return False

    def _rule(self, entry: Entry, rule: Rule) -> tuple[Entry, Rule]:
        """Derive a tensor after the step, and its rule, from the rule of its weight."""
        shape = rule.info.shape
        if entry.dimensions is not None:
            pairs = zip(entry.dimensions, entry.info.shape, strict=True)
            shape = tuple(size if d is None else shape[d] for d, size in pairs)
        tied = entry.tied and rule.target != entry.parameter
        new = replace(entry, tensor=rule.target, tied=tied, info=replace(entry.info, shape=shape))
        transform = attached_to(rule.transform, entry, new.name)
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
        rules = tuple(factor for _, factor in (self._rule(low, rule), self._rule(high, rule)))
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


# Magnitudes of DoRA


@dataclass(frozen=True)
class Direction:
    """The matrix W + s·B·A, whose rows DoRA normalises.

    Attributes:
        model: holds W, [outputs, inputs].
        weight: name of W.
        transposed: whether W is stored as [inputs, outputs].
        adapter: holds A, [rank, inputs], and B, [outputs, rank].
        factors: names of A and B.
        scale: s.
    """

    model: Weights
    weight: str
    transposed: bool
    adapter: Weights
    factors: tuple[str, str]
    scale: float

    @cached_property
    def norms(self) -> Tensor:
        """The norm of every row, [outputs] in float64."""
        low, high = (self.adapter.read(name).double() for name in self.factors)
        step, norms = max(1, AT_ONCE // max(1, low.shape[1])), []
        for start in range(0, len(high), step):
            rows = slice(start, min(start + step, len(high)))
            where = (None, rows) if self.transposed else (rows, None)
            weight = self.model.read(self.weight, *where).double()
            update = self.scale * high[rows] @ low
            norms.append(((weight.T if self.transposed else weight) + update).norm(dim=1))
        return torch.cat(norms)


@dataclass(frozen=True, eq=False)
class Magnitudes(Transform):
    """The transform of a module's magnitudes in DoRA (arXiv 2402.09353).

    Each row of W + s·B·A is divided by its norm, and multiplied by its magnitude m. Splitting the
    weight changes the norms; m' = m · ‖W' + s·B'·A'‖ / ‖W + s·B·A‖ keeps the function. m' is
    rounded once, to float64, and stored so.

    Attributes:
        copied: the transform that copies them with the outputs.
        before: the matrix of the source.
        after: the matrix of the target.
        split: the transform of the weight.
        stored: dtype of the source's magnitudes.
        holds: see ``Transform``; true unless ``stored`` is float64.
        repeatable: see ``Transform``; norms may have other last bits on another machine.
    """

    copied: Kept | Mapped
    before: Direction
    after: Direction
    split: Transform
    stored: str
    holds: bool
    repeatable: bool = False
    why: str = "scaled with the norms of the split weight"
    dtype: str | None = "F64"

    local = False

    @property
    def parts(self) -> Sequence[Transform]:
        """See ``Transform``."""
        return (self.copied,)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``.

        Raises:
            InputError: a row of the target is zero, so PEFT would divide by zero.
        """
        return self.copied.part(source, where).double() * self._ratios[where[0]]

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """See ``Transform``."""

        def copies(of: slice) -> Tensor:
            return (rows(of) / self._ratios[of]).to(TensorInfo((), self.stored).torch_dtype)

        return self.copied.undo(copies, of, nearest=nearest)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``; each of n equal parts of a row has 1/√n of its norm."""
        weight = self.split.update([Update()])
        combined = self.copied.update(before).times(weight.factor / math.sqrt(weight.n_in))
        return combined.because(weight.why)

    @cached_property
    def _ratios(self) -> Tensor:
        """The factor of every magnitude, [outputs]."""
        before, after = self.before.norms, self.after.norms
        if isinstance(self.copied, Mapped):
            before = before[torch.from_numpy(self.copied.maps[0].source)]
        if not (after.all() and before.all()):
            raise InputError(
                f"DoRA divides by the norms of rows, and some of {self.copied.source} are zero in "
                f"the grown model; choose other sizes, or {MERGE}"
            )
        return after / before
