"""Motif: differential attention, grouped or not, in a Llama skeleton with PolyNorm.

Motif-2.6B has as many noise as signal heads and no ``num_noise_heads``; Motif-2-12.7B is grouped
(arXiv 2510.06949). Query heads stand in groups, each noise head after its signal heads, keys are
striped, λ_init counts layers from -1. As read from vLLM's and other public ports; the model's own
code is no part of transformers.

https://huggingface.co/Motif-Technologies/Motif-2-12.7B-Base
"""

from __future__ import annotations

from growkit.algebra.axes import in_groups
from growkit.base.tensors import Config
from growkit.families.description import DiffForm, Multiple, Tensor
from growkit.families.diff_transformer import (
    HEADS_SHARE_KEYS,
    SIGNAL_HEADS_SHARE_NOISE,
    head_norm_weight,
    lambda_vectors,
    paper_lambda_init,
    poly_norm,
)
from growkit.families.family import Family
from growkit.families.llama import ATTENTION, SKELETON_AXES, gated_mlp, skeleton
from growkit.families.llama import FAMILY as LLAMA

QUERIES = "signal_heads.head_dim + noise_heads.head_dim"
KEYS = "kv_heads.head_dim + kv_heads.head_dim"
IN_GROUPS = in_groups("signal_heads", "noise_heads", "head_dim")
STRIPED_KEYS = in_groups("kv_heads", "kv_heads", "head_dim")


def use_bias(config: Config) -> bool:
    """Attention and MLP have biases."""
    return bool(config["use_bias"])


FAMILY = Family(
    name="Motif",
    model_types=("Motif", "motif"),
    architecture="MotifForCausalLM",
    loads_with="Motif's own code, or vLLM up to 0.10.2 (PolyNorm, as many noise as signal heads); "
    "not transformers",
    axes={
        **SKELETON_AXES,
        "num_noise_heads": ("noise_heads",),
        "num_attention_heads": ("signal_heads", "noise_heads"),
        "num_key_value_heads": ("kv_heads", "kv_heads"),
        "head_dim": ("head_dim",),
    },
    defaults={
        "num_noise_heads": lambda config: config["num_attention_heads"] // 2,
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "tie_word_embeddings": False,
        "use_bias": False,
        "rms_norm_eps": 1e-6,
        "attn_rms_norm_eps": 1e-5,
        "hidden_act": "poly_norm",
    },
    tensors=skeleton(
        (
            Tensor(ATTENTION + "q_proj.weight", f"{QUERIES} <- hidden", order=IN_GROUPS),
            Tensor(ATTENTION + "q_proj.bias", QUERIES, use_bias, order=IN_GROUPS),
            Tensor(ATTENTION + "k_proj.weight", f"{KEYS} <- hidden", order=STRIPED_KEYS),
            Tensor(ATTENTION + "k_proj.bias", KEYS, use_bias, order=STRIPED_KEYS),
            Tensor(ATTENTION + "v_proj.weight", "kv_heads.half.head_dim <- hidden"),
            Tensor(ATTENTION + "v_proj.bias", "kv_heads.half.head_dim", use_bias),
            Tensor(ATTENTION + "o_proj.weight", "hidden <- signal_heads.half.head_dim"),
            Tensor(ATTENTION + "o_proj.bias", "hidden", use_bias),
            *lambda_vectors(),
            head_norm_weight("subln"),
        ),
        (*gated_mlp(use_bias), *poly_norm()),
    ),
    constants={"half": 2, "one": 1, "powers": 3},
    grouped=frozenset({"signal_heads", "noise_heads", "kv_heads"}),
    served={"signal_heads": ("noise_heads", "kv_heads"), "noise_heads": ("kv_heads",)},
    multiples=(
        SIGNAL_HEADS_SHARE_NOISE,
        Multiple("noise_heads", "kv_heads", HEADS_SHARE_KEYS),
    ),
    recomputed=LLAMA.recomputed,
    duplicates=LLAMA.duplicates,
    form=DiffForm(
        switches={
            "lambda_type": "vectors",
            "noise_keys": "own",
            "head_norm": "affine",
            "head_output_scale": "one_minus_lambda_init",
            "integral": "none",
            "qk_projection": "full",
        },
        keys={
            "head_norm_eps": "attn_rms_norm_eps",
            "attention_bias": "use_bias",
            "mlp_bias": "use_bias",
        },
        lambda_init=lambda layer: paper_lambda_init(layer - 1),
        strict=False,
        harmless={
            "use_sliding_window": (False, None),
            "k_ratio": (1, None),
            "n_routed_experts": (None, 0),
            "num_experts": (None, 0),
            "q_lora_rank": (None,),
        },
    ),
)
