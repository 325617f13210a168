"""The parts of a proof: weights, logits in strict float64 and as stored, and where a fault is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.tensors import total_bytes
from growkit.checkpoint.reading import Checkpoint
from growkit.engine import devices
from growkit.engine.calls import Call
from growkit.engine.class_weights import StoredGradients
from growkit.engine.layerwise import Layerwise
from growkit.engine.metrics import TOKENS_FIRST, distance_of
from growkit.engine.strict import strict_float64
from growkit.families.description import component_of
from growkit.families.family import stored_family
from growkit.proof.comparison import PROBE, Compared, Probe, compare
from growkit.proof.copies import AsClass, Copied, Copies
from growkit.proof.findings import Native, Origin, Recovered, Strict
from growkit.proof.fingerprint import Question, computed_in, fingerprint, widest
from growkit.proof.folder import FolderDifferences
from growkit.proof.localisation import find_fault, find_fault_outside_layers, spacing
from growkit.proof.modes import Mode, NotAskedError
from growkit.proof.trainability import Gradients
from growkit.proof.weights import compare_weights
from growkit.results.advice import value_sentence
from growkit.results.proof import Fault, Fingerprint

NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "training"})
"""Attributes that number a layer, or record how it is used."""

STRICT_MARGIN = 8
"""How many times what rounding does to the source the target may differ in strict float64."""

NO_NUMBERS = "the source computes NaN or infinite logits"

ROUNDING_MARGIN = 16
"""How many times the source's own rounding error the target may differ: both round, over sums up to
some times as long, and the largest of many errors is compared."""


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
        layers = self.origin.layers
        before, after = (_layer_settings(each) for each in (self._source, self._target))
        if layers is None and len(before) == len(after):
            layers = range(len(after))
        if self.origin.promise != "exact" or layers is None or len(layers) != len(after):
            return []
        became: dict[tuple[str, Any], Any] = {}
        for (name, found), number in zip(after, layers, strict=True):
            given = before[number][1] if number is not None and number < len(before) else {}
            for key in sorted(given.keys() & found.keys()):
                if became.setdefault((key, given[key]), found[key]) != found[key]:
                    return [f"{name}.{key}"]
        return []

    def weights(self, files: FolderDifferences) -> Recovered:
        """The algebra half, where it is known how the target was made; with other differences."""
        lineage, changed = self.origin.lineage, next(iter(files.changed), None)
        values = next((v for v in files.values if v["name"] == changed), None)
        found = Recovered(unknown=self.origin.unknown)
        return replace(
            compare_weights(lineage, self.after) if lineage else found,
            changed=changed,
            instead=f" ({value_sentence(values)})" if values else "",
            by_plan=changed in files.by_plan,
            notes=files.named,
        )

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
        plans = self.origin.plans
        made = plans[-1].rules if plans else ()
        fits = all(self.after.tensors.get(rule.target) == rule.info for rule in made)
        gradients = Gradients(plans if fits else (), stored)
        probe = Probe(
            Call(asked[0].calls[0].ids[:PROBE]),
            torch.finfo(torch.float64).eps * math.sqrt(widest(self.before)),
            against_itself=self.origin.promise != "exact",
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
        return Strict(
            compared,
            probe,
            STRICT_MARGIN,
            trainable,
            gradients.symmetry,
            exact=self.origin.promise == "exact",
            notes=notes,
        )

    def _compare(
        self, models: tuple[Layerwise, Layerwise], asked: Sequence[Mode], probe: Probe | None
    ) -> Compared:
        layers = self.origin.layers
        return compare(*models, asked, self._advance, probe, self._hidden, layers, self._question)

    @cached_property
    def _hidden(self) -> Copied | None:
        """What the target's hidden states hold of the source's, if that is known."""
        if self.origin.lineage is None:
            return None
        copies = Copies(self.origin.lineage, AsClass(self.before), AsClass(self.after))
        names = [f"{model.names[0]}.weight" for model in (self._target, self._source)]
        return copies.of(names[0], names[1], dimension=1)

    def fingerprint(self, strict: Strict, native: Native) -> Fingerprint | None:
        """By which the model is known again: logits of the source, if they are to be the same."""
        exact, rounded = strict.compared.answers, native.compared.answers
        assert exact is not None
        assert rounded is not None
        same = self.origin.promise == "exact"
        of, checkpoint = ("source", self.before) if same else ("target", self.after)
        side = 0 if same else 1
        answers = exact[side], rounded[side]
        return fingerprint(of, self._question, *answers, native.dtype, widest(checkpoint))

    def fault(self, strict: Strict, weights: Recovered, asked: Sequence[Mode]) -> Fault | None:
        """Where and why the two differ; None if they do not, or were not to be the same."""
        if self.origin.promise != "exact" or (strict.kept and weights.kept):
            return None
        lost = weights.lost
        found = Fault(layer=None, component=None, tensor=lost, cause=None, factor=None)
        difference, compared, limit = strict.difference, strict.compared, strict.tolerance
        ids = asked[0].calls[compared.worst].ids
        stored = spacing(self.after)
        factor = compared.prefill.factor(limit + stored)
        if len(compared.source_modules) < len(self._target.names) - 1 and not self.origin.layers:
            found["layer"] = difference.layer
            found["cause"] = "more layers compute something than in the source"
        elif difference.layer is not None:
            found = find_fault(
                self.before,
                self.after,
                self.origin.lineage,
                ids,
                (difference.layer, compared.source_modules[difference.layer + 1]),
                limit,
                self.device,
            )
        elif difference.module:
            given = compared.ends if difference.module == compared.head else ids
            assert given is not None
            models = self._source, self._target
            with strict_float64():
                found = find_fault_outside_layers(
                    *models, self._hidden, given, limit, factor, stored
                )
        if lost:
            members = stored_family(self.after).members(self.after.config)
            named = (component_of(each) for name, each, _ in members if name == lost)
            component = next(named, found["component"])
            if component != found["component"]:  # the cause was read off another component
                found["cause"] = found["factor"] = None
            found["tensor"], found["component"] = lost, component
        elif weights.changed and not weights.lost:
            found["cause"] = f"{weights.changed} {weights.is_not}"
            # Where every tensor gives the source's back, none is at fault.
            found["tensor"] = found["tensor"] if weights.unknown else None
        if found["factor"] is None and not strict.kept:
            found["factor"] = factor
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
        return Native(compared, name, devices.called(self.device), rounding, tolerance, why)


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
