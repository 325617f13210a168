"""Motif: differential attention, grouped or not, in a Llama skeleton with PolyNorm.

Motif-2.6B has as many noise as signal heads and no ``num_noise_heads``; Motif-2-12.7B is grouped
(arXiv 2510.06949). Query heads form groups, each noise head after its signal heads; keys are
striped; λ_init counts layers from -1. Source: vLLM's and other public ports, as transformers does
not have the model.

https://huggingface.co/Motif-Technologies/Motif-2-12.7B-Base
"""

from __future__ import annotations

from dataclasses import replace

from growkit.algebra.axes import in_groups
from growkit.families.description import DiffForm, Multiple, is_set, linear
from growkit.families.diff_transformer import (
    DIFF_BASE,
    HEADS_SHARE_KEYS,
    SIGNAL_HEADS_SHARE_NOISE,
    head_norm_weight,
    lambda_vectors,
    paper_lambda_init,
    poly_norm,
)
from growkit.families.llama import ATTENTION, BASE, SKELETON_AXES, gated_mlp, skeleton

use_bias = is_set("use_bias")

FAMILY = replace(
    DIFF_BASE,
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
        "num_key_value_heads": BASE.defaults["num_key_value_heads"],
        "head_dim": BASE.defaults["head_dim"],
        "tie_word_embeddings": False,
        "use_bias": False,
        "rms_norm_eps": 1e-6,
        "attn_rms_norm_eps": 1e-5,
        "hidden_act": "poly_norm",
    },
    tensors=skeleton(
        (
            *linear(
                ATTENTION + "q_proj",
                "signal_heads.head_dim + noise_heads.head_dim <- hidden",
                use_bias,
                order=in_groups("signal_heads", "noise_heads", "head_dim"),
            ),
            *linear(
                ATTENTION + "k_proj",
                "kv_heads.head_dim + kv_heads.head_dim <- hidden",
                use_bias,
                order=in_groups("kv_heads", "kv_heads", "head_dim"),
            ),
            *linear(ATTENTION + "v_proj", "kv_heads.half.head_dim <- hidden", use_bias),
            *linear(ATTENTION + "o_proj", "hidden <- signal_heads.half.head_dim", use_bias),
            *lambda_vectors(),
            head_norm_weight("subln"),
        ),
        (*gated_mlp(use_bias), *poly_norm()),
    ),
    constants={"half": 2, "one": 1, "powers": 3},
    multiples=(
        SIGNAL_HEADS_SHARE_NOISE,
        Multiple("noise_heads", "kv_heads", HEADS_SHARE_KEYS),
    ),
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
