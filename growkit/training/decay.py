"""What decays, where nobody says otherwise."""

from __future__ import annotations

from functools import reduce
from typing import cast

from torch import nn


def decayed(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that transformers' ``Trainer`` lets decay: all but norms and biases.

    Args:
        model: as it is or wrapped; the names are those of its ``named_parameters``.
    """
    from transformers import Trainer

    # Nothing of a trainer is needed for this, whose function is a method for no other reason.
    paths = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    # Wrappers around all of a model (FSDP, checkpointing) leave themselves out of the names that
    # they give, but not of these paths. Of norms without weights there are paths to None.
    chosen = {id(reduce(getattr, path.split("."), model)) for path in paths}
    return frozenset(name for name, each in model.named_parameters() if id(each) in chosen)
