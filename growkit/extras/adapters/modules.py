"""The modules of a model's class, which adapters name, and their tensors in files."""

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.engine.class_weights import empty_model, stacks
from growkit.engine.loader import Conversion, by_parameter, loading
from growkit.engine.transformers_class import require_class
from growkit.extras.adapters.adapter_folder import (
    COLUMNS,
    DEFAULT,
    IN,
    MERGE,
    OUT,
    AdapterFolder,
    own_alpha,
)
from growkit.model.checkpoint.reading import Checkpoint


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
        where = str(checkpoint.folder)
        require_class(checkpoint.config, where, "PEFT cannot adapt it; leave out --adapter")
        self.tensors = checkpoint.tensors
        self.conversions = by_parameter(loading(checkpoint).conversions)
        self.model, _, stored = empty_model(checkpoint, torch.float32)
        self.stored = {n: stored(n) for n in self.model.state_dict()}

    @cached_property
    def by_tensor(self) -> Mapping[str, str]:
        """The parameter to which every tensor belongs."""
        conversions = self.conversions.items()
        return {tensor: name for name, conversion in conversions for tensor in conversion.sources}

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
        adapted = [name for name in own if _ends(name, targets)]
        return adapted[-1 - depth] if depth < len(adapted) else f"{module}.weight"

    def places(self, parameter: str) -> dict[str, int]:
        """The dimension of each meaning in a matrix, or in the matrix of each expert."""
        module = self.model.get_submodule(parameter.rpartition(".")[0])
        transposed = isinstance(module, nn.Embedding) or type(module).__name__ == "Conv1D"
        reads = 0 if transposed or getattr(module, "is_transposed", False) else 1
        return {IN: reads, OUT: 1 - reads, COLUMNS: 1}


def experts_of(conversion: Conversion) -> list[list[str]] | None:
    """List the tensors of experts that a conversion stacks: for each matrix, those of all experts.

    None if the conversion does anything but stack experts, with one matrix below the other.
    """
    if conversion.transform is None or not stacks(conversion):
        return None
    if any(operation.dim != 1 for operation in conversion.transform.operations[1:]):
        return None
    return [
        conversion.tensors[pattern]
        for pattern in conversion.transform.source_patterns
        if pattern in conversion.tensors
    ]


class Adapted(NamedTuple):
    """An adapted parameter of the grown model.

    Attributes:
        origin: the parameter of the source from which it was grown.
        rank: rank of the update; None if it is not a product.
    """

    origin: str
    rank: int | None


BY_MODULE = ("exclude_modules", "layers_to_transform", "rank_pattern", "alpha_pattern")
"""Keys that choose among modules, or have settings for some of them."""


def retarget(folder: AdapterFolder, adapted: Mapping[str, Adapted], modules: Modules) -> Config:
    """Make the config of a grown adapter.

    It stays unchanged if it chooses the same modules; otherwise it lists their new names.

    Args:
        folder: the adapter of the source.
        adapted: see ``Assembly``.
        modules: the modules of the grown model.

    Raises:
        InputError: the choice cannot be expressed with the new names.
    """
    config, listed = folder.config, folder.config.get("target_parameters") or ()
    tied = any(name != held for name, held in modules.stored.items())
    by_tie = config.get("ensure_weight_tying") and not tied  # the head was chosen by its tie alone
    if all(name == target.origin for name, target in adapted.items()) and not by_tie:
        return config
    if not any(config.get(key) for key in BY_MODULE) and _chosen(config, modules) == adapted.keys():
        return config
    numbered = any(re.search(r"\d", name) for name in config.get("modules_to_save") or ())
    if numbered or "rank_pattern" not in folder.method.settings:
        raise InputError(
            f"the adapter in {folder.opened} names modules by the indices of layers, which change; "
            f"{MERGE}"
        )

    ranks, alphas, within, chosen = {}, {}, list[str](), list[str]()
    for parameter, target in adapted.items():
        by_parameter = _ends(target.origin, listed)  # else by module
        end = "" if by_parameter else ".weight"
        name = parameter.removesuffix(end)
        (within if by_parameter else chosen).append(name)
        if target.rank != config.get("r", DEFAULT):
            ranks[re.escape(name)] = target.rank
        alpha = own_alpha(config, target.origin.removesuffix(end))
        if alpha is not None:
            alphas[re.escape(name)] = alpha
    changed: Config = {"target_modules": chosen, "rank_pattern": ranks, "alpha_pattern": alphas}
    changed |= dict.fromkeys({*BY_MODULE[:2], "layers_pattern"})
    return {**config, **changed, **({"target_parameters": within} if listed else {})}


def _chosen(config: Config, modules: Modules) -> set[str]:
    """The parameters whose names end as a config's targets do, as in PEFT."""
    listed = config.get("target_modules")
    if not isinstance(listed, list):
        return set()
    named = {f"{name}.weight" for name, _ in modules.model.named_modules() if _ends(name, listed)}
    return named | {n for n in modules.stored if _ends(n, config.get("target_parameters") or ())}


def _ends(name: str, ends: Collection[str]) -> bool:
    return any(f".{name}".endswith(f".{end}") for end in ends)
