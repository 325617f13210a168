"""Logits of source and target in strict float64 and as stored, their limits, and the fault."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.limits import within
from growkit.base.tensors import total_bytes
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.class_weights import StoredGradients
from growkit.engine.layerwise import Layerwise
from growkit.engine.metrics import EPSILON, TOKENS_FIRST, Distance, distance_of
from growkit.engine.strict import device_name, strict_float64
from growkit.proof.comparison import PROBE, Compared, Copied, Probe, compare, hidden_copies
from growkit.proof.fingerprint import Question, computed_in, fingerprint, widest
from growkit.proof.folder import FolderDifferences
from growkit.proof.localisation import fault_outside_layers, spacing, tensor_fault
from growkit.proof.modes import Mode, NotAskedError
from growkit.proof.trainability import Gradients
from growkit.proof.weights import Origin, Recovered
from growkit.results.proof import CopyDistance, Fault, Fingerprint, Measured, Trainability

NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "training"})
"""Attributes that number a layer, or record how it is used."""

STRICT_MARGIN = 8
"""How many times what rounding does to the source the target may differ in strict float64."""

ROUNDING_MARGIN = 16
"""How many times the source's own rounding error the target may differ: both round, over sums up to
some times as long, and the largest of many errors is compared."""

NO_NUMBERS = "the source computes NaN or infinite logits"


@dataclass(frozen=True)
class Strict:
    """The comparison in strict float64.

    Attributes:
        compared: source and target.
        probe: rounding in float64 and its effect on the source's logits; the deliberate fault.
        exact: whether nothing more than rounding is promised.
        trainability: of the copies, if there are any, or if it was asked for.
        symmetry: how far the gradients of copies are apart.
        notes: gradients that were not looked at, in words.
    """

    compared: Compared
    probe: Probe
    exact: bool
    trainability: Trainability | None
    symmetry: list[CopyDistance]
    notes: Sequence[str] = ()

    @property
    def tolerance(self) -> float:
        """Largest allowed difference of a logit, relative to their scale."""
        return STRICT_MARGIN * max(self.probe.rounding.relative, EPSILON)

    @property
    def why(self) -> str:
        """Where the tolerance comes from."""
        return (
            f"{STRICT_MARGIN} times what one rounded sum per layer does to the source itself, "
            f"{self.probe.rounding.relative:.1e}"
        )

    @property
    def worst(self) -> tuple[str, float]:
        """The inference mode with the largest relative difference, and that; NaN is largest."""
        found = [(name, each.relative) for name, each in self.compared.distances.items()]
        return max(found, key=lambda mode: (not math.isfinite(mode[1]), mode[1]))

    def kept_within(self, limit: float | None) -> bool:
        """Whether every inference mode is within a limit.

        Args:
            limit: relative to the scale of the logits; None for any finite difference.
        """
        return all(within(each.relative, limit) for each in self.compared.distances.values())

    @property
    def caught(self) -> bool:
        """Whether the deliberate fault was noticed."""
        return not within(self.probe.control.relative, self.tolerance)

    @property
    def first_difference(self) -> tuple[int | None, str | None]:
        """Index of the first layer that differs, and name of the first module; None for none."""
        if not self.exact or self.kept_within(self.tolerance):
            return None, None
        for index, (name, error) in enumerate(self.compared.by_layer):
            if not within(error, self.tolerance):
                return index - 1 if index else None, name
        return None, self.compared.head if self.compared.by_layer else None


@dataclass(frozen=True)
class Native:
    """The comparison in the storage dtype.

    Attributes:
        compared: source and target.
        dtype: torch name of the dtype.
        device: ``cpu`` or the name of the GPU.
        rounding: the source in this dtype against itself in strict float64.
        tolerance: largest allowed difference of a logit, relative to their scale; None if the
            source computes nothing usable, so that there is nothing to keep.
        why: where the tolerance comes from.
    """

    compared: Compared
    dtype: str
    device: str
    rounding: Distance
    tolerance: float | None
    why: str

    @property
    def largest(self) -> float:
        """The largest relative difference of a logit; NaN where one is not finite.

        Of all inference modes in which the source answers with numbers.
        """
        found = (each.relative for each in self.compared.distances.values() if each.usable)
        return max(found, key=lambda each: (math.isnan(each), each), default=math.nan)

    @property
    def kept(self) -> bool | None:
        """Whether the target adds no more than rounding; None if there is nothing to keep."""
        return None if self.tolerance is None else within(self.largest, self.tolerance)

    @property
    def sentence(self) -> str:
        """The finding in words."""
        if self.tolerance is None:
            return f"in {self.dtype} the source itself computes no usable logits"
        return (
            f"in {self.dtype} the logits differ by {self.largest:.1e} of their scale, rounding "
            f"explains {self.tolerance:.1e}"
        )

    def measured(self, exact: bool) -> Measured:
        """The figures, as they are reported; without a tolerance if nothing exact is promised."""
        tolerance = self.tolerance if exact else None
        return self.compared.prefill.measured(
            self.dtype, self.device, tolerance, self.why if tolerance is not None else None
        )


class ProofParts:
    """The parts of a proof, which share what they are about."""

    def __init__(
        self,
        before: Checkpoint,
        after: Checkpoint,
        device: torch.device,
        origin: Origin,
        advance: Callable[[int], None],
        asked: Question,
        *,
        trainability: bool,
    ) -> None:
        self._trainability = trainability
        self.before, self.after, self.device, self.origin = before, after, device, origin
        self.exact = origin.lineage.promise == "exact"
        counts = [each.config.get("num_hidden_layers") for each in (before, after)]
        layers = max(count if isinstance(count, int) else 1 for count in counts)
        total = total_bytes(before.tensors) + total_bytes(after.tensors)
        self._advance = lambda: advance(total // (max(layers, 1) + 1))
        self.more_tokens = after.config["vocab_size"] > before.config["vocab_size"]
        self._question = asked
        with strict_float64():
            self._source, self._target = self._both(torch.float64, None)

    def _both(self, dtype: torch.dtype, attention: str | None) -> tuple[Layerwise, Layerwise]:
        tokens = self.before.config["vocab_size"] if self.more_tokens else None
        return (
            Layerwise(self.before, dtype, self.device, attention),
            Layerwise(self.after, dtype, self.device, attention, tokens),
        )

    def changed_layer_settings(self) -> list[str]:
        """The first setting of a layer that differs from those of layers that were like it.

        A size may change if it changes in the same way in all layers.
        """
        layers: Sequence[int | None] | None = self.origin.lineage.layers
        before, after = (_layer_settings(each) for each in (self._source, self._target))
        if layers is None and len(before) == len(after):
            layers = range(len(after))
        if not self.exact or layers is None or len(layers) != len(after):
            return []
        became: dict[tuple[str, Any], Any] = {}
        for (name, found), number in zip(after, layers, strict=True):
            given = before[number][1] if number is not None and number < len(before) else {}
            for key in sorted(given.keys() & found.keys()):
                if became.setdefault((key, given[key]), found[key]) != found[key]:
                    return [f"{name}.{key}"]
        return []

    def asked(self, ways: list[Mode]) -> tuple[list[Mode], Strict]:
        """The ways in which the source can be asked, and what ``strict`` finds in these."""
        try:
            strict = self.strict(ways)
        except NotAskedError as error:
            return self.asked(error.without(ways))
        for name, distance in [*strict.compared.distances.items()]:
            if not distance.usable:
                ways = NotAskedError(NO_NUMBERS, name).without(ways)
                del strict.compared.distances[name]
        return ways, strict

    def strict(self, asked: Sequence[Mode]) -> Strict:
        """The comparison in strict float64, with the negative control and the gradients.

        Raises:
            InputError: the source computes NaN or infinity, or a class cannot run.
        """
        stored = StoredGradients(self.after)
        plans = self.origin.lineage.plans
        made = plans[-1].rules if plans else ()
        fits = all(self.after.tensors.get(rule.target) == rule.info for rule in made)
        gradients = Gradients(plans if fits else (), stored)
        probe = Probe(
            Call(asked[0].calls[0].ids[:PROBE]),
            torch.finfo(torch.float64).eps * math.sqrt(widest(self.before)),
            against_itself=not self.exact,
            wanted=gradients.new_capacity or self._trainability,
        )
        with strict_float64():
            compared = self._compare((self._source, self._target), asked, probe)
            if not compared.prefill.usable:
                raise InputError(
                    f"the model in {self.before.folder} computes NaN or infinite logits"
                )
            if not compared.prefill.squared_source:
                raise InputError(
                    f"the model in {self.before.folder} answers everything with logits of zero; "
                    "nothing can be proved of it, correct its weights"
                )
            notes = []
            if self.more_tokens and compared.ends:
                old, new = (each.config["vocab_size"] for each in (self.before, self.after))
                share = self._target.others(compared.ends[1][:TOKENS_FIRST])
                notes.append(
                    f"of the {new} tokens, the logits of the source's {old} were compared; the new "
                    f"ones take {share:.2g} of the softmax"
                )
            idle: Sequence[str] = ()
            if probe.wanted:
                idle = self._target.gradients(probe.call.ids, probe.given, gradients.look)
        named = self._target.model.named_parameters()
        names = [name for name, _ in named if self._target.stores(name)]
        trainable = gradients.found(names, len(idle)) if probe.wanted else None
        if stored.lost:
            notes.append(
                f"gradients of {len(stored.lost)} tensors were not looked at, because what "
                f"transformers makes of them cannot be undone (first {min(stored.lost)})"
            )
        return Strict(compared, probe, self.exact, trainable, gradients.symmetry, notes)

    def _compare(
        self, models: tuple[Layerwise, Layerwise], asked: Sequence[Mode], probe: Probe | None
    ) -> Compared:
        layers = self.origin.lineage.layers
        return compare(*models, asked, self._advance, probe, self._hidden, layers, self._question)

    @cached_property
    def _hidden(self) -> Copied | None:
        """How the target's hidden states copy the source's, if that is known."""
        names = f"{self._source.names[0]}.weight", f"{self._target.names[0]}.weight"
        lineage = self.origin.lineage
        return hidden_copies(lineage, self.before, self.after, names) if lineage.plans else None

    def fingerprint(self, strict: Strict, native: Native) -> Fingerprint | None:
        """Logits that identify the model: of the source, if the target's are to be the same."""
        exact, rounded = strict.compared.answers, native.compared.answers
        assert exact is not None
        assert rounded is not None
        side, of = (0, "source") if self.exact else (1, "target")
        width = widest((self.before, self.after)[side])
        return fingerprint(of, self._question, exact[side], rounded[side], native.dtype, width)

    def fault(
        self, strict: Strict, weights: Recovered, files: FolderDifferences, asked: Sequence[Mode]
    ) -> Fault | None:
        """Where and why the two differ; None if they do not, or were not to be the same."""
        limit = strict.tolerance
        logits_kept = strict.kept_within(limit)
        if not self.exact or (logits_kept and weights.lost is None and not files.changed):
            return None
        (layer, module), compared = strict.first_difference, strict.compared
        stored = spacing(self.after)
        factor = compared.prefill.factor(limit + stored)
        found = Fault(layer=layer, component=None, tensor=None, cause=None, factor=None)
        if weights.lost:
            found = tensor_fault(self.origin.lineage, self.after, weights.lost, layer)
        elif module and layer is None:
            prompt = asked[0].calls[compared.worst].ids
            given = compared.ends if module == compared.head else prompt
            assert given is not None
            with strict_float64():
                found = fault_outside_layers(
                    self._source, self._target, self._hidden, given, limit, factor, stored
                )
        if files.changed and not weights.lost:
            found.cause = files.sentence
            # Where every tensor gives the source's back, none is at fault.
            found.tensor = found.tensor if weights.unknown else None
        if found.factor is None and not logits_kept:
            found.factor = factor
        return found

    def native(self, asked: Sequence[Mode], strict: Strict) -> Native:
        """The comparison in the target's storage dtype, against the source's own rounding."""
        name = computed_in(self.after.tensors)
        dtype: torch.dtype = getattr(torch, name)
        source, target = self._both(dtype, None)
        compared = self._compare((source, target), asked, None)
        with self._source.head() as exact_head, source.head() as head:

            def strict_head(hidden: Tensor) -> Tensor:
                with strict_float64():
                    return exact_head(hidden)

            exact, rounded = strict.compared.spread, compared.spread
            nothing = [torch.zeros(len(each), dtype=torch.long) for each in exact]  # no losses
            rounding = distance_of((strict_head, exact), (head, rounded), nothing)
        tolerance = None
        why = (
            f"{ROUNDING_MARGIN} times what rounding to {name} does to the source itself, "
            f"{rounding.relative:.1e}"
        )
        if rounding.relative < 1 and compared.prefill.usable:  # else there is nothing to be kept
            tolerance = ROUNDING_MARGIN * max(rounding.relative, torch.finfo(dtype).eps)
            if tolerance < strict.tolerance:  # float64 rounds sums of the target as well
                tolerance, why = strict.tolerance, strict.why
        return Native(compared, name, device_name(self.device), rounding, tolerance, why)


def _layer_settings(model: Layerwise) -> list[tuple[str, dict[str, Any]]]:
    """Name of every layer, and every plain attribute of its modules by its path."""
    modules = dict(model.model.named_modules())
    found = []
    for layer in (name for name in model.names[1:-1] if name in modules):
        settings = {
            f"{path}.{key}".lstrip("."): value
            for path, module in modules[layer].named_modules()
            for key, value in vars(module).items()
            if key not in NUMBERS and isinstance(value, bool | int | float | str | None)
        }
        found.append((layer, settings))
    return found
