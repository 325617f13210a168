"""The logits of source and target, measured and compared with limits.

Both models run side by side, one layer at a time, once in strict float64 and once in the storage
dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from growkit.base.errors import InputError, reason
from growkit.base.limits import DEVICE_MARGIN, SPACING, Limit, native_limit, within
from growkit.engine import metrics
from growkit.engine.calls import Call
from growkit.engine.device import CPU, RUNS, device_name, find_arithmetic_fault
from growkit.engine.kernels import offered
from growkit.engine.metrics import Distance, Head, error_of, finite
from growkit.engine.strict import strict_float64
from growkit.proof.control import MAX_TOKENS, Controls, Coverage
from growkit.proof.fingerprint import computed_in
from growkit.proof.modes import ATTENTION, NO_NUMBERS, SHORT, Mode, NotAskedError, kernel_modes
from growkit.proof.pair import Pair
from growkit.proof.rounding import Inflation, compare_rounding
from growkit.proof.side_by_side import Comparison, Models, SideBySide, computed_on
from growkit.results.proof_result import ModeResult, counted


@dataclass(frozen=True)
class Strict:
    """Both models in strict float64.

    Attributes:
        side: the models.
        modes: the modes in which the source can run; all other modes have a note.
        compared: the comparison.
        controls: rounding in the source, and the deliberate fault.
        altering: new layers that hand on other values than they receive, beside hidden states.
        notes: notes on what was not compared.
        fault: why the CPU computed instead of the device, in a phrase; empty if not.
    """

    side: SideBySide
    modes: Sequence[Mode]
    compared: Comparison
    controls: Controls
    altering: Sequence[str]
    notes: Sequence[str]
    fault: str = ""

    @property
    def limit(self) -> Limit:
        """Limit for an exact promise."""
        return self.controls.limit

    @property
    def caught(self) -> bool:
        """Whether the deliberate fault was noticed."""
        return not within(self.controls.control.relative, self.limit.largest)


@dataclass(frozen=True)
class Native:
    """Both models in the storage dtype.

    Attributes:
        compared: the comparison.
        rounding: distance of the source from itself in strict float64.
        limit: limit for an exact promise; None if the source computes no usable logits.
        inflation: rounding of the target over that of the source; None if another function is
            promised, the dtype is as wide as that of sums, or there are few tokens.
        kernels: results of the attention kernels of a device.
        fault: what the device computes in another way than the dtype promises.
        cause: the end of a sentence, if the device's arithmetic is why the logits differ.
    """

    compared: Comparison
    rounding: Distance
    limit: Limit | None
    inflation: Inflation | None
    kernels: Sequence[ModeResult]
    fault: str = ""
    cause: str = ""

    @property
    def explained(self) -> bool:
        """Whether rounding explains the difference, if the source's logits are usable."""
        largest = self.limit and self.limit.largest
        inflated = self.inflation and not within(*self.inflation)
        return within(self.compared.largest, largest) and not inflated


@dataclass(frozen=True)
class Function:
    """What both models compute.

    Attributes:
        pair: source and target.
        strict: both in strict float64.
        native: both in the storage dtype.
    """

    pair: Pair
    strict: Strict
    native: Native

    @cached_property
    def limit(self) -> Limit | None:
        """Limit in strict float64 for this promise; None for any finite difference."""
        if self.pair.exact or self.pair.lineage.by_ties:
            return self.strict.limit
        # After rounding to a narrower dtype, the target may be another function.
        return self.native.limit if self.pair.lineage.by_rounding else None

    @property
    def kept(self) -> bool:
        """Whether the logits in strict float64 are within their limit."""
        return within(self.strict.compared.largest, self.limit and self.limit.largest)

    @cached_property
    def first_difference(self) -> tuple[int | None, str | None]:
        """Index of the first layer that differs, and name of the first module; None if none."""
        limit, by_layer = self.strict.limit.largest, self.strict.compared.by_layer
        if not self.pair.exact or within(self.strict.compared.largest, limit):
            return None, None
        for index, (name, error) in enumerate(by_layer):
            if not within(error, limit):
                return index - 1 if index else None, name
        known = by_layer and self.strict.side.layers is not None
        return None, self.strict.side.models[1].output[0] if known else None


def compare_function(pair: Pair, side: SideBySide, modes: Sequence[Mode]) -> Function:
    """Compare both models in strict float64 and in the storage dtype.

    Args:
        pair: source and target.
        side: both, ready to run.
        modes: modes to run; those that the source does not support are left out.

    Raises:
        InputError: the source computes NaN or infinity, or a class cannot run.
    """
    strict = compare_strictly(side, modes)
    try:
        native = _compare_natively(strict)
    except InputError as error:
        where = "" if pair.device == CPU else f" (on {device_name(pair.device)})"
        raise InputError(f"{error}{where}") from error
    return Function(pair, strict, native)


# Strict float64.


def compare_strictly(side: SideBySide, modes: Sequence[Mode]) -> Strict:
    """Compare in strict float64, on the CPU if there is any fault in the device's arithmetic."""
    device = side.pair.device
    if device == CPU:
        return run_modes(side, modes)
    fault = find_arithmetic_fault(device, torch.float64, side.products(modes))
    if not fault:
        try:
            strict = run_modes(side, modes)
        except (InputError, RuntimeError) as error:  # RuntimeError: an operation is missing
            fault = reason(error)
        else:
            fault = unlike_cpu(strict)
            if not fault:
                return strict
    return replace(run_modes(replace(side, place=CPU), modes), fault=fault)


def run_modes(side: SideBySide, modes: Sequence[Mode]) -> Strict:
    """Compare in strict float64 in all modes that the source supports."""
    try:
        strict = _run(side, modes)
    except NotAskedError as error:
        return run_modes(side, error.without(modes))
    distances = strict.compared.distances
    for name in [name for name, distance in distances.items() if not distance.usable]:
        modes = NotAskedError(NO_NUMBERS, name).without(modes)
        del distances[name]
    return replace(strict, modes=modes)


def unlike_cpu(strict: Strict) -> str:
    """Compare a device's results on a short prompt with the CPU's; why they differ, or nothing.

    A device may be wrong in what no test of its arithmetic shows. It is trusted only if the CPU
    gets the same logits, measures about as much rounding, and comes to the same verdict.
    """
    side, compared, limit = strict.side, strict.compared, strict.limit.largest
    if side.pair.exact and not within(compared.largest, limit):
        return f"the logits differ by {compared.largest:.1e}, which the CPU had to confirm"
    if not strict.caught:
        return "the negative control went unnoticed"
    ids, depths = strict.modes[0].calls[0].ids[:SHORT], side.depths_of_all_kinds()
    try:
        if depths:
            compared, controls = side.compare_prompt(ids, side.pair.device, depths=depths)
            limit = controls.limit.largest
    except InputError:  # a class that needs all of its layers
        depths = ()
    on_cpu, controls = side.compare_prompt(ids, CPU, depths=depths)
    own = controls.limit.largest
    if side.pair.exact and not within(on_cpu.largest, own):
        return f"the logits do not differ by {on_cpu.largest:.1e}, as on the CPU"
    if not within(limit, own * DEVICE_MARGIN):
        return f"rounding is {limit / own:.0e} times that of the CPU"
    distance = float(torch.tensor([*map(error_of, compared.answers, on_cpu.answers)]).max())
    return "" if within(distance, own) else f"the logits are {distance:.1e} from those of the CPU"


def _run(side: SideBySide, modes: Sequence[Mode]) -> Strict:
    """Compare in strict float64, with the negative control."""
    pair, (source, target) = side.pair, side.models
    controls = side.controls(Call(modes[0].calls[0].ids[:MAX_TOKENS]))
    coverage = Coverage()
    with strict_float64():
        compared = side.compare(side.models, modes, "float64", controls, coverage)
        own, new = source.altering, target.altering
        for model in (source, target):
            model.check_reach()
        _check_usable(pair, compared.prefill)
        notes = _new_tokens(side, compared.end)
    if unseen := coverage.without_effect:
        notes.append(
            f"no logit of these prompts depends on {counted(len(unseen), 'kind')} of tensors "
            f"(first {target.stored(unseen[0])})"
        )
    altering = new if len(new) > len(own) else []
    return Strict(side, modes, compared, controls, altering, notes)


def _check_usable(pair: Pair, prefill: Distance) -> None:
    """Refuse a source whose logits prove nothing."""
    where = f"the model in {pair.before.folder}"
    if not prefill.usable:
        raise InputError(f"{where} computes NaN or infinite logits")
    if not prefill.squared_source:
        raise InputError(
            f"{where} computes only logits of zero, so nothing can be proved; "
            f"{'; '.join(pair.before.notes) or 'correct its weights'}"
        )


def _new_tokens(side: SideBySide, end: Tensor | None) -> list[str]:
    """A note on the tokens that only the target has."""
    if not side.pair.more_tokens or end is None:
        return []
    old, new = (model.config["vocab_size"] for model in (side.pair.before, side.pair.after))
    share = side.models[1].share(end[: metrics.TOKENS_FIRST], range(old, new))
    return [
        f"of the {new} tokens, the logits of the source's {old} were compared; the new ones take "
        f"{share:.2g} of the softmax"
    ]


# The storage dtype.


def _compare_natively(strict: Strict) -> Native:
    """Compare in the storage dtype, on a device also with each of its attention kernels."""
    pair = strict.side.pair
    dtype, device = computed_in(pair.after.tensors), pair.device
    fault = find_arithmetic_fault(device, getattr(torch, dtype), strict.side.products(strict.modes))
    native = replace(_run_natively(strict, dtype, device), fault=fault)
    if device == CPU or not (pair.exact and native.limit) or native.explained:
        return native
    on_cpu = _run_natively(strict, dtype, CPU)
    if on_cpu.limit and on_cpu.explained:
        cause = f"the arithmetic of {device_name(device)} is the cause"
        differ = f"; on the CPU they differ by {on_cpu.compared.largest:.1e}, so {cause}"
        return replace(native, cause=differ)
    return native


def _run_natively(strict: Strict, dtype: str, device: torch.device) -> Native:
    """Compare in the storage dtype, and measure the source's own rounding in it."""
    side = strict.side
    models = side.open(getattr(torch, dtype), device)
    kernels: list[Mode] = []
    modes = [mode for mode in strict.modes if not mode.strict]
    if device != CPU:
        names = offered(models[0].model, device, getattr(torch, dtype))
        kernels = kernel_modes(modes[0].calls[0].ids, names)
    while True:
        try:
            compared = side.compare(models, [*modes, *kernels], dtype)
            break
        except NotAskedError as error:
            if not error.mode.startswith(ATTENTION):
                raise
            kernels = error.without(kernels)
    states, inflation = strict.compared.spread[0], None
    with (
        side.models[0].head() as exact_head,
        models[0].head() as source_head,
        models[1].head() as target_head,
    ):
        strict_head: Head = strict_float64()(exact_head)
        heads = [computed_on(side.place, head) for head in (source_head, target_head)]

        def rounding(exact: list[Tensor], rounded: list[Tensor]) -> Distance:
            nothing = [torch.zeros(len(state), dtype=torch.long) for state in exact]  # no losses
            return metrics.distance_of((strict_head, exact), (heads[0], rounded), nothing)

        results = []
        for mode in kernels:
            own = rounding(states[:1], [compared.kernels[mode.name][0]]) if mode.calls else None
            results.append(_kernel_result(strict, mode, models, compared, own))
        # Sums in float32 are rounded at every step, so that their errors depend on their order.
        if side.pair.exact and SPACING[dtype] > SPACING["float32"]:
            both = zip(heads, compared.spread, strict=True)
            own, inflation = compare_rounding((strict_head, states), *both, dtype=dtype)
        else:
            own = rounding(states, compared.spread[0])
    limit = native_limit(own.relative, dtype, strict.limit) if compared.prefill.usable else None
    return Native(compared, own, limit, inflation, results)


def _kernel_result(
    strict: Strict, mode: Mode, models: Models, compared: Comparison, rounding: Distance | None
) -> ModeResult:
    """The result of an attention kernel.

    Args:
        strict: both models in strict float64.
        mode: the mode of the kernel.
        models: both in the storage dtype.
        compared: their comparison, of which the mode is taken out.
        rounding: the source's own rounding with this kernel; None if it was not tried.
    """
    result = ModeResult(name=mode.name, tried=bool(mode.calls), note=mode.note)
    if rounding is None:
        return result
    distance, pair = compared.distances.pop(mode.name), strict.side.pair
    names = {name for model in models for name in model.ran[mode.kernel]}
    bits = "the same" if compared.kernels[mode.name][1] else "different"
    limit = native_limit(rounding.relative, compared.dtype, strict.limit)
    result.native = finite(distance.relative)
    result.note = (
        f"{' and '.join(sorted(names)) or 'no fused kernel'} ran on {device_name(pair.device)}, "
        f"the logits differ by {distance.relative:.1e}, {RUNS} runs gave {bits} bits"
    )
    if limit and distance.usable and pair.exact:
        result.native_tolerance = limit.largest
        result.kept = within(distance.relative, limit.largest)
    return result
