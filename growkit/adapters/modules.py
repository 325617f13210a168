"""The modules of a model's class, which adapters name, and the tensors in files behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from growkit.adapters.methods import COLUMNS, IN, OUT
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.class_weights import empty_model, stacks
from growkit.engine.loader import Conversion, loading
from growkit.engine.oracle import lacks_class


class Modules:
    """The parameters of a model's class, and the tensors in files that they are made of.

    Args:
        checkpoint: of the model; headers are enough.

    Attributes:
        tensors: the headers of the files.
        model: the class's model, without weights.
        stored: for each parameter the one whose tensor is in the files: another one, if it is tied.
        conversions: how transformers makes each of tensors.

    Raises:
        InputError: transformers has no class for it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if lacks_class(checkpoint.config):
            raise InputError(
                f"transformers has no class for the {checkpoint.config['model_type']} model in "
                f"{checkpoint.folder}, so that PEFT adapts none; leave out --adapter"
            )
        self.tensors = checkpoint.tensors
        self.conversions = {
            n: each for each in loading(checkpoint).conversions for n in each.shapes
        }
        self.model, _, stored = empty_model(checkpoint, torch.float32, "eager")
        self.stored = {n: stored(n) for n, _ in self.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def by_tensor(self) -> Mapping[str, str]:
        """The parameter that every tensor is, or is a part of."""
        made = self.conversions.items()
        return {tensor: name for name, each in made for tensor in each.sources}

    def conversion(self, parameter: str) -> Conversion | None:
        """How a parameter is made; None if there is no such parameter."""
        return self.conversions.get(self.stored.get(parameter, ""))

    def of_module(self, module: str, targets: Sequence[str], depth: int) -> str:
        """The parameter of a module that is adapted.

        Args:
            module: its name.
            targets: ``target_parameters``, each the end of a parameter's name. PEFT wraps a module
                once for each of its own, in the order of the class.
            depth: how many of the wraps are around the one that is meant.
        """
        own = (name for name in self.stored if name.rpartition(".")[0] == module)
        found = [name for name in own if any(f".{name}".endswith(f".{each}") for each in targets)]
        return found[-1 - depth] if depth < len(found) else f"{module}.weight"

    def places(self, parameter: str) -> dict[str, int]:
        """The dimensions of a matrix, or of that of each expert, by what goes along them."""
        module = self.model.get_submodule(parameter.rpartition(".")[0])
        turned = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
        reads = 0 if turned or getattr(module, "is_transposed", False) else 1
        return {IN: reads, OUT: 1 - reads, COLUMNS: 1}


def experts_of(made: Conversion) -> list[list[str]] | None:
    """The tensors of all experts that a parameter is made of: those of one matrix, then the next.

    None if transformers does not stack them, matrix below matrix.
    """
    if made.transform is None or not stacks(made):
        return None
    if any(each.dim != 1 for each in made.transform.operations[1:]):
        return None
    return [made.tensors[each] for each in made.transform.source_patterns if each in made.tensors]
