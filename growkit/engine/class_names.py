"""What the class of a model calls the tensors in its files."""

from __future__ import annotations

from typing import Any, cast

from growkit.checkpoint.outline import outlined
from growkit.checkpoint.tensors import Config, Weights


def class_names(weights: Weights, config: Config) -> dict[str, str]:
    """The tensor in the files of every parameter and buffer that is one of them as it is.

    Also of those that are tied to another one. Those that the class makes of several are left out,
    and so are all where transformers has no class.

    Args:
        weights: a checkpoint, which may be planned alone.
        config: what its ``config.json`` says.

    Raises:
        InputError: the checkpoint does not fit the class.
    """
    import torch

    from growkit.engine.building import empty_model
    from growkit.engine.class_weights import ClassWeights
    from growkit.engine.loader import loading
    from growkit.engine.oracle import lacks_class

    if lacks_class(config):
        return {}
    with outlined(weights, config) as outline:
        model, _, stored = empty_model(outline, torch.float32, "eager")
        of_class = ClassWeights(cast(Any, weights), loading(outline).conversions)
        found = {name: of_class.stored_as(stored(name)) for name in model.state_dict()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}
