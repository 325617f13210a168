"""The verdict: does the target compute what the source computes?"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import (
    TORCH_NAMES,
    Config,
    main_dtype,
    total_bytes,
    total_parameters,
)
from growkit.engine.calls import Call
from growkit.engine.heads import TOKENS_FIRST, distance_of
from growkit.engine.layerwise import Layerwise
from growkit.engine.loader import loading
from growkit.engine.metrics import finite
from growkit.engine.oracle import check_config
from growkit.engine.prompts import make_prompts
from growkit.engine.reproducible import reproducible
from growkit.engine.stored_gradients import StoredGradients
from growkit.engine.strict import strict_float64
from growkit.errors import InputError
from growkit.manifest import read_record
from growkit.planning.plan import Plan
from growkit.proof.beforehand import NO_GPU, bytes_of, check_vocabularies, other_vocabulary
from growkit.proof.causes import spacing
from growkit.proof.comparison import PROBE, Control, Probe, Rounding, compare
from growkit.proof.copies import AsClass, Copied, Copies
from growkit.proof.files.folder import Beside, beside_plan, beside_source, rests_on
from growkit.proof.findings import (
    Native,
    Origin,
    Recovered,
    Strict,
    exact_reason,
    other_reason,
    within_limit,
)
from growkit.proof.localisation import (
    component_named,
    find_fault,
    find_fault_before_layers,
    find_fault_behind_layers,
)
from growkit.proof.modes import Mode, NotAskedError, modes, result
from growkit.proof.origin import origin_of
from growkit.proof.trainability import Gradients
from growkit.proof.usage import used
from growkit.proof.weights import compare_weights
from growkit.recipe.recipe import Recipe
from growkit.report.progress import Progress, Silent
from growkit.results.proof import Fault, LayerError, ModeResult, VerifyResult
from growkit.results.sentences import trainability_sentence
from growkit.results.versions import versions
from growkit.settings import Settings

STRICT_MARGIN = 8
"""How many times what rounding does to the source the target may differ in strict float64."""

FEW = 100
"""Predictions below which a verdict says how few there were."""

ROUNDING_MARGIN = 16
"""How many times the source's own rounding error the target may differ: both round, over sums up to
some times as long, and the largest of many errors is compared."""


def verify(
    source: str | Path,
    target: str | Path,
    settings: Settings = Settings(),
    *,
    text: str | Path | None = None,
    device: str | None = None,
    prompts: int | None = None,
    length: int | None = None,
    seed: int | None = None,
    trainability: bool | None = None,
    max_kl: float | None = None,
    progress: Progress = Silent(),
    advance: Callable[[int], None] = lambda count: None,
) -> VerifyResult:
    """Compare two model folders: weights, logits in strict float64, and logits as they will run.

    Logits come from transformers' own classes, loaded from the files as they are. An exact promise
    is kept when no logit differs by more than some times what rounding does to the source itself,
    in strict float64 and in the storage dtype (``docs/numerics.md``). Where the target's manifest
    says how it was made, its weights must also give the source's back, bit for bit.

    Args:
        source: folder of the model that was grown.
        target: folder of the model that it became.
        settings: what is compared. What is given beside it, of the following, takes the place of
            what it says.
        text: file with real text, tokenized by the source's tokenizer; random tokens without.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
        prompts: number of windows of text, or of random prompts; 8 without, or 4 where every weight
            has given the source's back.
        length: tokens in each, at most the model's longest context; 512 without, or 48 there.
        seed: of the random prompts.
        trainability: whether every parameter of the target must be able to train.
        max_kl: nats per token of KL above which the target is not kept; no limit without.
        progress: where progress is shown, such as ``growkit.Bars()``.
        advance: called with the number of bytes done, for a progress bar that expects
            ``proof_bytes`` of them.

    Returns:
        The verdict and all figures.

    Raises:
        InputError: a folder cannot be loaded, or the two cannot be compared.
    """
    given: dict[str, Any] = {
        "text": text,
        "device": device,
        "prompts": prompts,
        "length": length,
        "seed": seed,
        "trainability": trainability,
        "max_kl": max_kl,
    }
    settings = replace(settings, **{k: v for k, v in given.items() if v is not None})
    before, after = Checkpoint(source), Checkpoint(target)
    record = read_record(after)
    with progress.bytes("proving", bytes_of(before, after)) as shown:

        def both(count: int) -> None:
            shown(count)
            advance(count)

        verdict = prove(before, after, settings, record.recipe, both)
    verdict["kl_by_rank"] = list(record.kl_by_rank)
    return verdict


def prove(
    before: Checkpoint,
    after: Checkpoint,
    settings: Settings,
    recipe: Recipe | None,
    advance: Callable[[int], None],
) -> VerifyResult:
    """See ``verify``.

    Args:
        before: the source.
        after: the target.
        settings: what is compared.
        recipe: how the target was made, if that is known.
        advance: see ``verify``.
    """
    check_vocabularies(before, after)
    place = _device(settings.device)
    with reproducible(place):
        return _proved(before, after, settings, recipe, advance, place)


def _proved(
    before: Checkpoint,
    after: Checkpoint,
    settings: Settings,
    recipe: Recipe | None,
    advance: Callable[[int], None],
    place: torch.device,
) -> VerifyResult:
    started = time.perf_counter()
    loads, loaded = loading(before), loading(after)
    prompts = make_prompts(settings, before.folder, before.config)
    origin = origin_of(before, after, recipe)
    beside = (
        beside_source(before, after, loads, loaded)
        if origin.unknown
        else beside_plan(before, after, origin.plans[-1].config)
    )
    proof = _Proof(before, after, place, origin, advance, trainability=settings.trainability)
    weights = proof.weights(beside, rests_on(before, after, loads, loaded, beside))
    exact = origin.promise == "exact"
    if exact and weights.settled:
        prompts = prompts.cut(*settings.settled.amount)
    asked, strict = proof.asked(modes(prompts.windows, after.config))
    native = proof.native(asked, strict)
    in_use = list(used(before, after, prompts.windows[0], place, exact))
    by_rounding = not exact and origin.lineage is not None and origin.lineage.by_rounding
    if exact:
        kept = strict.kept and native.kept and all(way["kept"] is not False for way in in_use)
        reason = exact_reason(weights, strict, native, in_use)
    else:
        assert origin.lineage is not None
        limit = native.tolerance if by_rounding else None
        kept = strict.within(limit)
        reason = other_reason(weights, strict, origin.lineage, limit, native.dtype)
    if origin.unknown and proof.more_tokens and not strict.within(native.tolerance):
        raise other_vocabulary(before, after, f"they are {reason}")
    learns = strict.trainability
    able = not (settings.trainability and learns and not learns["trainable"])
    if learns and kept and weights.kept and strict.caught and not able:
        reason = f"not able to learn: {trainability_sentence(learns)}; but {reason}"
    fault = proof.fault(strict, weights, asked)
    distance = strict.distance
    within, found_kl = within_limit(distance, settings.max_kl)
    if kept and weights.kept and strict.caught and not within:
        reason = f"not as asked: {found_kl}; {reason}"
    reason += "".join(f"; {note}" for note in strict.notes)
    if distance.predictions < FEW:
        reason += f"; on {distance.predictions} predictions alone"
    shown = native.compared if exact else strict.compared
    return VerifyResult(
        promise=origin.promise,
        kept=kept and weights.kept and strict.caught and able and within,
        reason=reason,
        weights_recovered=None if weights.unknown else weights.lost is None,
        first_lost_tensor=weights.lost,
        changed=list(beside.changed),
        notes=[*weights.notes, *strict.notes],
        unknown_files=list(beside.unknown),
        strict_float64=distance.measured(
            "float64", _name(place), *_limit(strict, native, exact=exact, by_rounding=by_rounding)
        ),
        native=native.measured(exact),
        rounding=native.own.measured(native.dtype, native.device, None, None),
        max_kl=settings.max_kl,
        lost=origin.lost or None,
        loss_source=finite(distance.loss_source / distance.predictions),
        loss_target=finite(distance.loss_target / distance.predictions),
        loss_source_native=native.loss(target=False),
        loss_target_native=native.loss(target=True),
        first_differing_layer=strict.difference.layer,
        first_difference=strict.difference.module,
        fault=fault,
        by_layer=[LayerError(module=m, relative=finite(e)) for m, e in strict.compared.by_layer],
        modes=[*_mode_results(asked, strict, native, exact), *in_use],
        kl_by_position=shown.prefill.kl_by_position(),
        tokens_by_position=shown.prefill.tokens_by_position(),
        logit_sample=native.compared.sample,
        negative_control_caught=strict.caught,
        negative_control=strict.control.fault,
        trainability=strict.trainability,
        symmetry=strict.symmetry,
        spectra=list(weights.spectra),
        kl_by_rank=[],
        tokens=distance.tokens,
        predictions=distance.predictions,
        text=settings.text,
        text_sha256=prompts.text_sha256,
        seed=settings.seed,
        source=str(before.folder),
        target=str(after.folder),
        source_parameters=total_parameters(before.tensors),
        parameters=total_parameters(after.tensors),
        source_bytes=total_bytes(before.tensors),
        bytes=total_bytes(after.tensors),
        tensors_recovered=weights.recovered[0] if weights.recovered else None,
        source_tensors=weights.recovered[1] if weights.recovered else None,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        seconds=round(time.perf_counter() - started, 3),
        versions=versions(),
    )


def _limit(
    strict: Strict, native: Native, *, exact: bool, by_rounding: bool
) -> tuple[float | None, str | None]:
    """What logits may differ by in strict float64, and why."""
    if exact:
        return strict.tolerance, strict.why
    if by_rounding and native.tolerance is not None:
        return native.tolerance, native.why
    return None, None


def rehearse(settings: Settings, source: Checkpoint, config: Config) -> None:
    """Raise what ``verify`` would raise, as far as that is known before the target is written.

    Args:
        settings: of the proof.
        source: the source.
        config: the target's ``config.json``.

    Raises:
        InputError: the device, the text, the tokenizer or one of the configs cannot be used.
    """
    _device(settings.device)
    make_prompts(settings, source.folder, source.config)
    loading(source)
    check_config(source.config, f"{source.folder / 'config.json'}")
    check_config(config, f"the grown model's config, made from {source.folder / 'config.json'}")


def proof_bytes(source: str | Path, target: str | Path) -> int:
    """The number of bytes that ``verify`` reports through ``advance``, but for rounding.

    Raises:
        InputError: a folder is no checkpoint.
    """
    return bytes_of(Checkpoint(source), Checkpoint(target))


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(NO_GPU)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


class _Proof:
    """The parts of a proof, which share what they are about."""

    def __init__(
        self,
        before: Checkpoint,
        after: Checkpoint,
        device: torch.device,
        origin: Origin,
        advance: Callable[[int], None],
        *,
        trainability: bool,
    ) -> None:
        self._trainability = trainability
        self.before, self.after, self.device, self.origin = before, after, device, origin
        layers = [max(_layers(each.config), 1) for each in (before, after)]
        total = total_bytes(before.tensors) + total_bytes(after.tensors)
        self._advance = lambda: advance(total // (max(layers) + 1))
        self.more_tokens = after.config["vocab_size"] > before.config["vocab_size"]
        with strict_float64():
            self._source, self._target = self._both(torch.float64, None)

    def _both(self, dtype: torch.dtype, attention: str | None) -> tuple[Layerwise, Layerwise]:
        tokens = self.before.config["vocab_size"] if self.more_tokens else None
        return (
            Layerwise(self.before, dtype, self.device, attention),
            Layerwise(self.after, dtype, self.device, attention, tokens),
        )

    def weights(self, beside: Beside, notes: Sequence[str]) -> Recovered:
        """The algebra half, where it is known how the target was made.

        Args:
            beside: what was found beside the weights.
            notes: what else the verdict is to say.
        """
        origin, after = self.origin, self.after
        changed = next(iter(beside.changed), None)
        if origin.lineage is None:
            return Recovered(unknown=origin.unknown, changed=changed, notes=notes)
        compared = compare_weights(origin.lineage, after)
        return Recovered(
            lost=compared.lost,
            changed=changed,
            notes=notes,
            in_effect=sum(len(plan.in_effect) for plan in origin.plans),
            spectra=compared.spectra,
            unchecked=len(compared.unchecked),
            recovered=None if compared.lost else compared.recovered,
        )

    def asked(self, ways: list[Mode]) -> tuple[list[Mode], Strict]:
        """The ways in which the source can be asked, and what ``strict`` finds in these."""
        try:
            return ways, self.strict(ways)
        except NotAskedError as error:
            return self.asked(error.without(ways))

    def strict(self, asked: Sequence[Mode]) -> Strict:
        """The comparison in strict float64, with the negative control and the gradients.

        Raises:
            InputError: the source computes NaN or infinity, or a class cannot run.
        """
        control = Control()
        widest = max(max(info.shape, default=1) for info in self.before.tensors.values())
        rounding = Rounding(torch.finfo(torch.float64).eps * math.sqrt(widest))
        stored = StoredGradients(self.after)
        gradients = Gradients(self._plans_that_fit(), stored)
        probe = Probe(
            Call(asked[0].calls[0].ids[:PROBE]),
            control,
            rounding,
            against_itself=self.origin.promise != "exact",
            wanted=gradients.new_capacity or self._trainability,
        )
        with strict_float64():
            compared = compare(
                self._source,
                self._target,
                asked,
                self._advance,
                probe,
                self._hidden,
                self.origin.layers,
            )
            if not math.isfinite(compared.prefill.squared_source):
                raise InputError(
                    f"the model in {self.before.folder} computes NaN or infinite logits"
                )
            if not compared.prefill.squared_source:
                raise InputError(
                    f"the model in {self.before.folder} answers everything with logits of zero; "
                    "nothing can be proved of it, correct its weights"
                )
            share = None
            if self.more_tokens and compared.ends:
                share = self._target.others(compared.ends[1][:TOKENS_FIRST])
            idle: Sequence[str] = ()
            if probe.wanted:
                idle = self._target.gradients(probe.call.ids, probe.given, gradients.look)
        named = self._target.model.named_parameters()
        names = [name for name, _ in named if self._target.stores(name)]
        trainable = gradients.found(names, len(idle)) if probe.wanted else None
        promised = self.origin.promise == "exact"
        return Strict(
            compared,
            rounding.distance.relative,
            STRICT_MARGIN,
            control,
            trainable,
            gradients.symmetry,
            promised,
            [*self._shared(share), *_unseen(stored.lost)],
        )

    def _shared(self, share: float | None) -> list[str]:
        """What new tokens take from the old ones, whose logits alone were compared."""
        if share is None:
            return []
        old, new = (each.config["vocab_size"] for each in (self.before, self.after))
        return [
            f"of the {new} tokens, the logits of the source's {old} were compared; the others take "
            f"{share:.2g} of the softmax"
        ]

    @cached_property
    def _hidden(self) -> Copied | None:
        """What the target's hidden states hold of the source's, if that is known."""
        if self.origin.lineage is None:
            return None
        copies = Copies(self.origin.lineage, AsClass(self.before), AsClass(self.after))
        names = [f"{model.names[0]}.weight" for model in (self._target, self._source)]
        return copies.of(names[0], names[1], dimension=1)

    def _plans_that_fit(self) -> Sequence[Plan]:
        """The plans, if what they make has the shapes of the target."""
        plans = self.origin.plans
        rules = plans[-1].rules if plans else ()
        fits = all(self.after.tensors.get(rule.target) == rule.info for rule in rules)
        return plans if fits else ()

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
        if len(compared.beside) < len(self._target.names) - 1 and not self.origin.layers:
            found["layer"] = difference.layer
            found["cause"] = "more layers compute something than in the source"
        elif difference.layer is not None:
            found = find_fault(
                self.before,
                self.after,
                self.origin.lineage,
                ids,
                (difference.layer, compared.beside[difference.layer + 1]),
                limit,
                self.device,
            )
        elif difference.module == compared.head:
            assert compared.ends is not None
            with strict_float64():
                found = find_fault_behind_layers(
                    self._source, self._target, self._hidden, compared.ends, limit, factor
                )
        elif difference.module:
            with strict_float64():
                found = find_fault_before_layers(
                    self._source, self._target, self._hidden, ids, limit, stored
                )
        if lost:
            component = component_named(lost, self.after) or found["component"]
            if component != found["component"]:  # what was read off is said of something else
                found["cause"] = found["factor"] = None
            found["tensor"], found["component"] = lost, component
        elif weights.changed and not weights.lost:
            found["cause"] = f"{weights.changed} {weights.is_not}"
        if found["factor"] is None and not strict.kept:
            found["factor"] = factor
        return found

    def native(self, asked: Sequence[Mode], strict: Strict) -> Native:
        """The comparison in the target's storage dtype, against the source's own rounding."""
        name = TORCH_NAMES[main_dtype(self.after.tensors)]
        if name.startswith("float8"):
            name = "bfloat16"  # what such weights are computed in
        dtype: torch.dtype = getattr(torch, name)
        source, target = self._both(dtype, None)
        hidden, layers = self._hidden, self.origin.layers
        compared = compare(source, target, asked, self._advance, copied=hidden, layers=layers)
        with self._source.head() as exact_head, source.head() as head:

            def strict_head(hidden: Tensor) -> Tensor:
                with strict_float64():
                    return exact_head(hidden)

            exact, rounded = strict.compared.spread, compared.spread
            nothing = [torch.zeros(len(each), dtype=torch.long) for each in exact]  # no losses
            rounding = distance_of((strict_head, exact), (head, rounded), nothing)
        tolerance = None
        overflow = not math.isfinite(compared.prefill.squared_source)
        if rounding.relative < 1 and not overflow:  # else there is nothing to be kept
            tolerance = ROUNDING_MARGIN * max(rounding.relative, torch.finfo(dtype).eps)
        return Native(compared, name, _name(self.device), rounding, ROUNDING_MARGIN, tolerance)


def _unseen(tensors: Collection[str]) -> list[str]:
    """What a verdict does not cover where gradients do not tell those of the files."""
    if not tensors:
        return []
    return [
        f"gradients of {len(tensors)} tensors were not looked at, because what transformers makes "
        f"of them cannot be undone (first {min(tensors)})"
    ]


def _mode_results(
    asked: Sequence[Mode], strict: Strict, native: Native, exact: bool
) -> list[ModeResult]:
    results = []
    for mode in asked:
        if not mode.calls:
            results.append(result(mode.name, mode.note))
            continue
        found = strict.compared.distances[mode.name].relative
        running = native.compared.distances[mode.name].relative
        limit = native.tolerance
        kept = found < strict.tolerance and (limit is None or running <= limit)
        results.append(
            result(
                mode.name,
                mode.note,
                relative=finite(found),
                tolerance=strict.tolerance if exact else None,
                native=finite(running),
                native_tolerance=limit if exact else None,
                kept=kept if exact else None,
            )
        )
    return results


def _layers(config: Config) -> int:
    count = config.get("num_hidden_layers")
    return count if isinstance(count, int) else 1
