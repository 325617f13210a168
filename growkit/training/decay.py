"""What decays, where nobody says otherwise."""

from __future__ import annotations

from typing import cast

from torch import nn


def decayed(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that transformers' ``Trainer`` lets decay: all but norms and biases.

    Args:
        model: as it is or wrapped; the names are those of its ``named_parameters``.
    """
    from transformers import Trainer

    # Nothing of a trainer is needed for this, whose function is a method for no other reason.
    return frozenset(Trainer.get_decay_parameter_names(cast(Trainer, None), model))
