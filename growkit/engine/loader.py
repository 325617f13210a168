"""Determine how transformers would load a folder, by running its loader without weights.

``from_pretrained`` runs up to the point where it would read weights. The class, the config, the
files and the parameter names of their tensors are therefore its own, and no weight is read, however
large the model. Folders that transformers would read differently from growkit are refused here.
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from growkit.base.errors import InputError, foreign
from growkit.base.tensors import TORCH_NAMES, Config, main_dtype
from growkit.engine.transformers_class import inert, parsed, quiet
from growkit.engine.transformers_internals import (
    Trace,
    causal_class,
    trace_loading,
    watched_conversions,
)
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.reading import Checkpoint, View
from growkit.model.families.family_parts import without_keys
from growkit.planning.own_class import config_as_loaded, substitute

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
"""Config keys for the number of layers."""

LOADING_KEYS = frozenset({"dtype", "_name_or_path", "architectures"}) | {
    *("transformers_weights", "auto_map", "transformers_version")
}
"""Config keys that depend on how the config was loaded."""


@dataclass
class Conversion:
    """A conversion of transformers from tensors in the files to parameters and buffers.

    Attributes:
        transform: the transformers object; None if a tensor is only renamed.
        name: name of the parameter under which transformers collects the tensors.
        model: the model without weights, whose shapes some transforms need.
        tensors: names in the files, in order of collection, by the transform's pattern.
        shapes: shapes of the results, by their names in the class.
    """

    transform: Any
    name: str
    model: Any
    tensors: dict[str, list[str]] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        """The names of all tensors."""
        return [tensor for names in self.tensors.values() for tensor in names]


def by_parameter(conversions: Iterable[Conversion]) -> dict[str, Conversion]:
    """The conversion that makes each parameter and buffer, by its name in the class."""
    return {name: conversion for conversion in conversions for name in conversion.shapes}


@dataclass(frozen=True)
class Loading:
    """How transformers loads a folder.

    Attributes:
        model: name of the class.
        config: ``config.json`` as the class resolves it.
        conversions: conversions from the files to the class's parameters and persistent buffers.
        buffers: tensors in the files that become persistent buffers, by their names in the class.
        unread: tensors in the files that transformers does not read.
        made_buffers: persistent buffers that no file holds; the class computes them.
        own_class: whether transformers has the class; otherwise it is growkit's own.
    """

    model: str
    config: Config
    conversions: tuple[Conversion, ...] = ()
    buffers: Mapping[str, str] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    made_buffers: frozenset[str] = frozenset()
    own_class: bool = True


_loadings: WeakKeyDictionary[Checkpoint, Loading] = WeakKeyDictionary()
"""Results of ``loading`` by checkpoint, since a proof builds its model several times."""


def loading(checkpoint: Checkpoint) -> Loading:
    """Determine how transformers would load a checkpoint.

    Raises:
        InputError: transformers would read other data than growkit, run code or follow references
            in the folder, or cannot load the folder at all.
    """
    if checkpoint not in _loadings:
        _loadings[checkpoint] = _examine(checkpoint)
    return _loadings[checkpoint]


def _examine(checkpoint: Checkpoint) -> Loading:
    checkpoint.opened.check_loaded()
    inert(checkpoint.config, str(checkpoint.folder / "config.json"))
    for key in LAYERS:
        layers = checkpoint.config.get(key)
        if isinstance(layers, int) and layers > max(len(checkpoint.tensors), 1):
            raise InputError(
                f"config.json in {checkpoint.folder} has {key} {layers}, but there are only "
                f"{len(checkpoint.tensors)} tensors; correct it or add the missing tensors"
            )
    folder, lacking = checkpoint.folder, substitute(checkpoint.config) is not None
    with (
        quiet(),
        foreign(f"transformers cannot load {folder}", "correct its config.json or its weights"),
    ):
        config = parsed(config_as_loaded(checkpoint.config, str(folder)))
        if lacking and checkpoint.config.get("transformers_weights") is not None:
            config.transformers_weights = checkpoint.config["transformers_weights"]
        check_class(config, str(folder))
        (model, files, missing), conversions = _trace_loading(checkpoint, config, lacking)
        resolved = config.to_dict()
        _check_config(checkpoint, resolved, model)
    _check_files(checkpoint, files)
    if lacking:
        return Loading(type(model).__name__, resolved, own_class=False)
    buffers = {name for name, _ in model.named_buffers()}
    held = {
        n: conversion.sources[0]
        for conversion in conversions
        for n in conversion.shapes.keys() & buffers
    }
    read = {tensor for conversion in conversions for tensor in conversion.sources}
    return Loading(
        type(model).__name__,
        resolved,
        conversions,
        held,
        unread=tuple(sorted(checkpoint.tensors.keys() - read)),
        made_buffers=frozenset(missing & buffers),
    )


def check_class(config: Any, where: str) -> None:
    """Refuse a transformers config whose type has no causal language model."""
    if causal_class(config) is None:
        raise InputError(
            f"{where} is a model of type {config.model_type}, for which transformers has no causal "
            "language model; choose another model"
        )


def _check_config(checkpoint: Checkpoint, resolved: Config, model: Any) -> None:
    """Check that growkit's proof and the loader resolve ``config.json`` alike."""
    both = (without_keys(config, LOADING_KEYS) for config in (resolved, model.config.to_dict()))
    ours, theirs = (config.get("text_config", config) for config in both)
    for key in sorted((ours.keys() | theirs.keys()) - checkpoint.nested_keys):
        if ours.get(key) != theirs.get(key):
            raise InputError(
                f"transformers resolves {key} in the config.json of {checkpoint.folder} to "
                f"{theirs.get(key)!r}, not {ours.get(key)!r}; correct it"
            )


def dequantisations(checkpoint: View, settings: Config) -> tuple[Conversion, ...]:
    """Determine how transformers itself would dequantise a checkpoint while it loads.

    Shapes of dequantised parameters are left out.

    Args:
        checkpoint: the checkpoint, read as a dense one.
        settings: the ``quantization_config`` that makes transformers dequantise.

    Raises:
        Exception: any exception of transformers, or of the library that it needs.
    """
    config = parsed(checkpoint.config)
    config.quantization_config = settings
    dtype = getattr(torch, TORCH_NAMES[main_dtype(checkpoint.tensors)])
    with quiet():
        return _trace_loading(checkpoint.stored, config, lacking=False, dtype=dtype)[-1]


def _trace_loading(
    checkpoint: Checkpoint, config: Any, lacking: bool, dtype: torch.dtype | None = None
) -> tuple[Trace, tuple[Conversion, ...]]:
    """Load a folder without its weights, and record what would be read.

    Args:
        checkpoint: the checkpoint in the folder.
        config: the config of the folder, as transformers resolves it.
        lacking: whether transformers has no class for the model, which loads as growkit's own.
        dtype: dtype of dequantised weights; None for a dense checkpoint.

    Returns:
        What would be read, and the conversions.
    """
    from transformers import AutoModelForCausalLM

    cls: Any = causal_class(config) if lacking else AutoModelForCausalLM
    # transformers reads the folder's config itself, unless that is not the one to load with.
    own = checkpoint.stands_alone and not lacking and dtype is None
    options: dict[str, Any] = {} if own else {"config": config}
    folder: Path | None = checkpoint.folder
    if not checkpoint.format.read_by_transformers:  # which gets no files
        cls = causal_class(config)
        folder, options["state_dict"] = None, {}
    conversions: dict[int, Conversion] = {}

    def load() -> None:
        cls.from_pretrained(
            folder,
            dtype=dtype or torch.float32,  # else it is read from the weights
            attn_implementation="eager",
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # reported when the model is built
            **options,
        )

    def tensors() -> dict[str, torch.Tensor]:
        return {
            name: torch.empty(info.shape, dtype=info.torch_dtype, device="meta")
            for name, info in checkpoint.tensors.items()
        }

    def refuse(*_: Any) -> NoReturn:
        raise InputError(f"{checkpoint.folder} holds shards of a distributed checkpoint")

    recording = partial(_recording_conversions, checkpoint, conversions)
    with _limited_modules(len(checkpoint.tensors)):
        trace = trace_loading(load, tensors, recording, refuse)
    return trace, tuple(conversions.values())


@contextmanager
def _recording_conversions(
    checkpoint: Checkpoint, conversions: dict[int, Conversion], model: Any
) -> Iterator[None]:
    """Record the conversion of each tensor, and the shapes of the results."""
    from transformers.core_model_loading import WeightRenaming

    def add_tensor(transform: Any, name: str, tensor: str, pattern: str) -> None:
        conversion = conversions.setdefault(id(transform), Conversion(transform, name, model))
        # The pattern of an unconverted tensor is its name.
        if pattern not in transform.source_patterns:
            both = sorted([conversion.sources[0], tensor])
            raise InputError(
                f"{' and '.join(both)} in {checkpoint.folder} are both loaded as {name} by "
                "transformers, which keeps only one of them; remove the other"
            )
        conversion.tensors.setdefault(pattern, []).append(tensor)

    def add_shapes(transform: Any, converted: Mapping[str, Any]) -> None:
        shapes = conversions[id(transform)].shapes
        shapes |= {name: tuple(the_tensor(value).shape) for name, value in converted.items()}

    def needs_numbers(transform: Any) -> bool:
        return any(map(dequantises, transform.operations))

    with watched_conversions(add_tensor, add_shapes, needs_numbers):
        yield
    for recorded in conversions.values():
        if isinstance(recorded.transform, WeightRenaming):
            recorded.transform = None
            recorded.shapes = {recorded.name: checkpoint.tensors[recorded.sources[0]].shape}


def dequantises(operation: Any) -> bool:
    """Whether an operation of transformers dequantises each tensor on its own."""
    return hasattr(operation, "hf_quantizer")


def the_tensor(converted: Any) -> torch.Tensor:
    """The tensor that a conversion makes, which may be wrapped in a list."""
    tensor: torch.Tensor = converted[0] if isinstance(converted, list) else converted
    return tensor


def _limited_modules(tensors: int) -> RemovableHandle:
    """Limit the number of modules in this context, lest a wrong size builds them for hours."""
    limit, numbers = 1000 + 100 * tensors, count(1)

    def check_number(*_: Any) -> None:
        if next(numbers) > limit:
            raise InputError(
                f"config.json asks for a model of more than {limit:,} modules, but there are only "
                f"{tensors:,} tensors; correct its sizes"
            )

    return register_module_module_registration_hook(check_number)


def _check_files(checkpoint: Checkpoint, files: list[str]) -> None:
    """Check that transformers and growkit read weights from the same files."""
    if not checkpoint.format.read_by_transformers:
        return
    theirs = {os.path.realpath(file) for file in files}
    ours = {os.path.realpath(file) for file in checkpoint.files}
    if theirs == ours:
        return
    read = [", ".join(sorted(Path(file).name for file in files)[:3]) for files in (theirs, ours)]
    raise InputError(
        f"transformers reads the weights of {checkpoint.folder} from {read[0]}, growkit "
        f"from {read[1]}; keep only model.safetensors, or the shards that its index "
        "lists, and no transformers_weights in config.json"
    )


def generation(folder: Folder) -> Config | None:
    """Generation settings with transformers' defaults; None if transformers cannot resolve them.

    They come from ``generation_config.json`` if it exists, else from ``config.json``.
    """
    from transformers import GenerationConfig

    own = folder.has("generation_config.json")
    name = "generation_config.json" if own else "config.json"
    why = "the settings of generation are not understood"
    with quiet(), suppress(InputError), foreign(why, "correct them"):
        content = folder.json(name) if own or folder.has(name) else {}
        stated = deepcopy(content) | ({} if own else {"_from_model_config": True})
        resolved: Config = GenerationConfig.from_dict(stated).to_dict()
        return resolved
    return None
