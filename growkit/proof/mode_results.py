"""Results of inference modes: those that ran one layer at a time, and those of whole models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, PlaceError, foreign, system_error
from growkit.base.limits import within
from growkit.base.settings import MAX_WHOLE_MODELS
from growkit.base.tensors import total_parameters
from growkit.base.units import size
from growkit.engine.metrics import error_of, finite
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import class_loss, load_model, longest_context, quiet
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.scratch import in_temporary
from growkit.planning.updates import other_loss
from growkit.proof.logits import Function
from growkit.proof.modes import GENERATE, LOSS, NO_NUMBERS, RELOAD, SHORT, Mode
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding, ModeResult, ModesSection


def modes_section(function: Function) -> ModesSection:
    """The section on inference modes.

    Args:
        function: what both models compute, with the modes that ran one layer at a time.
    """
    another = other_loss(function.pair.before, function.pair.after)
    results = [_result(function, mode) for mode in function.strict.modes]
    results += [*function.native.kernels, *run_whole_models(function, another)]
    return ModesSection(
        findings=[_finding(result) for result in results],
        notes=[another] if another else [],
        modes=results,
    )


def _result(function: Function, mode: Mode) -> ModeResult:
    """The result of a mode that ran one layer at a time, or was not tried."""
    exact, dtype = function.pair.exact, function.native.compared.dtype
    result = ModeResult(name=mode.name, tried=bool(mode.calls) or mode.failed, note=mode.note)
    if not mode.calls:
        result.kept = False if mode.failed and exact else None
        return result
    strict = function.strict.compared.distances[mode.name]
    native = function.native.compared.distances.get(mode.name)
    result.relative = finite(strict.relative)
    result.native = finite(native.relative) if native else None
    limit = function.native.limit if native and native.usable else None
    if native and not native.usable:
        silent = f"in {dtype} {NO_NUMBERS}"
        result.note = f"{mode.note}; {silent}" if mode.note else silent
    if exact:
        result.tolerance = function.strict.limit.largest
        result.native_tolerance = limit and limit.largest
        result.kept = within(strict.relative, result.tolerance) and (
            native is None or limit is None or within(native.relative, limit.largest)
        )
    return result


def _finding(result: ModeResult) -> Finding:
    """The finding on one inference mode."""
    note = result.note if result.tried else f"not tried: {result.note}"
    finding = Finding(
        name=result.name,
        kept=result.kept,
        sentence=f"{result.name}: {note}" if note else result.name,
        place=result.name if result.kept is False else None,
        measured=result.relative,
        limit=result.tolerance,
    )
    if result.name == LOSS:
        finding.verdict = "preserved, but its class returns another loss"
    return finding


NEW_TOKENS = 16
"""Number of tokens to generate."""


Load = Callable[[Checkpoint], Any]
"""Loads a whole model, once."""


def run_whole_models(function: Function, other_loss: str) -> list[ModeResult]:
    """Run whole models in strict float64.

    The target is saved and loaded again, both models generate, and their classes return losses.

    Args:
        function: what both models compute, one layer at a time.
        other_loss: why the losses may differ, although the logits may not; empty if they may not.
    """
    pair, tolerance = function.pair, None
    if pair.exact or pair.lineage.by_ties:
        tolerance = function.strict.limit.largest
    bytes_needed = 8 * sum(total_parameters(model.tensors) for model in (pair.before, pair.after))
    place = function.strict.side.place
    prompt = pair.prompts.windows[0][:SHORT].to(place)
    load = cache(partial(load_model, dtype=torch.float64, device=place, attention="eager"))
    results = []
    for name, run in {RELOAD: _save_and_reload, GENERATE: _generate, LOSS: _losses}.items():
        note = f"whole models of more than {size(MAX_WHOLE_MODELS)} in float64"
        result = ModeResult(name=name, tried=False, note=note)
        results.append(result)
        if bytes_needed <= MAX_WHOLE_MODELS:
            _try(result, partial(run, load, pair.before), pair, prompt, tolerance)
        if name != RELOAD and tolerance is None:
            result.kept = None
        elif name == LOSS and result.tried and result.kept is not False:
            why = other_loss or "new tokens have a part of the softmax" * pair.more_tokens
            result.note += f", since {why}" if why else ""
            result.tolerance = None if why else tolerance
            result.kept = None if why else within(result.relative, tolerance)
        elif result.kept and name == GENERATE and not within(result.relative, tolerance):
            # The class may load other weights than the files hold.
            result.kept, result.tolerance = False, tolerance
            result.note = f"as transformers loads them, the logits differ by {result.relative:.1e}"
    return results


def _try(
    result: ModeResult,
    run: Callable[[Checkpoint, Tensor], dict[str, Any]],
    pair: Pair,
    prompt: Tensor,
    tolerance: float | None,
) -> None:
    """Run a mode on the target; if that fails, also on the source, which may be the cause."""
    with strict_float64(), quiet():
        try:
            result.update(run(pair.after, prompt), tried=True)
        except InputError as error:
            if isinstance(error, PlaceError) or system_error(error):
                raise  # the target is not at fault
            result.note = str(error)
            with suppress(InputError):  # if the source fails, too, the target is not at fault
                run(pair.before, prompt)
                result.tried, result.kept = True, None if tolerance is None else False


def _save_and_reload(
    load: Load, before: Checkpoint, after: Checkpoint, prompt: Tensor
) -> dict[str, Any]:
    """Compare the weights after saving and loading, and measure the distance of the logits."""
    loaded = load(after)

    def reload(scratch: Path) -> dict[str, Any]:
        with _using(after, "save and reload"):
            expected = _logits(loaded, prompt)
            loaded.save_pretrained(scratch)
            again = load_model(scratch, torch.float64, prompt.device, "eager")
            actual = _logits(again, prompt)
        # Weights are compared exactly; for logits, new addresses may change the order of sums.
        read, written = again.state_dict(), loaded.state_dict()
        same = read.keys() == written.keys() and all(read[k].equal(written[k]) for k in read)
        note = "every weight comes back" if same else "weights change when transformers saves them"
        return {"note": note, "relative": finite(error_of(actual, expected)), "kept": same}

    return in_temporary("reload", reload, lambda result: result["kept"])


def _generate(load: Load, before: Checkpoint, after: Checkpoint, prompt: Tensor) -> dict[str, Any]:
    """Compare the greedy continuations of the prompt."""
    tokens = before.config["vocab_size"]
    both = ((load(checkpoint), checkpoint) for checkpoint in (after, before))
    (actual, one), (expected, other) = (_continue(*pair, prompt, tokens) for pair in both)
    relative = finite(error_of(actual, expected))
    if one == other:
        return {"note": f"the same {len(one)} tokens, greedily", "kept": True, "relative": relative}
    same = [*(a == b for a, b in zip(one, other, strict=False)), False].index(False)
    first = f"the first {same}" if same else "none"
    note = f"{first} of {len(other)} tokens are the same, greedily"
    return {"note": note, "kept": False, "relative": relative}


@torch.no_grad()
def _losses(load: Load, before: Checkpoint, after: Checkpoint, prompt: Tensor) -> dict[str, Any]:
    """Compare the losses that both classes return."""
    (expected, logits), (actual, _) = (
        class_loss(load(checkpoint), prompt) for checkpoint in (before, after)
    )
    # Rounding of logits changes a small loss by more than its own rounding.
    scale = max(abs(float(expected)), float(logits.square().mean().sqrt()))
    return {
        "note": f"{float(expected):.6f} → {float(actual):.6f} nats per token, as classes return it",
        "relative": finite(abs(float(actual - expected)) / scale),
    }


def _continue(
    loaded: Any, model: Checkpoint, prompt: Tensor, tokens: int
) -> tuple[Tensor, list[int]]:
    """Continue a prompt greedily, regardless of generation settings in the folder.

    Args:
        loaded: the model.
        model: its checkpoint.
        prompt: token ids, [tokens], on the device of the model.
        tokens: number of tokens to choose from, at the start of the vocabulary.

    Returns:
        The logits of the prompt, and the tokens that follow it.
    """
    from transformers import GenerationConfig

    longest, count = longest_context(model.config), NEW_TOKENS
    if isinstance(longest, int):  # positions beyond it may have no embedding
        prompt = prompt[: max(1, longest - NEW_TOKENS)]
        count = max(1, min(NEW_TOKENS, longest - len(prompt)))
    others = list(range(tokens, model.config["vocab_size"])) or None
    greedily = GenerationConfig(
        max_new_tokens=count, do_sample=False, pad_token_id=0, suppress_tokens=others
    )
    with _using(model, "generate"):
        logits = _logits(loaded, prompt)[:, :tokens]
        ids, everything = prompt[None], torch.ones_like(prompt[None])
        answer = loaded.generate(ids, attention_mask=everything, generation_config=greedily)
        continuation: list[int] = answer[0, len(prompt) :].tolist()
        return logits, continuation


def _using(model: Checkpoint, what: str) -> AbstractContextManager[None]:
    return foreign(f"transformers cannot {what}", f"the cause is the class of {model.folder}")


@torch.no_grad()
def _logits(model: nn.Module, prompt: Tensor) -> Tensor:
    logits: Tensor = model(prompt[None], use_cache=False).logits[0]
    return logits
