"""Proof of an adapter: the target with its adapter computes the same as the source with its own.

The tensors of the source's adapter must be recovered bit for bit, and the grown config must be the
one that growkit writes. Then both models run with their adapters in PEFT, one layer at a time in
strict float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from growkit.adapters.applied import AdaptedWeights
from growkit.adapters.folder import AdapterFolder
from growkit.adapters.growing import Adapter
from growkit.adapters.modules import Modules
from growkit.adapters.tensors import AdapterTensors
from growkit.base.errors import InputError
from growkit.base.limits import Limit, rounded_sum, strict_limit, within
from growkit.checkpoint.folder import ADAPTER, ADAPTER_FOLDER
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise, Stage
from growkit.engine.metrics import Distance, distance_of, finite
from growkit.engine.strict import strict_float64
from growkit.proof.control import Probe
from growkit.proof.fingerprint import widest
from growkit.proof.weights import Origin, compare_weights
from growkit.results.proof import Finding

NAME = "adapter"

OF_FOLDERS = ("base_model_name_or_path", "revision")
"""Config keys that name the model's folder."""


def prove_adapter(
    before: Checkpoint,
    after: Checkpoint,
    origin: Origin,
    path: Path,
    prompt: Tensor,
    device: torch.device,
    limit: Limit | None,
) -> Finding:
    """Compare source and target, each with its adapter.

    Args:
        before: the source.
        after: the target, with the grown adapter in its folder.
        origin: how the target was made.
        path: the adapter of the source.
        prompt: token ids, [tokens].
        device: device that both run on.
        limit: limit for the models without adapters, if the promise is not *exact*.

    Raises:
        InputError: there is no adapter, or PEFT does not accept it.
    """
    inside = after.folder / ADAPTER_FOLDER
    if not inside.exists():
        raise InputError(
            f"{after.folder} has no folder {ADAPTER_FOLDER} to compare with {path}; leave out "
            "--adapter, or grow the model with it"
        )
    if origin.unknown:
        raise InputError(
            f"{inside} can be compared with {path} only if it is known how it was made, but "
            f"{origin.unknown}; leave out --adapter"
        )
    planned, written = Adapter(path, before, origin.lineage, ""), AdapterFolder(inside)
    lost = compare_weights(Origin(planned.lineage), AdapterTensors(written, Modules(after))).lost
    if lost or _settings(planned.config) != _settings(written.config):
        does = "does not recover the source's adapter" if lost else "is not what growkit writes"
        place = lost or f"{ADAPTER_FOLDER}/{ADAPTER}"
        return Finding(name=NAME, kept=False, sentence=f"{place} {does}", place=place)
    exact = origin.lineage.promise == "exact"
    found, probe = _run((before, planned.of_class), (after, written), prompt, device, exact=exact)
    own = strict_limit(probe.rounding.relative)
    largest = own.largest if exact else limit and limit.largest
    kept = within(found.relative, largest)
    sentence = f"with the adapter, they differ by {found.relative:.1e}"
    if within(probe.control.relative, own.largest):
        kept, sentence = (
            False,
            f"with the adapter, a deliberate fault ({probe.fault}) went unnoticed",
        )
    return Finding(
        name=NAME, kept=kept, sentence=sentence, measured=finite(found.relative), limit=largest
    )


def _settings(config: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in OF_FOLDERS}


def _run(
    before: tuple[Checkpoint, AdapterFolder],
    after: tuple[Checkpoint, AdapterFolder],
    prompt: Tensor,
    device: torch.device,
    *,
    exact: bool,
) -> tuple[Distance, Probe]:
    """Measure the distance between the logits, and the noise and the control that judge it."""
    tokens = before[0].config["vocab_size"]
    more = tokens if after[0].config["vocab_size"] > tokens else None
    call, noise = Call(prompt), rounded_sum(widest(before[0]))
    probe = Probe(call, noise, against_itself=not exact, wanted=False, only="default")
    with strict_float64():
        source, target = (
            Layerwise(AdaptedWeights(*each), torch.float64, device, None, most)
            for each, most in ((before, None), (after, more))
        )
        ends = (
            _end(probe.disturb(source.stages([call]))),
            _end(probe.spoil(target.stages([call]), 0, 0)),
        )
        with source.head() as one, target.head() as other:
            probe.measure((one, other), ends, (call, ends[0]))
            return distance_of((one, ends[:1]), (other, ends[1:]), [prompt]), probe


def _end(stages: Iterator[Stage]) -> Tensor:
    """The output of the last layer."""
    for stage in stages:
        end = stage.after[0]
    return end
