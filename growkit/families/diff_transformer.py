"""The DIFF Transformer of ``growkit.modeling``: every variant of differential attention.

Signal heads come first in queries and keys, then noise heads; every value head is one block of
``value_head_dim`` rows. All other layouts of differential attention are read into this one.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.families.description import (
    DiffForm,
    Multiple,
    Norm,
    Tensor,
    When,
    always,
    is_set,
    linear,
)
from growkit.families.family import LISTS
from growkit.families.llama import (
    ATTENTION,
    BASE,
    MLP,
    SKELETON_AXES,
    attention_bias,
    gated_mlp,
    skeleton,
)
from growkit.families.sizes import Axes
from growkit.modeling import (
    ARCHITECTURE,
    AUTO_MAP,
    MODEL_TYPE,
    OLDEST_TRANSFORMERS,
    copy_code,
)

HEADS_SHARE_KEYS = "because each key-value head serves a whole group of heads"
SIGNAL_HEADS_SHARE_NOISE = Multiple(
    "signal_heads", "noise_heads", "because each noise head serves a whole group of signal heads"
)

MOST_LAYERS = 100_000
"""More are a typing error, not to be counted out."""

MOST_LAMBDA = 1e3
"""No λ_init is larger."""

MOST_MULTIPLIER = 1e30
"""No number of a config that something is multiplied by is larger."""

MULTIPLIERS = (
    "attention_multiplier",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
)
"""Numbers by which something is multiplied, or divided; likewise those of the class."""

HEAD_NORM = Norm("value_head_dim", "head_norm_eps")
QK_NORM = Norm("head_dim", "rms_norm_eps")

DEFAULTS: dict[str, Any] = {
    "num_noise_heads": lambda config: config["num_attention_heads"] // 2,
    "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
    "value_head_dim": lambda config: 2 * config["head_dim"],
    "lambda_type": "vectors",
    "lambda_std_dev": 0.1,
    "noise_keys": "own",
    "num_key_value_heads": lambda config: (
        (config["num_noise_heads"] or config["num_attention_heads"])
        * (2 if has_noise_keys(config) else 1)
    ),
    "lambda_init": lambda config: default_lambda_init(config),
    "rms_norm_eps": 1e-6,
    "head_norm": "affine",
    "head_norm_eps": lambda config: config["rms_norm_eps"],
    "head_output_scale": lambda config: (
        "one_minus_lambda_init" if has_lambda_vectors(config) else "none"
    ),
    "integral": "none",
    "gamma": "unified",
    "qk_projection": "full",
    "shared_scope": "head",
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "attention_output_bias": lambda config: config["attention_bias"],
    "mlp_bias": False,
    "qk_norm": False,
    "attention_multiplier": lambda config: config["head_dim"] ** -0.5,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
}
"""What ``DiffTransformerConfig`` assumes; a test holds the two against each other."""

OF_SOME = (
    "attention_output_bias",
    "qk_norm",
    *MULTIPLIERS,
)
"""Of these keys, those that some families have, and others compute without: as assumed here."""


CHOICES = {
    "lambda_type": ("vectors", "projected"),
    "noise_keys": ("own", "shared"),
    "head_norm": ("affine", "plain", "none"),
    "head_output_scale": ("one_minus_lambda_init", "none"),
    "integral": ("none", "causal", "column_mean"),
    "gamma": ("unified", "gated"),
    "qk_projection": ("full", "shared"),
    "shared_scope": ("head", "layer", "all_heads"),
}
"""The switches; likewise those of the class."""


def check_config(config: Config) -> None:
    """Refuse what the class would refuse, where no axis or switch says so.

    Raises:
        InputError: names what was expected.
    """
    check_lambda_init(config)
    if type(config["attention_output_bias"]) is not bool:
        raise InputError(
            "config.json of a DIFF Transformer has attention_output_bias "
            f"{config['attention_output_bias']!r}; true or false was expected"
        )
    for key in MULTIPLIERS:
        value = config[key]
        if type(value) not in (int, float) or not 0 < value < MOST_MULTIPLIER:
            raise InputError(
                f"config.json of a DIFF Transformer has {key} {value!r}; a number above 0 was "
                "expected"
            )


def check_lambda_init(config: Config) -> None:
    """Refuse λ_init that is not one finite number per layer, where it is needed.

    Raises:
        InputError: names what was expected.
    """
    needed = has_lambda_vectors(config) or config["head_output_scale"] != "none"
    found, layers = config.get("lambda_init"), config["num_hidden_layers"]
    if found is None and not needed:
        return
    if (
        not isinstance(found, list)
        or len(found) != layers
        or not all(type(each) in (int, float) and abs(each) < MOST_LAMBDA for each in found)
    ):
        raise InputError(
            f"config.json of a DIFF Transformer needs lambda_init as a list of {layers} numbers, "
            f"one per layer, but has {found!r}"
        )


def paper_lambda_init(layer: int) -> float:
    """λ_init as in arXiv 2410.05258, layers counted from 0: 0.8 - 0.6 · exp(-0.3 · layer)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


def default_lambda_init(config: Config) -> list[float] | None:
    """The paper's numbers, where λ comes from vectors."""
    if not has_lambda_vectors(config) or config["num_hidden_layers"] > MOST_LAYERS:
        return None
    return [paper_lambda_init(layer) for layer in range(config["num_hidden_layers"])]


def has_noise_heads(config: Config) -> bool:
    """It is no softmax attention."""
    return bool(config["num_noise_heads"])


def has_noise_keys(config: Config) -> bool:
    """Noise heads have keys of their own."""
    return has_noise_heads(config) and config["noise_keys"] == "own"


def has_lambda_vectors(config: Config) -> bool:
    """λ comes from four vectors."""
    return has_noise_heads(config) and config["lambda_type"] == "vectors"


def has_lambda_projection(config: Config) -> bool:
    """λ is projected from every token."""
    return has_noise_heads(config) and config["lambda_type"] == "projected"


def has_gamma_gate(config: Config) -> bool:
    """The integral has a gate."""
    return bool(config["integral"] != "none" and config["gamma"] == "gated")


def shared_queries(config: Config) -> bool:
    """Queries are shared bases and low-rank updates."""
    return has_noise_heads(config) and config["qk_projection"] == "shared"


def shared_keys(config: Config) -> bool:
    """Keys are shared bases and low-rank updates."""
    return has_noise_keys(config) and config["qk_projection"] == "shared"


def variant(config: Config) -> str:
    """What the attention of a (completed) config is called, from its switches."""
    signal = config["num_attention_heads"] - config["num_noise_heads"]
    if not has_noise_heads(config):
        return "softmax attention"
    words = []
    if config["qk_projection"] == "shared":
        words.append("Shared")
    if signal != config["num_noise_heads"]:
        words.append("grouped")
    words.append("DIFF" if config["integral"] == "none" else "DINT")
    if has_lambda_projection(config):
        words.append("V2" if config["noise_keys"] == "shared" else "with projected λ")
    if config["integral"] != "none":
        words.append(f"({config['integral'].replace('_', ' ')}, {config['gamma']} γ)")
    return " ".join(words)


def _key_value_axes(config: Config) -> Axes:
    return ("kv_heads", "kv_heads") if has_noise_keys(config) else ("kv_heads",)


def _rank_axes(config: Config) -> Axes:
    return ("rank",) if shared_queries(config) else ()


def _projection(name: str, heads: str, group: str, plain: Any, shared: Any) -> tuple[Tensor, ...]:
    """The tensors of ``q_proj`` or ``k_proj``, full or shared."""
    prefix = "model.layers.{layer}.self_attn." + name

    def scope(*scopes: str) -> Any:
        return lambda config: shared(config) and config["shared_scope"] in scopes

    rows = " + ".join(f"{head}.head_dim" for head in heads.split(" + "))
    updates = " + ".join(f"{head}.rank_{{layer}}" for head in heads.split(" + "))
    return (
        *linear(prefix, f"{rows} <- hidden", attention_bias, plain),
        Tensor(f"{prefix}.base.weight", f"{group}.head_dim <- hidden", scope("head", "layer")),
        Tensor(f"{prefix}.base.weight", "head_dim <- hidden", scope("all_heads")),
        Tensor(f"{prefix}.down.weight", f"{updates} <- hidden", scope("head", "all_heads")),
        Tensor(f"{prefix}.down.weight", "pair.rank_{layer} <- hidden", scope("layer")),
        *linear(f"{prefix}.up", f"{rows} <- rank_{{layer}}", attention_bias, shared),
    )


LAMBDA = tuple(f"lambda_{vector}" for vector in ("q1", "k1", "q2", "k2"))


def lambda_vectors(when: When = always) -> tuple[Tensor, ...]:
    """The four vectors behind λ."""
    return tuple(Tensor(ATTENTION + name, "head_dim", when) for name in LAMBDA)


def lambda_projection(when: When = always) -> Tensor:
    """What λ is projected with from every token."""
    name = ATTENTION + "lambda_proj.weight"
    return Tensor(name, "signal_heads <- hidden", when, component="attention")


def head_norm_weight(name: str) -> Tensor:
    """The weight of the head norm under another name, over both halves of a head."""
    return Tensor(
        f"{ATTENTION}{name}.weight", "half.head_dim", canonical=ATTENTION + "head_norm.weight"
    )


def poly_norm() -> tuple[Tensor, ...]:
    """The parameters of PolyNorm, for models that have it."""

    def has_poly_norm(config: Config) -> bool:
        return bool(config["hidden_act"] == "poly_norm")

    return (
        Tensor(MLP + "act_fn.weight", "powers", has_poly_norm, norm=Norm("ffn", None)),
        Tensor(MLP + "act_fn.bias", "one", has_poly_norm),
    )


DIFF_BASE = replace(
    BASE,
    grouped=frozenset({"signal_heads", "noise_heads", "kv_heads"}),
    served={"signal_heads": ("noise_heads", "kv_heads"), "noise_heads": ("kv_heads",)},
)
"""Common part of all families of differential attention; no family itself."""

FAMILY = replace(
    DIFF_BASE,
    name="DIFF Transformer",
    model_types=(MODEL_TYPE,),
    architecture=ARCHITECTURE,
    axes={
        **SKELETON_AXES,
        "num_noise_heads": ("noise_heads",),
        "num_attention_heads": ("signal_heads", "noise_heads"),
        "num_key_value_heads": _key_value_axes,
        "head_dim": ("head_dim",),
        "value_head_dim": ("value_head_dim",),
        "shared_rank": _rank_axes,
    },
    defaults=DEFAULTS,
    tensors=skeleton(
        (
            *_projection(
                "q_proj",
                "signal_heads + noise_heads",
                "noise_heads",
                lambda config: has_noise_heads(config) and not shared_queries(config),
                shared_queries,
            ),
            *_projection(
                "q_proj",
                "signal_heads",
                "signal_heads",
                lambda config: not has_noise_heads(config),
                lambda config: False,
            ),
            *_projection(
                "k_proj",
                "kv_heads + kv_heads",
                "kv_heads",
                lambda config: has_noise_keys(config) and not shared_keys(config),
                shared_keys,
            ),
            *_projection(
                "k_proj",
                "kv_heads",
                "kv_heads",
                lambda config: not has_noise_keys(config),
                lambda config: False,
            ),
            *linear(ATTENTION + "v_proj", "kv_heads.value_head_dim <- hidden", attention_bias),
            *linear(
                ATTENTION + "o_proj",
                "hidden <- signal_heads.value_head_dim",
                is_set("attention_output_bias"),
            ),
            Tensor(ATTENTION + "q_norm.weight", "head_dim", is_set("qk_norm"), norm=QK_NORM),
            Tensor(ATTENTION + "k_norm.weight", "head_dim", is_set("qk_norm"), norm=QK_NORM),
            *lambda_vectors(has_lambda_vectors),
            lambda_projection(has_lambda_projection),
            Tensor(ATTENTION + "gamma_gate", "one", has_gamma_gate),
            Tensor(
                ATTENTION + "head_norm.weight",
                "value_head_dim",
                lambda config: bool(config["head_norm"] == "affine"),
                norm=HEAD_NORM,
            ),
        ),
        (*gated_mlp(is_set("mlp_bias")), *poly_norm()),
    ),
    constants={"one": 1, "pair": 2, "powers": 3},
    norms=(HEAD_NORM,),  # where it has no weight
    former={"output_multiplier": "head_output_scale"},
    may_be_zero=frozenset({"num_noise_heads"}),
    per_layer=frozenset({"shared_rank"}),
    lists=LISTS | {"lambda_init"},
    multiples=(
        SIGNAL_HEADS_SHARE_NOISE,
        Multiple("signal_heads", "kv_heads", HEADS_SHARE_KEYS),
        Multiple("noise_heads", "kv_heads", HEADS_SHARE_KEYS),
    ),
    choices=CHOICES,
    check=check_config,
    loads_with=(
        f"transformers {OLDEST_TRANSFORMERS} or later with trust_remote_code=True (the code is "
        "next to the weights)"
    ),
    form=DiffForm(switches={}),
    auto_map=AUTO_MAP,
    write_code=copy_code,
)
