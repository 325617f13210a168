"""The function half of the proof: logits of source and target, measured and compared with limits.

Both models run side by side, one layer at a time, once in strict float64 and once in the storage
dtype.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from growkit.base.errors import InputError, reason
from growkit.base.limits import SPACING, Limit, native_limit, rounded_sum, strict_limit, within
from growkit.base.tensors import Weights, total_bytes
from growkit.checkpoint.reading import Checkpoint
from growkit.engine import metrics
from growkit.engine.calls import Call, CallError, batches
from growkit.engine.class_weights import StoredGradients
from growkit.engine.device import CPU, RUNS, Product, device_name, doubt, driver_versions, has
from growkit.engine.kernels import offered
from growkit.engine.layerwise import Layerwise, Stage
from growkit.engine.lending import copies_on
from growkit.engine.metrics import Distance, Head, error_of, finite
from growkit.engine.strict import strict_float64
from growkit.proof.control import PROBE, Coverage, Probe
from growkit.proof.fingerprint import computed_in, fingerprint, question, widest
from growkit.proof.localisation import copied_states, copies_of, hidden_copies, tensor_fault
from growkit.proof.modes import (
    ATTENTION,
    LONG,
    PREFILL,
    SHORT,
    Mode,
    NotAskedError,
    finding_of,
    kernel_modes,
)
from growkit.proof.preflight import vocabulary_error
from growkit.proof.trainability import Gradients
from growkit.proof.weights import Origin
from growkit.results.proof import Fault, Finding, Fingerprint, ModeResult, counted, too_much

NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "training"})
"""Attributes for the number of a layer, or for its use."""

FEW = 100
"""With fewer predictions, the verdict reports their number."""

NO_NUMBERS = "the source computes NaN or infinite logits"

SPREAD = 128
"""Limit for the tokens of a prompt on which rounding in the storage dtype is measured."""

INFLATED = 16
"""Largest ratio of a device's limit, on long prompts, to the CPU's limit on a short one."""

SAMPLE = 500
"""Number of pairs of logits that are kept for the chart."""


Models = tuple[Layerwise, Layerwise]
"""Source and target."""

Pair = tuple[Stage | None, Stage | None, bool]
"""A stage of the source and one of the target, and whether their outputs should correspond."""

Setting = tuple[str, str]
"""Path of an attribute in a layer, and the classes of its module and of those around it."""

Ends = tuple[list[Tensor], list[Tensor]]
"""Outputs of the last layers of source and target for every call, each [tokens, hidden]."""


@dataclass
class Comparison:
    """Results of running source and target on all modes.

    Attributes:
        dtype: torch name of the dtype.
        distances: distance of the logits, by mode.
        by_layer: name of the embedding and of every layer, with the largest error of its output
            relative to its scale; up to the last layer that can be compared.
        end: output of the target's last layer for the first prompt, [tokens, hidden].
        spread: outputs of the source's last layer for some tokens of every prompt.
        kernels: by the mode of every attention kernel, the spread of its first call, and whether
            the last layers of both models gave the same bits in all calls.
        sample: pairs of logits, source and target.
        answers: answers of source and target to the question of the fingerprint.
    """

    dtype: str
    distances: dict[str, Distance] = field(default_factory=dict)
    by_layer: list[tuple[str, float]] = field(default_factory=list)
    end: Tensor | None = None
    spread: list[Tensor] = field(default_factory=list)
    kernels: dict[str, tuple[Tensor, bool]] = field(default_factory=dict)
    sample: list[list[float]] = field(default_factory=list)
    answers: tuple[Tensor, ...] = ()

    @property
    def prefill(self) -> Distance:
        """Distance of the logits of all prompts."""
        return self.distances[PREFILL]

    @property
    def largest(self) -> tuple[str, float]:
        """The mode with the largest relative difference, and the difference; NaN is the largest.

        Modes in which the source computes no finite logits are left out.
        """
        found = [(name, each.relative) for name, each in self.distances.items() if each.usable]
        first = (PREFILL, math.nan)
        return max(found, key=lambda mode: (not math.isfinite(mode[1]), mode[1]), default=first)


class FunctionProof:
    """The function half of a proof.

    Args:
        before: the source.
        after: the target.
        device: device of both models as they run.
        origin: how the target was made.
        advance: called with the bytes of every layer of both models.
        longest: length of the fingerprint's sequence if the config has no longest context.
        trainability: whether to compute gradients even if nothing is copied.

    Attributes:
        exact: whether the promise is exact.
        place: device of strict float64: the same, unless there is doubt about it.
        doubt: why the CPU computed in strict float64 instead, in a phrase; empty if not.
        kernels: results of the attention kernels of a device.
        modes: the modes in which the source can run; all other modes have a note.
        strict: the comparison in strict float64.
        native: the comparison in the storage dtype.
        probe: the controls: rounding in the source, and the deliberate fault.
        rounding: distance of the source in the storage dtype from itself in strict float64.
        trainability: the findings on gradients; None if they were not computed.
        symmetry: distances between the gradients of copies.
        notes: notes on what was not compared.
    """

    def __init__(
        self,
        before: Checkpoint,
        after: Checkpoint,
        device: torch.device,
        origin: Origin,
        advance: Callable[[int], None],
        longest: int,
        *,
        trainability: bool,
    ) -> None:
        self._look = trainability
        self.before, self.after, self.device, self.lineage = before, after, device, origin.lineage
        self.exact = self.lineage.promise == "exact"
        self.more_tokens = after.config["vocab_size"] > before.config["vocab_size"]
        self._question = question(before, longest)
        self.notes: list[str] = []
        self.doubt = ""
        self.kernels: list[ModeResult] = []
        self._blamed = ""
        self._copies = copies_on(device, (before, after))
        self._move(device if has(device, torch.float64) else CPU)
        source, target = (model.layers for model in self._models)
        # The bar advances with every pair of layers, and with the embeddings.
        total = total_bytes(before.tensors) + total_bytes(after.tensors)
        self._advance = partial(advance, total // (max(len(source), len(target)) + 1))
        self._layers: Sequence[int | None] | None = self.lineage.layers
        if self._layers is None and (self.lineage.plans or len(source) == len(target)):
            self._layers = range(len(source))

    def _both(
        self,
        dtype: torch.dtype,
        device: torch.device,
        weights: Sequence[Weights] = (),
        depths: Sequence[int] = (),
    ) -> Models:
        """Both models, or two with the same vocabularies in their place; see ``LayeredModel``."""
        before, after = weights or (self.before, self.after)
        tokens = self.before.config["vocab_size"] if self.more_tokens else None
        source_depth, target_depth = depths or (None, None)
        kept = self._copies if device == self.device and not weights else (None, None)
        return (
            Layerwise(before, dtype, device, None, kept[0], source_depth),
            Layerwise(after, dtype, device, tokens, kept[1], target_depth),
        )

    def _move(self, place: torch.device) -> None:
        """Compute on this device in strict float64."""
        self.place = place
        with strict_float64():
            self._models = self._both(torch.float64, place)

    def changed_layer_settings(self) -> list[str]:
        """Find the first setting of a layer that changed differently than in other layers.

        A setting, such as a size, may change if it changes in the same way wherever modules of the
        same classes contain it; layers of another kind have other sizes.
        """
        if not self.exact or self._layers is None:
            return []
        before, after = map(_layer_settings, self._models)
        became: dict[tuple[Setting, Any], Any] = {}
        for (name, found), number in zip(after, self._layers, strict=False):
            given = before[number][1] if number is not None and number < len(before) else {}
            for setting in sorted(given.keys() & found.keys()):
                if became.setdefault((setting, given[setting]), found[setting]) != found[setting]:
                    return [f"{name}.{setting[0]}"]
        return []

    def run(self, ways: list[Mode]) -> None:
        """Compare both models in strict float64 and in the storage dtype.

        Args:
            ways: modes to run; those that the source does not support are left out.

        Raises:
            InputError: the source computes NaN or infinity, or a class cannot run.
        """
        if self.device.type != "cpu":
            products = self._products(ways)
            self.doubt = doubt(self.device, torch.float64, products) or self._run_on_device(ways)
        if self.doubt:
            self._move(CPU)
        if self.place == CPU:
            self._run_modes(ways)
        try:
            self._run_native()
        except InputError as error:
            where = "" if self.device == CPU else f" (on {device_name(self.device)})"
            raise InputError(f"{error}{where}") from error
        rounding = self.native_limit
        explained = within(self.strict.largest[1], rounding and rounding.largest)
        if self.more_tokens and not self.lineage.plans and not explained:
            raise vocabulary_error(self.before, self.after, self._sentence(kept=False))

    def _run_modes(self, ways: list[Mode]) -> None:
        """Compare in strict float64 in all modes that the source supports."""
        try:
            self._run_strict(ways)
        except NotAskedError as error:
            self._run_modes(error.without(ways))
            return
        for name, distance in [*self.strict.distances.items()]:
            if not distance.usable:
                ways = NotAskedError(NO_NUMBERS, name).without(ways)
                del self.strict.distances[name]
        self.modes = ways

    def _products(self, ways: Sequence[Mode]) -> set[Product]:
        """Shapes of products with the matrices of both models, with many rows and with few."""
        calls = [call for mode in ways for call in mode.calls]
        rows = [len(call.ids) for call in calls]
        rows += [len(batch) * len(batch[0].ids) for _, batch in batches(calls)]
        infos = [*self.before.tensors.values(), *self.after.tensors.values()]
        shapes = {info.shape[-2:] for info in infos if len(info.shape) > 1}
        return {(n, terms, out) for n in (min(rows), max(rows)) for out, terms in shapes}

    def _run_on_device(self, ways: list[Mode]) -> str:
        """Compare on the device, and on a short prompt on the CPU; return why it is in doubt.

        A device may be wrong in what no test of its arithmetic shows. It is trusted only if the CPU
        gets the same logits, measures about as much rounding, and comes to the same verdict.
        """
        try:
            self._run_modes(ways)
        except (InputError, RuntimeError) as error:  # RuntimeError: an operation is missing
            return reason(error)
        found, limit = self.strict, self.strict_limit.largest
        if self.exact and not within(found.largest[1], limit):
            return f"the logits differ by {found.largest[1]:.1e}, which the CPU had to confirm"
        if not self.caught:
            return "the negative control went unnoticed"
        ids, depths = ways[0].calls[0].ids[:SHORT], self._depths_of_all_kinds()
        try:
            if depths:
                found, on_device = self.compare_again(ids, self.device, depths=depths)
                limit = strict_limit(on_device.rounding.relative).largest
        except InputError:  # a class that needs all of its layers
            depths = ()
        there, probe = self.compare_again(ids, CPU, depths=depths)
        own = strict_limit(probe.rounding.relative).largest
        if self.exact and not within(there.largest[1], own):
            return f"the logits do not differ by {there.largest[1]:.1e}, as on the CPU"
        if not within(limit, own * INFLATED):
            return f"rounding is {limit / own:.0e} times that of the CPU"
        apart = float(torch.tensor([*map(error_of, found.answers, there.answers)]).max())
        return "" if within(apart, own) else f"the logits are {apart:.1e} from those of the CPU"

    def _depths_of_all_kinds(self) -> Sequence[int]:
        """How many layers of both models hold two of every kind; empty if that is all.

        A device computes layers of a kind with the same kernels, so that a CPU need not repeat
        all of them.
        """
        if self._layers is None:
            return ()
        kinds = [tuple(settings.items()) for _, settings in _layer_settings(self._models[0])]
        last = {kind: [i for i, other in enumerate(kinds) if other == kind][:2] for kind in kinds}
        depth = max(place for places in last.values() for place in places) + 1
        numbers = [-1 if number is None else number for number in self._layers]
        target = next((i for i, number in enumerate(numbers) if number >= depth), len(numbers))
        return (depth, target) if depth < len(kinds) and target < len(numbers) else ()

    def compare_again(
        self,
        ids: Tensor,
        device: torch.device,
        weights: Sequence[Weights] = (),
        only: str = "",
        depths: Sequence[int] = (),
    ) -> tuple[Comparison, Probe]:
        """Compare in strict float64 on one prompt, with the noise and the negative control.

        Args:
            ids: the prompt, [tokens].
            device: device of both models.
            weights: of other models than source and target, with the same vocabularies.
            only: see ``Probe``.
            depths: number of layers of both models; empty for all.
        """
        call = Call(ids)
        probe = self._probe(call, wanted=False, only=only)
        with strict_float64():
            models = self._both(torch.float64, device, weights, depths)
            return self._compare(models, [Mode(PREFILL, (call,))], "float64", probe), probe

    def _probe(self, call: Call, *, wanted: bool, only: str = "") -> Probe:
        noise = rounded_sum(widest(self.before))
        return Probe(call, noise, against_itself=not self.exact, wanted=wanted, only=only)

    def _run_strict(self, ways: Sequence[Mode]) -> None:
        """Compare in strict float64, with the negative control and the gradients."""
        stored = StoredGradients(self.after)
        plans = self.lineage.plans
        made = plans[-1].rules if plans else ()
        fits = all(self.after.tensors.get(rule.target) == rule.info for rule in made)
        gradients = Gradients(plans if fits else (), stored)
        call, wanted = Call(ways[0].calls[0].ids[:PROBE]), gradients.new_capacity or self._look
        self.probe = probe = self._probe(call, wanted=wanted)
        target, notes = self._models[1], []
        idle: Sequence[str] = ()
        with strict_float64():
            coverage = Coverage()
            self.strict = strict = self._compare(self._models, ways, "float64", probe, coverage)
            own, new = (model.altering for model in self._models)
            self._altering = new if len(new) > len(own) else []
            for model in self._models:
                model.check_reach()
            where = f"the model in {self.before.folder}"
            if not strict.prefill.usable:
                raise InputError(f"{where} computes NaN or infinite logits")
            if not strict.prefill.squared_source:
                raise InputError(
                    f"{where} computes only logits of zero, so nothing can be proved; "
                    f"{'; '.join(self.before.notes) or 'correct its weights'}"
                )
            if self.more_tokens and strict.end is not None:
                old, new = (each.config["vocab_size"] for each in (self.before, self.after))
                share = target.others(strict.end[: metrics.TOKENS_FIRST])
                notes.append(
                    f"of the {new} tokens, the logits of the source's {old} were compared; the new "
                    f"ones take {share:.2g} of the softmax"
                )
            if probe.wanted:
                found = probe.given, probe.extras
                idle = target.gradients(probe.call.ids, *found, gradients.look)
        names = [name for name, _ in target.model.named_parameters() if target.stores(name)]
        self.trainability = gradients.found(names, len(idle)) if probe.wanted else None
        self.symmetry = gradients.symmetry
        if stored.lost:
            notes.append(
                f"gradients of {len(stored.lost)} tensors were not checked, because transformers "
                f"converts them in a way that cannot be inverted (first {min(stored.lost)})"
            )
        if unseen := coverage.without_effect:
            kinds = counted(len(unseen), "kind")
            notes.append(
                f"no logit of these prompts depends on {kinds} of tensors (first "
                f"{target.stored(unseen[0])})"
            )
        self.notes = notes

    def _run_native(self) -> None:
        """Compare in the storage dtype, on a device also with each of its attention kernels."""
        dtype, products = computed_in(self.after.tensors), self._products(self.modes)
        self._as_it_runs = doubt(self.device, getattr(torch, dtype), products)
        self.native, self.rounding = self._natively(dtype, self.device)
        limit, error = self.native_limit, self.native.largest[1]
        if self.device.type == "cpu" or not (self.exact and limit) or within(error, limit.largest):
            return
        found, rounding = self._natively(dtype, CPU)
        own = native_limit(rounding.relative, dtype, self.strict_limit)
        if own and within(found.largest[1], own.largest):
            cause = f"the arithmetic of {device_name(self.device)} is the cause"
            self._blamed = f"; on the CPU they differ by {found.largest[1]:.1e}, so {cause}"

    def _natively(self, dtype: str, device: torch.device) -> tuple[Comparison, Distance]:
        """Compare in the storage dtype, and measure the source's own rounding in it."""
        models = self._both(getattr(torch, dtype), device)
        ways = usual = [mode for mode in self.modes if not mode.strict]
        if device.type != "cpu":
            kernels = offered(models[0].model, device, getattr(torch, dtype))
            ways = [*ways, *kernel_modes(ways[0].calls[0].ids, kernels)]
        while True:
            try:
                found = self._compare(models, ways, dtype, None)
                break
            except NotAskedError as error:
                if not error.mode.startswith(ATTENTION):
                    raise
                ways = error.without(ways)
        with self._models[0].head() as exact_head, models[0].head() as head:
            strict_head: Head = strict_float64()(exact_head)

            def own(exact: list[Tensor], rounded: list[Tensor]) -> Distance:
                nothing = [torch.zeros(len(each), dtype=torch.long) for each in exact]  # no losses
                here = self._here(head), rounded
                return metrics.distance_of((strict_head, exact), here, nothing)

            for way in ways[len(usual) :]:
                result = ModeResult(name=way.name, tried=bool(way.calls), note=way.note)
                self.kernels.append(result)
                if not way.calls:
                    continue
                (state, same), distance = found.kernels[way.name], found.distances.pop(way.name)
                names = {name for model in models for name in model.ran[way.kernel]}
                rounding = own(self.strict.spread[:1], [state])
                limit = native_limit(rounding.relative, dtype, self.strict_limit)
                result.native, of = finite(distance.relative), device_name(device)
                result.note = f"{' and '.join(sorted(names)) or 'no fused kernel'} ran on {of}, "
                result.note += f"the logits differ by {distance.relative:.1e}, "
                result.note += f"{RUNS} runs gave {'the same' if same else 'different'} bits"
                if limit and distance.usable and self.exact:
                    result.native_tolerance = limit.largest
                    result.kept = within(distance.relative, limit.largest)
            return found, own(self.strict.spread, found.spread)

    def _here(self, head: Head) -> Head:
        """Compute logits for comparisons in float64, which the device may not have."""
        return lambda hidden: head(hidden).to(self.place)

    def _compare(
        self,
        models: Models,
        ways: Sequence[Mode],
        dtype: str,
        probe: Probe | None,
        coverage: Coverage | None = None,
    ) -> Comparison:
        """Run both models in all modes, the prefill first.

        Raises:
            NotAskedError: a model does not support a mode other than the prefill.
            InputError: a class cannot run with its config.
        """
        mode_of = [mode for mode in ways for _ in mode.calls]
        calls = [call for mode in ways for call in mode.calls]
        ids = [call.ids[mode.padding :] for call, mode in zip(calls, mode_of, strict=True)]
        probed = 0
        if probe and len(probe.call.ids) < len(calls[0].ids):
            probed = len(calls)
            calls.append(probe.call)
        calls.append(self._question.call)
        before, after = (model.stages(calls) for model in models)
        if probe:
            before = probe.disturb(before)
            after = probe.spoil(after, 0 if probe.only else len(models[1].layers) // 2, probed)
        if coverage:
            names = [mode.name for mode in mode_of]
            alone = [at for at, call in enumerate(calls) if not call.cached]
            unpadded = [at for at in alone if at >= len(mode_of) or not mode_of[at].padding]
            shortest = min(unpadded, key=lambda at: len(calls[at].ids))
            watched = names.index(LONG) if LONG in names else shortest
            after = coverage.disturb(after, watched, self._layers)
        before = stages_of(before, mode_of, by_target=False)
        after = stages_of(after, mode_of, by_target=True)
        found = Comparison(dtype)
        ends = self._walk(_pairs(before, after, self._layers), mode_of, found)
        found.spread = [state[_spread(state)] for state in ends[0][: len(ways[0].calls)]]
        for mode in ways:
            if mode.kernel:
                runs = [index for index, of in enumerate(mode_of) if of is mode]
                first = ends[0][runs[0]]
                same = all(each[runs[0]].equal(each[run]) for each in ends for run in runs)
                found.kernels[mode.name] = first[_spread(first)], same
        with models[0].head() as source_head, models[1].head() as target_head:
            heads = self._here(source_head), self._here(target_head)
            _compare_logits(ids, mode_of, heads, ends, found)
            found.end = ends[1][0]
            if probe:
                probe.measure(heads, (ends[0][probed], ends[1][probed]), (calls[0], ends[0][0]))
            pairs = zip(heads, ends, strict=True)
            found.answers = tuple(self._question.of(head(states[-1])) for head, states in pairs)
        return found

    def _walk(self, stages: Iterator[Pair], mode_of: Sequence[Mode], found: Comparison) -> Ends:
        """Compare the outputs of all layers, and return those of the last ones."""
        ends: Ends = ([], [])
        held: Tensor | None = None
        for one, other, comparable in stages:
            if one is not None and other is not None and comparable:
                if other.layer is None:
                    held = copied_states(one.after[0], other.after[0], self._hidden)
                if held is not None:
                    triples = zip(one.after, other.after, mode_of, strict=False)
                    errors = [
                        error_of(state[mode.padding :], copies_of(expected[mode.padding :], held))
                        for expected, state, mode in triples
                    ]
                    # torch's maximum keeps a NaN.
                    found.by_layer.append((other.name, float(torch.tensor(errors).max())))
            ends = (one.after if one else ends[0], other.after if other else ends[1])
            if other:
                other.loaded.close()  # the source's next layer needs the room
            self._advance()
        return ends

    @cached_property
    def _hidden(self) -> Tensor | None:
        """The source coordinate of each of the target's hidden coordinates; None if unknown."""
        names = [f"{model.embedding[0]}.weight" for model in self._models]
        return hidden_copies(self.lineage, self.before, self.after, names)

    @property
    def strict_limit(self) -> Limit:
        """Limit in strict float64 for an exact promise."""
        return strict_limit(self.probe.rounding.relative)

    @property
    def native_limit(self) -> Limit | None:
        """Limit in the storage dtype; None if the source computes no usable logits in it."""
        if not self.native.prefill.usable:
            return None
        return native_limit(self.rounding.relative, self.native.dtype, self.strict_limit)

    @property
    def limit(self) -> Limit | None:
        """Limit in strict float64 for this promise; None for any finite difference."""
        if self.exact or self.lineage.by_ties:
            return self.strict_limit
        # After rounding to a narrower dtype, the target may be another function.
        return self.native_limit if self.lineage.by_rounding else None

    @property
    def caught(self) -> bool:
        """Whether the deliberate fault was noticed."""
        return not within(self.probe.control.relative, self.strict_limit.largest)

    @property
    def first_difference(self) -> tuple[int | None, str | None]:
        """Index of the first layer that differs, and name of the first module; None if none."""
        limit, by_layer = self.strict_limit.largest, self.strict.by_layer
        if not self.exact or within(self.strict.largest[1], limit):
            return None, None
        for index, (name, error) in enumerate(by_layer):
            if not within(error, limit):
                return index - 1 if index else None, name
        known = by_layer and self._layers is not None
        return None, self._models[1].output[0] if known else None

    def findings(self, modes: Sequence[ModeResult], max_kl: float | None) -> list[Finding]:
        """The findings on logits, in the order in which they decide.

        Args:
            modes: results of the inference modes.
            max_kl: largest accepted KL, in nats per token; None for no limit.
        """
        limit, native_limit = self.limit, self.native_limit
        error, native_error = self.strict.largest[1], self.native.largest[1]
        kept = within(error, limit and limit.largest)
        fault = f"the negative control ({self.probe.fault})"
        dtype, native_kept = f"in {self.native.dtype}", None
        stored = f"{dtype} the source itself computes no usable logits"
        if native_limit:
            native_kept = within(native_error, native_limit.largest) if self.exact else None
            explained = f"rounding explains {native_limit.largest:.1e}"
            stored = f"{dtype} the logits differ by {native_error:.1e} of their scale, {explained}"
            stored += self._blamed
        found = [
            Finding(
                name="strict_float64",
                kept=kept,
                sentence=self._sentence(kept=kept),
                place=self.first_difference[1],
                measured=finite(error),
                limit=limit and limit.largest,
            ),
            Finding(
                name="negative_control",
                kept=self.caught,
                sentence=f"{fault} was {'noticed' if self.caught else 'not noticed'}",
                measured=finite(self.probe.control.relative),
            ),
            Finding(
                name="native",
                kept=native_kept,
                sentence=stored,
                measured=finite(native_error),
                limit=native_limit.largest if native_limit and self.exact else None,
            ),
        ]
        if max_kl is not None:
            kl = self.strict.prefill.kl_per_token
            low = within(kl, max_kl)
            amount = f"{kl:.3g} of at most {max_kl:g} nats per token of KL"
            text = amount if low else too_much(kl, max_kl)
            found += [
                Finding(name="max_kl", kept=low, sentence=text, measured=finite(kl), limit=max_kl)
            ]
        found += [finding_of(each) for each in modes]
        for layer in self._altering[:1] if self.exact else ():
            text = f"{layer} returns its input, but hands on other values than it receives"
            found += [Finding(name="handed_on", kept=False, sentence=text, place=layer)]
        if (count := self.strict.prefill.predictions) < FEW:
            text = f"on only {counted(count, 'prediction')}"
            found += [Finding(name="amount", kept=None, sentence=text, measured=count, limit=FEW)]
        return found

    def _sentence(self, *, kept: bool) -> str:
        """Describe the distance of the logits, or for another function its loss."""
        distance, (_, error) = self.strict.prefill, self.strict.largest
        differ = f"{error:.1e} of the logit scale in strict float64"
        if self.exact and kept:
            if all(each.largest == 0 for each in self.strict.distances.values()):
                return "the logits are identical in strict float64"
            return f"the logits differ by at most {differ}"
        if self.exact:
            module = self.first_difference[1]
            where = f"; the first difference is in {module}" if module else ""
            return f"the logits differ by {differ}{where}"
        if not math.isfinite(distance.relative):
            return "the new model computes NaN or infinite logits"
        if not kept:
            assert self.limit
            stored = "" if self.lineage.by_ties else f" to {self.native.dtype}"
            rounding = f"rounding{stored}"
            return f"the logits differ by {differ}; {rounding} explains {self.limit.largest:.1e}"
        count = distance.predictions
        return (
            f"the loss goes from {distance.loss_source / count:.4f} to "
            f"{distance.loss_target / count:.4f} nats per token over "
            f"{counted(count, 'prediction')}, {distance.agreeing / distance.tokens:.1%} of the "
            f"likeliest next tokens are the same, {distance.kl_per_token:.3g} nats per token of KL"
        )

    def mode_results(self) -> list[ModeResult]:
        """The results of all modes, including those that were not tried."""
        results = []
        for mode in self.modes:
            tried = bool(mode.calls) or mode.failed
            result = ModeResult(name=mode.name, tried=tried, note=mode.note)
            results.append(result)
            if not mode.calls:
                result.kept = False if mode.failed and self.exact else None
                continue
            strict, native = (each.distances.get(mode.name) for each in (self.strict, self.native))
            assert strict is not None
            result.relative = finite(strict.relative)
            result.native = finite(native.relative) if native else None
            limit = self.native_limit if native and native.usable else None
            if native and not native.usable:
                silent = f"in {self.native.dtype} {NO_NUMBERS}"
                result.note = f"{mode.note}; {silent}" if mode.note else silent
            if self.exact:
                result.tolerance = self.strict_limit.largest
                result.native_tolerance = limit and limit.largest
                result.kept = within(strict.relative, result.tolerance) and (
                    native is None or limit is None or within(native.relative, limit.largest)
                )
        return [*results, *self.kernels]

    def device_finding(self, varying: Sequence[str]) -> Finding | None:
        """The finding on the device; None for a CPU.

        Args:
            varying: operations that ran and have no deterministic form.
        """
        if self.device.type == "cpu":
            return None
        versions = (f"{name} {version}" for name, version in driver_versions(self.device).items())
        name = ", ".join([device_name(self.device), *versions])
        text = f"strict float64 ran on {name}"
        if self.doubt:
            text = f"strict float64 ran on the CPU, since on {name} {self.doubt}"
        if self._as_it_runs:
            text += f"; in {self.native.dtype}, {self._as_it_runs}"
        if varying:
            text += f"; no deterministic form has {', '.join(varying)}"
        sure = not (self.doubt or self._as_it_runs or varying)
        return Finding(name="device", kept=sure or None, sentence=text)

    def fingerprint(self) -> Fingerprint | None:
        """Logits that identify the model: the source's for an exact promise, else the target's."""
        side, of = (0, "source") if self.exact else (1, "target")
        exact, rounded = (each.answers[side] for each in (self.strict, self.native))
        width = widest((self.before, self.after)[side])
        return fingerprint(of, self._question, exact, rounded, self.native.dtype, width)

    def fault(self, weights: Finding, files: Finding, logits: Finding) -> Fault | None:
        """Where and why the two models differ; None if they do not, or if the promise allows it."""
        lost = weights.place
        failed = [each for each in (weights, files, logits) if each.kept is False]
        if not self.exact or not failed:
            return None
        layer, module = self.first_difference
        embedding = "embedding" if module == self._models[1].embedding[0] else None
        found = Fault(layer=layer, component=embedding)
        if lost:
            found = tensor_fault(self.lineage, self.after, lost, layer)
        elif files.kept is False:
            found.cause = files.sentence
        if found.factor is None and not logits.kept:
            close = self.strict_limit.largest + SPACING[self.native.dtype]
            found.factor = self.strict.prefill.factor(close)
        return found


def _pairs(
    before: Iterator[Stage], after: Iterator[Stage], layers: Sequence[int | None] | None
) -> Iterator[Pair]:
    """Pair the stages of both models.

    Args:
        before: stages of the source.
        after: stages of the target.
        layers: for each layer of the target, the source layer that it computes, or None if it
            returns its input; None if this is not known.
    """
    one: Stage | None = next(before)
    yield one, next(after), True
    done, same = 0, layers is not None  # ``done`` counts the source's layers
    for layer in layers or ():
        same = same and layer in (None, done)
        if layer is not None or not same:
            one, done = next(before, None), done + 1
        yield one, next(after, None), same
    for left, other in zip_longest(before, after):
        yield left, other, False


def stages_of(
    stages: Iterator[Stage], mode_of: Sequence[Mode], *, by_target: bool
) -> Iterator[Stage]:
    """Run the stages of a model; an error names the mode that it does not support."""
    try:
        for stage in stages:
            if not by_target:
                stage.loaded.close()  # the target's weights need the room
            yield stage
    except CallError as error:
        name = mode_of[error.call].name if error.call < len(mode_of) else PREFILL
        if name == PREFILL:
            raise
        raise NotAskedError(error.why, name, by_target=by_target) from error


def _compare_logits(
    ids: Sequence[Tensor],
    mode_of: Sequence[Mode],
    heads: tuple[Head, Head],
    ends: Ends,
    found: Comparison,
) -> None:
    """Add the logits of all calls, without their padding, to the distances of their modes."""
    found.distances |= {mode.name: Distance() for mode in mode_of}
    unpadded = [
        [state[mode.padding :] for state, mode in zip(states, mode_of, strict=False)]
        for states in ends
    ]
    pieces = metrics.logits_in_pieces((heads[0], unpadded[0]), (heads[1], unpadded[1]), ids)
    for index, logits, others, following, position in pieces:
        found.distances[mode_of[index].name].add(logits, others, following, position)
        if index == 0:
            found.sample += _sample(logits, others, SAMPLE * len(logits) // len(ids[0]))


def _spread(state: Tensor) -> Tensor:
    """Indices of ``SPREAD`` evenly spread tokens, or of all tokens if there are fewer."""
    places = torch.linspace(0, len(state) - 1, min(len(state), SPREAD), dtype=torch.float64)
    return places.round().long().to(state.device)


def _sample(logits: Tensor, others: Tensor, count: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(logits.numel(), (max(count, 1),), generator=generator)
    pairs = torch.stack([logits.flatten().cpu()[picked], others.flatten().cpu()[picked]], -1)
    digits = 17 if pairs.dtype == torch.float64 else 9  # all, since the chart has differences
    rounded = [[float(f"{value:.{digits}g}") for value in pair] for pair in pairs.tolist()]
    return [pair for pair in rounded if all(map(math.isfinite, pair))]


def _layer_settings(model: Layerwise) -> list[tuple[str, dict[Setting, Any]]]:
    """Name of every layer, with every plain attribute of its modules."""
    found = []
    for name, layer in model.layers:
        classes: dict[str, str] = {}
        for path, module in layer.named_modules():
            around = classes.get(path.rpartition(".")[0], "")
            classes[path] = f"{around}/{type(module).__name__}"
        settings = {
            (f"{path}.{key}".lstrip("."), classes[path]): value
            for path, module in layer.named_modules()
            for key, value in vars(module).items()
            if key not in NUMBERS and isinstance(value, bool | int | float | str | None)
        }
        found.append((name, settings))
    return found
