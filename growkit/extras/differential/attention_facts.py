"""What ``growkit inspect`` says of differential attention."""

from growkit.base.tensors import Config
from growkit.extras.differential.diff_family import (
    ATTENTION,
    FAMILY,
    LAMBDA,
    has_lambda_vectors,
    variant,
)
from growkit.extras.differential.layouts import as_diff_transformer, is_differential, lambda_value
from growkit.extras.inspection.results.inspection_result import Attention
from growkit.model.model import Model


def describe_attention(model: Model) -> Attention | None:
    """Describe the attention of a model; None if it has no noise heads. Vectors of λ are read.

    Raises:
        InputError: the vectors cannot be read, or a DIFF Transformer cannot express the model.
    """
    if not is_differential(model.family, model.config):
        return None
    config = FAMILY.complete(as_diff_transformer(model.config, model.where()))
    sizes = FAMILY.sizes(config)
    noise_heads = sizes["noise_heads"]
    return Attention(
        variant=variant(config),
        signal_heads=sizes["signal_heads"],
        noise_heads=noise_heads,
        kv_heads=sizes["kv_heads"],
        ratio=sizes["signal_heads"] // noise_heads if noise_heads else None,
        lambda_init=config["lambda_init"],
        lambda_value=_lambda(model, config) if has_lambda_vectors(config) else None,
    )


def _lambda(model: Model, config: Config) -> list[float]:
    """λ of every layer."""
    values = []
    for layer, lambda_init in enumerate(config["lambda_init"]):
        prefix = ATTENTION.format(layer=layer)
        vectors = [model.read(f"{prefix}{vector}") for vector in LAMBDA]
        values.append(lambda_value(vectors, lambda_init, f"{prefix[:-1]} in {model.where()}"))
    return values
