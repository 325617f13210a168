"""The DIFF Transformer: the parts of its family beyond the description.

``diff_transformer.yaml`` describes its tensors, sizes and switches.
"""

import math
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.model.families.family import shipped_family, with_code
from growkit.model.families.own_code import modeling_files

ATTENTION = "model.layers.{layer}.self_attn."

LAMBDA = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")
"""The four vectors behind λ."""

MAX_LAYERS = 100_000
"""Limit for the length of a default λ_init; a larger number of layers is a typing error."""

MAX_LAMBDA = 1e3
"""Limit for the absolute value of λ_init."""

OPTIONAL_KEYS = (
    *("attention_output_bias", "qk_norm", "attention_multiplier", "embedding_multiplier"),
    *("residual_multiplier", "logits_scaling"),
)
"""Keys that only some families have, with the value assumed for the rest."""


def check_config(config: Config) -> None:
    """Refuse configs that the class would refuse for reasons beyond axes and switches.

    λ_init must be one finite number per layer, where it is needed.

    Raises:
        InputError: names what was expected.
    """
    DESCRIBED.check(config)
    needed = has_lambda_vectors(config) or config["head_output_scale"] != "none"
    values, layers = config.get("lambda_init"), config["num_hidden_layers"]
    if values is None and not needed:
        return
    if (
        not isinstance(values, list)
        or len(values) != layers
        or not all(type(value) in (int, float) and abs(value) < MAX_LAMBDA for value in values)
    ):
        raise InputError(
            f"config.json of a DIFF Transformer needs lambda_init as a list of {layers} numbers, "
            f"one per layer, but has {values!r}"
        )


def default_lambda_init(config: Config) -> list[float] | None:
    """λ_init of arXiv 2410.05258, with layers counted from 0; None if λ has no vectors."""
    if not has_lambda_vectors(config) or config["num_hidden_layers"] > MAX_LAYERS:
        return None
    return [0.8 - 0.6 * math.exp(-0.3 * layer) for layer in range(config["num_hidden_layers"])]


def has_lambda_vectors(config: Config) -> bool:
    """Whether λ comes from four vectors."""
    return bool(config["num_noise_heads"] and config["lambda_type"] == "vectors")


def variant(config: Config) -> str:
    """Name of the attention of a (completed) config, from its switches."""
    signal = config["num_attention_heads"] - config["num_noise_heads"]
    if not config["num_noise_heads"]:
        return "softmax attention"
    words = []
    if config["qk_projection"] == "shared":
        words.append("Shared")
    if signal != config["num_noise_heads"]:
        words.append("grouped")
    words.append("DIFF" if config["integral"] == "none" else "DINT")
    if config["lambda_type"] == "projected":
        words.append("V2" if config["noise_keys"] == "shared" else "with projected λ")
    if config["integral"] != "none":
        words.append(f"({config['integral'].replace('_', ' ')}, {config['gamma']} γ)")
    return " ".join(words)


DESCRIBED = shipped_family("diff_transformer")

FAMILY = with_code(
    replace(
        DESCRIBED,
        defaults={
            **DESCRIBED.defaults,
            "lambda_init": default_lambda_init,
            "attention_multiplier": lambda config: config["head_dim"] ** -0.5,
        },
        check=check_config,
    ),
    modeling_files()["diff_transformer"],
    oldest="4.57",  # the config repeats it
)
