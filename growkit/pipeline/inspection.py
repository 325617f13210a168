"""Describe a checkpoint from its config and headers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.tensors import (
    TORCH_NAMES,
    Config,
    main_dtype,
    total_bytes,
    total_parameters,
)
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.inside import Inside
from growkit.engine.user_family import load_description, temporary_family
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import has_lambda_vectors, variant
from growkit.families.family import Family, stored_family
from growkit.pipeline.catalogue import possibilities
from growkit.planning.layouts import (
    LAMBDA_VECTORS,
    as_diff_transformer,
    is_differential,
    lambda_value,
)
from growkit.planning.operation import operations
from growkit.planning.plan import unused_tensors
from growkit.recipe.recipe import DEFAULT_METHOD
from growkit.results.inspection import Answer, Attention, Inspection, Possible
from growkit.sources import Source, find


def inspect(
    folder: str | Path, *, family: str | Path | Mapping[str, Any] | None = None
) -> Inspection:
    """Describe a model folder; of its data, only the vectors behind λ are read.

    Args:
        folder: the model's, or its name on the Hub; see ``growkit.grow``.
        family: see ``growkit.grow``.

    Raises:
        InputError: it is no checkpoint of a known family, or its tensors do not fit its config.
    """
    with temporary_family(load_description(family) if isinstance(family, str | Path) else family):
        return _inspected(find(folder))


def _inspected(source: Source) -> Inspection:
    checkpoint = source.open()
    family = stored_family(checkpoint)
    dropped, _ = unused_tensors(checkpoint, family)
    rest = checkpoint.dropped if isinstance(checkpoint, Inside) else {}
    complete = family.complete(checkpoint.config)
    architectures = checkpoint.config.get("architectures") or None
    used = {name: info for name, info in checkpoint.tensors.items() if name not in dropped}
    return Inspection(
        folder=source.name,
        family=family.name,
        model_class=str(architectures[0]) if isinstance(architectures, list) else None,
        config_sizes={key: complete[key] for key in family.axes_of(complete)},
        sizes={
            axis: size
            for axis, size in family.sizes(checkpoint.config).items()
            if axis not in family.constants
        },
        attention=_attention(checkpoint, family),
        parameters=total_parameters(used),
        bytes=total_bytes(used),
        dtype=TORCH_NAMES[main_dtype(used)],
        tied=bool(complete.get("tie_word_embeddings")),
        tensors=len(used),
        files=[file.name for file in checkpoint.files],
        dropped=dropped | rest,
        possible=[_possible(each) for each in possibilities(checkpoint)],
    )


def _possible(answer: Answer) -> Possible:
    verb, how = "grow", "--method"
    if answer.operation in operations("convert"):
        verb, how = "convert", "--to"
    words = [] if answer.operation == DEFAULT_METHOD else [how, answer.operation]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in answer.options.items()]
    assert answer.promise
    assert answer.becomes
    command = f"growkit {verb} SRC OUT {' '.join(words)}"
    return Possible(command=command, promise=answer.promise, becomes=answer.becomes)


def _attention(checkpoint: Checkpoint, family: Family) -> Attention | None:
    if not is_differential(family, checkpoint.config):
        return None
    config = DIFF.complete(as_diff_transformer(checkpoint.config, checkpoint.where()))
    sizes = DIFF.sizes(config)
    noise = sizes["noise_heads"]
    return Attention(
        variant=variant(config),
        signal_heads=sizes["signal_heads"],
        noise_heads=noise,
        kv_heads=sizes["kv_heads"],
        ratio=sizes["signal_heads"] // noise if noise else None,
        lambda_init=config["lambda_init"],
        lambda_value=_lambda(checkpoint, config) if has_lambda_vectors(config) else None,
    )


def _lambda(checkpoint: Checkpoint, config: Config) -> list[float]:
    """λ of every layer."""
    values = []
    for layer, lambda_init in enumerate(config["lambda_init"]):
        names = [f"model.layers.{layer}.self_attn.{vector}" for vector in LAMBDA_VECTORS]
        try:
            values.append(lambda_value([checkpoint.read(name) for name in names], lambda_init))
        except OverflowError:
            raise InputError(
                f"λ of a layer in {checkpoint.where()} overflows; its λ vectors are not usable"
            ) from None
    return values
