"""Phi-1 and Phi-2: one LayerNorm for attention and MLP, side by side; the head has a bias.

Phi-3 and Phi-4 have Llama's tensors, but queries, keys and values are one matrix, as are gate and
up.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/phi
https://github.com/huggingface/transformers/tree/main/src/transformers/models/phi3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.families.description import (
    Norm,
    Tensor,
    always,
    is_set,
    last_layer_norm,
    layer_norm,
    linear,
    untied,
)
from growkit.families.llama import ATTENTION, BASE, LAYER, MLP, attention, skeleton

NORM = Norm("hidden", "layer_norm_eps", centred=True)
HEAD_NORM = Norm("head_dim", "layer_norm_eps", centred=True)

_qk_norms = is_set("qk_layernorm")


def _check_head(config: Config, needed: bool, model: str) -> None:
    """Refuse heads that are not as wide as their share of hidden, where the class needs that."""
    if needed and config["head_dim"] != config["hidden_size"] // config["num_attention_heads"]:
        raise InputError(
            f"a {model} cannot have head_dim {config['head_dim']} with hidden_size "
            f"{config['hidden_size']} and {config['num_attention_heads']} heads; "
            "grow heads like hidden"
        )


def _check_long_rope(config: Config) -> None:
    """LongRoPE has one factor for each pair of a head's coordinates."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    has_factors = isinstance(rope, Mapping) and "short_factor" in rope
    _check_head(config, has_factors, "Phi-3 model with LongRoPE")


PHI = replace(
    BASE,
    name="Phi",
    model_types=("phi",),
    architecture="PhiForCausalLM",
    defaults={
        "num_key_value_heads": BASE.defaults["num_key_value_heads"],
        "head_dim": BASE.defaults["head_dim"],
        "tie_word_embeddings": False,
        "qk_layernorm": False,
        "layer_norm_eps": 1e-5,
    },
    tensors=(
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        *layer_norm(LAYER + "input_layernorm", NORM),
        *attention(always, always, "dense"),
        *layer_norm(ATTENTION + "q_layernorm", HEAD_NORM, _qk_norms, "head_dim"),
        *layer_norm(ATTENTION + "k_layernorm", HEAD_NORM, _qk_norms, "head_dim"),
        *linear(MLP + "fc1", "ffn <- hidden", always),
        *linear(MLP + "fc2", "hidden <- ffn", always),
        *last_layer_norm("model.final_layernorm", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
        Tensor("lm_head.bias", "vocab"),
    ),
    check=lambda config: _check_head(config, config["qk_layernorm"], "Phi model with qk_layernorm"),
)

PHI3 = replace(
    BASE,
    name="Phi-3",
    model_types=("phi3",),
    architecture="Phi3ForCausalLM",
    form=None,  # the DIFF Transformer has biases and factors of positions of its own
    defaults={**BASE.defaults, "rms_norm_eps": 1e-5},
    constants={"two": 2},
    tensors=skeleton(
        (
            *linear(
                ATTENTION + "qkv_proj",
                "heads.head_dim + kv_heads.head_dim + kv_heads.head_dim <- hidden",
            ),
            *linear(ATTENTION + "o_proj", "hidden <- heads.head_dim"),
        ),
        (
            *linear(MLP + "gate_up_proj", "two.ffn <- hidden"),
            *linear(MLP + "down_proj", "hidden <- ffn"),
        ),
    ),
    check=_check_long_rope,
)

FAMILIES = {"phi": PHI, "phi3": PHI3}
