"""The verdict: does the target compute what the source computes?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from growkit.checkpoint import TORCH_NAMES, Config, main_dtype
from growkit.checkpoint.publishing import MANIFEST
from growkit.checkpoint.reading import Checkpoint, read_json
from growkit.errors import InputError
from growkit.plan import Plan
from growkit.proof import (
    STRICT_TOLERANCE,
    Measured,
    Settings,
    Trainability,
    VerifyResult,
    versions,
)
from growkit.proof.algebra import compare_weights
from growkit.proof.findings import (
    Control,
    Difference,
    Origin,
    Recovered,
    Strict,
    exact_reason,
    is_exact,
    other_reason,
)
from growkit.proof.folder import first_changed_file
from growkit.proof.metrics import Distance, finite
from growkit.proof.oracle import (
    blocks,
    check_config,
    gradients_as_stored,
    hidden_states,
    load,
    logits,
)
from growkit.proof.prompts import Prompts, make_prompts
from growkit.proof.strict import strict_float64
from growkit.proof.trainability import trainability
from growkit.recipe import Recipe, parse_recipe

FAULT = 1e-3
"""Relative size of the fault that the negative control must notice."""

ROUNDING_MARGIN = 16
"""How many times the source's own rounding error the target may differ in the storage dtype: both
round, over sums up to some times as long, and the largest of many errors is compared."""


def verify(
    source: str | Path,
    target: str | Path,
    *,
    text: str | Path | None = None,
    device: str = "auto",
    prompts: int = 8,
    length: int = 512,
    seed: int = 0,
    advance: Callable[[int], None] = lambda tokens: None,
) -> VerifyResult:
    """Compare two model folders: weights, logits in strict float64, and logits as they will run.

    Logits come from transformers' own classes, loaded from the files as they are. An exact promise
    is kept when the largest difference of any logit, relative to the source's logit scale, is below
    1e-12 in strict float64, and the storage dtype adds no more than rounding. Where the target's
    manifest says how it was made, its weights must also give the source's back, bit for bit.

    Args:
        source: folder of the model that was grown.
        target: folder of the model that it became.
        text: file with real text, tokenized by the source's tokenizer; None for random tokens.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
        prompts: number of windows of text, or of random prompts.
        length: tokens in each, at most the model's longest context.
        seed: of the random prompts.
        advance: called with the number of tokens done, for a progress bar that expects
            ``proof_tokens`` of them.

    Returns:
        The verdict and all figures.

    Raises:
        InputError: a folder cannot be loaded, or the two cannot be compared.
    """
    settings = Settings(str(text) if text is not None else None, prompts, length, seed, device)
    before, after = Checkpoint(source), Checkpoint(target)
    return prove(before, after, settings, _recipe_of(after), advance)


def prove(
    before: Checkpoint,
    after: Checkpoint,
    settings: Settings,
    recipe: Recipe | None,
    advance: Callable[[int], None],
) -> VerifyResult:
    """See ``verify``; ``recipe`` says how the target was made, if that is known."""
    _comparable(before, after)
    place = _device(settings.device)
    asked = make_prompts(settings, before.folder, before.config)

    origin = _origin(before, recipe)
    exact = origin.promise == "exact"
    weights = _weights(before, after, origin)
    strict = _strict(before, after, asked, place, origin, advance)
    native, native_kept = _native(before, after, asked, place, strict, advance)
    distance = strict.distance
    kept = (is_exact(distance) and native_kept) if exact else math.isfinite(distance.relative)
    if exact:
        reason = exact_reason(weights, strict, native, native_kept)
    else:
        reason = other_reason(weights, strict, origin)
        native["tolerance"] = None
    return VerifyResult(
        promise=origin.promise,
        kept=kept and weights.kept and strict.control.caught,
        reason=reason,
        weights_recovered=None if weights.unknown else weights.lost is None,
        first_lost_tensor=weights.lost,
        strict_float64=distance.measured(
            "float64", _name(place), STRICT_TOLERANCE if exact else None
        ),
        native=native,
        loss_source=finite(distance.loss_source / distance.predictions),
        loss_target=finite(distance.loss_target / distance.predictions),
        first_differing_layer=strict.difference.layer,
        first_difference=strict.difference.module,
        negative_control_caught=strict.control.caught,
        negative_control=strict.control.fault,
        trainability=strict.trainability,
        tokens=distance.tokens,
        predictions=distance.predictions,
        text=settings.text,
        text_sha256=asked.text_sha256,
        seed=settings.seed,
        source=str(before.folder),
        target=str(after.folder),
        versions=versions(),
    )


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
    check_config(source.config, f"{source.folder / 'config.json'}")
    check_config(config, f"the grown model's config, made from {source.folder / 'config.json'}")


def proof_tokens(settings: Settings) -> int:
    """The most tokens that ``verify`` reports through ``advance``."""
    return 2 * settings.prompts * settings.length


def _comparable(before: Checkpoint, after: Checkpoint) -> None:
    for checkpoint in (before, after):
        size = checkpoint.config.get("vocab_size")
        if not isinstance(size, int):
            raise InputError(
                f"vocab_size is {size!r} in {checkpoint.folder}; a whole number was expected"
            )
    sizes = [checkpoint.config["vocab_size"] for checkpoint in (before, after)]
    if sizes[0] != sizes[1]:
        raise InputError(
            f"vocab_size is {sizes[0]} in {before.folder} and {sizes[1]} in {after.folder}; "
            "only models of the same vocabulary can be compared"
        )


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("device cuda was asked for, but torch sees no GPU; use --device cpu")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _recipe_of(target: Checkpoint) -> Recipe | None:
    """How a folder was made, if growkit made it."""
    file = target.folder / MANIFEST
    if not file.exists():
        return None
    recipe = read_json(file).get("recipe")
    if not isinstance(recipe, dict):
        raise InputError(f"{file} holds no recipe; remove the file to compare logits alone")
    return parse_recipe(recipe, str(file))


def _origin(before: Checkpoint, recipe: Recipe | None) -> Origin:
    if recipe is None:
        return Origin(unknown="no manifest says how the target was made")
    try:
        way = recipe.plan(before)
    except InputError:
        return Origin(unknown="the recipe in the target's manifest does not fit this source")
    return Origin(way.source, way.plans, way.promise, way.lost)


def _weights(before: Checkpoint, after: Checkpoint, origin: Origin) -> Recovered:
    """The algebra half, where it is known how the target was made."""
    if origin.source is None:
        return Recovered(unknown=origin.unknown)
    return Recovered(
        lost=compare_weights(origin.source, after, origin.plans).lost,
        changed=first_changed_file(after, origin.plans[-1].config, before),
        in_effect=sum(len(plan.in_effect) for plan in origin.plans),
    )


def _strict(
    before: Checkpoint,
    after: Checkpoint,
    asked: Prompts,
    device: torch.device,
    origin: Origin,
    advance: Callable[[int], None],
) -> Strict:
    with strict_float64():
        source = load(before.folder, torch.float64, device, "eager")
        target = load(after.folder, torch.float64, device, "eager")
        distance = Distance()
        worst, largest = asked.windows[0], 0.0
        for window in asked.windows:
            expected = logits(source, window)
            if not expected.isfinite().all():
                raise InputError(f"the model in {before.folder} computes NaN or infinite logits")
            distance.add(expected, logits(target, window), window)
            if distance.largest > largest:
                worst, largest = window, distance.largest
            advance(len(window))
        exact = origin.promise == "exact"
        found = is_exact(distance) or not exact
        difference = Difference() if found else _locate(source, target, worst)
        reference = logits(source, asked.windows[0])
        # What is promised to differ is held against itself: a fault must show all the same.
        unspoiled = reference if exact else logits(target, asked.windows[0])
        control = _negative_control(target, unspoiled, asked.windows[0])
        trainable = _trainability(target, after, asked.windows[0], origin.plans)
    return Strict(distance, difference, control, trainable, reference)


def _trainability(
    target: nn.Module, after: Checkpoint, window: Tensor, plans: Sequence[Plan]
) -> Trainability | None:
    """Of the last growth; what came after it is undone for the gradients."""
    growths = [index for index, plan in enumerate(plans) if plan.copies]
    if not growths:
        return None
    in_files = gradients_as_stored(after)

    def as_grown(name: str, gradient: Tensor) -> tuple[str, Tensor] | None:
        name, gradient = in_files(name, gradient)
        for plan in reversed(plans[growths[-1] + 1 :]):
            rule = plan.rule(name)
            back = rule.collapse(gradient) if rule.collapse else None
            if back is None:
                return None
            name, gradient = rule.sources[0], back
        return name, gradient

    return trainability(target, list(plans[growths[-1]].rules), window, as_grown)


def _locate(source: nn.Module, target: nn.Module, window: Tensor) -> Difference:
    """Compare the hidden states of every layer, copy by copy."""
    names = [name for name, _ in blocks(target)]
    expected, found = hidden_states(source, window), hidden_states(target, window)
    size, grown = expected[0].shape[-1], found[0].shape[-1]
    if len(expected) != len(found) or grown % size:
        return Difference()

    def tiled(state: Tensor) -> Tensor:  # the whole space again and again, as growkit writes it
        return state.view(*state.shape[:-1], grown // size, size).transpose(-1, -2)

    def adjacent(state: Tensor) -> Tensor:  # copies side by side, as others may
        return state.view(*state.shape[:-1], size, grown // size)

    def error(copies: Tensor, state: Tensor) -> float:
        scale = state.square().mean().sqrt().clamp_min(torch.finfo(state.dtype).tiny)
        return float((copies - state[..., None]).abs().max() / scale)

    arrangement = min((tiled, adjacent), key=lambda order: error(order(found[0]), expected[0]))
    for index, (state, grown_state) in enumerate(zip(expected, found, strict=True)):
        if not error(arrangement(grown_state), state) < STRICT_TOLERANCE:
            return Difference(index - 1 if index else None, names[index])
    return Difference(None, names[-1])


def _negative_control(target: nn.Module, reference: Tensor, window: Tensor) -> Control:
    """Spoil one matrix after another until the comparison that gave the verdict notices.

    The largest matrix of the middle layer comes first. It may be one that nothing reads (an
    identity block multiplies by zero), so other layers and the head follow.
    """
    modules = blocks(target)
    middle = len(modules) // 2
    for name, module in sorted(modules, key=lambda item: abs(modules.index(item) - middle)):
        matrices = {
            f"{name}.{key}": weight for key, weight in module.named_parameters() if weight.dim() > 1
        }
        with torch.no_grad():
            key, weight = max(matrices.items(), key=lambda item: float(item[1].norm()))
            original = weight.clone()
            weight.mul_(1 + FAULT)
            distance = Distance()
            distance.add(reference, logits(target, window), window)
            weight.copy_(original)
        if not is_exact(distance):
            return Control(f"{key} × {1 + FAULT}", caught=True)
    return Control(f"any matrix × {1 + FAULT}", caught=False)


def _native(
    before: Checkpoint,
    after: Checkpoint,
    asked: Prompts,
    device: torch.device,
    strict: Strict,
    advance: Callable[[int], None],
) -> tuple[Measured, bool]:
    """The comparison in the target's storage dtype, held against the source's own rounding."""
    name = TORCH_NAMES[main_dtype(after.tensors)]
    if name.startswith("float8"):
        name = "bfloat16"  # what such weights are computed in
    dtype: torch.dtype = getattr(torch, name)
    source = load(before.folder, dtype, device, None)
    target = load(after.folder, dtype, device, None)
    distance = Distance()
    for window in asked.windows:
        distance.add(logits(source, window), logits(target, window), window)
        advance(len(window))
    rounding = Distance()
    rounding.add(strict.reference, logits(source, asked.windows[0]), asked.windows[0])
    if not rounding.relative < 1:  # overflow, say: there is nothing to be kept
        return distance.measured(name, _name(device), None), True
    tolerance = ROUNDING_MARGIN * max(rounding.relative, torch.finfo(dtype).eps)
    return distance.measured(name, _name(device), tolerance), distance.relative <= tolerance
