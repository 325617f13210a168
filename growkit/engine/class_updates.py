"""The law of updates under the names that a model class has for its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch

from growkit.checkpoint.reading import Checkpoint
from growkit.engine.class_weights import converted
from growkit.engine.loader import Conversion, loading
from growkit.engine.oracle import lacks_class
from growkit.planning.layouts import read_layout
from growkit.planning.update import Update
from growkit.planning.updates import stepped


def class_updates(checkpoint: Checkpoint, updates: Mapping[str, Update]) -> dict[str, Update]:
    """How the parameters of a model are updated, by the names that its class has for them.

    Args:
        checkpoint: of the model.
        updates: of all tensors in its files.
    """
    if lacks_class(checkpoint.config):
        return stepped(read_layout(checkpoint), updates)
    return {
        name: _made(checkpoint, name, conversion, updates)
        for conversion in loading(checkpoint).conversions
        for name in conversion.shapes
    }


def _made(
    checkpoint: Checkpoint, name: str, conversion: Conversion, updates: Mapping[str, Update]
) -> Update:
    """Of a parameter that transformers makes of tensors."""
    of = [updates[each] for each in conversion.sources]
    if conversion.transform is None or len({_numbers(each) for each in of}) == 1:
        return of[0]
    factors = {}
    for pattern, names in conversion.tensors.items():
        shapes = [checkpoint.tensors[each].shape for each in names]
        factors[pattern] = [
            torch.from_numpy(np.broadcast_to(updates[each].gradient, shape).copy())
            for each, shape in zip(names, shapes, strict=True)
        ]
    with torch._C.DisableTorchFunction():
        gradient = converted(conversion, factors)[name].numpy()
    rates = [each.rate for each in of]
    found = replace(of[0], n_in=len(rates) / sum(rates), n_out=1 / gradient, factor=1.0)
    return found if len(set(rates)) == 1 else found.because("its parts have different rates")


def _numbers(update: Update) -> tuple[object, ...]:
    """All that counts of an update that is the same everywhere in a tensor; else the update."""
    if update.n_out.size > 1:
        return (update,)
    return (update.rate, update.eps, update.new, update.why)
