"""The modules of a model's class, which adapters name, and their tensors in files."""

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
    """The parameters of a model's class, and their tensors in files.

    Args:
        checkpoint: the model; headers are enough.

    Attributes:
        tensors: headers of the tensors in files.
        model: the transformers model, without weights.
        stored: for each parameter, the one that is in the files; tied parameters share one.
        conversions: transformers' conversion for each parameter in the files.

    Raises:
        InputError: transformers has no class for the model.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        if lacks_class(checkpoint.config):
            raise InputError(
                f"transformers has no class for the {checkpoint.config['model_type']} model in "
                f"{checkpoint.folder}, so PEFT cannot adapt it; leave out --adapter"
            )
        self.tensors = checkpoint.tensors
        self.conversions = {
            n: each for each in loading(checkpoint).conversions for n in each.shapes
        }
        self.model, _, stored = empty_model(checkpoint, torch.float32, "eager")
        self.stored = {n: stored(n) for n, _ in self.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def by_tensor(self) -> Mapping[str, str]:
        """The parameter to which every tensor belongs."""
        made = self.conversions.items()
        return {tensor: name for name, each in made for tensor in each.sources}

    def conversion(self, parameter: str) -> Conversion | None:
        """The conversion that makes a parameter; None if there is no such parameter."""
        return self.conversions.get(self.stored.get(parameter, ""))

    def of_module(self, module: str, targets: Sequence[str], depth: int) -> str:
        """The adapted parameter of a module.

        Args:
            module: name of the module.
            targets: ``target_parameters``, which are suffixes of parameter names. PEFT wraps a
                module once for each of its targets, in the order of the class.
            depth: number of wrappers around the wrapper in question.
        """
        own = (name for name in self.stored if name.rpartition(".")[0] == module)
        found = [name for name in own if any(f".{name}".endswith(f".{each}") for each in targets)]
        return found[-1 - depth] if depth < len(found) else f"{module}.weight"

    def places(self, parameter: str) -> dict[str, int]:
        """The dimension of each meaning in a matrix, or in the matrix of each expert."""
        module = self.model.get_submodule(parameter.rpartition(".")[0])
        transposed = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
        reads = 0 if transposed or getattr(module, "is_transposed", False) else 1
        return {IN: reads, OUT: 1 - reads, COLUMNS: 1}


def experts_of(made: Conversion) -> list[list[str]] | None:
    """List the tensors of experts that a conversion stacks: for each matrix, those of all experts.

    None if the conversion does anything but stack experts, with one matrix below the other.
    """
    if made.transform is None or not stacks(made):
        return None
    if any(each.dim != 1 for each in made.transform.operations[1:]):
        return None
    return [made.tensors[each] for each in made.transform.source_patterns if each in made.tensors]
