"""DiffLlama: differential attention (arXiv 2410.05258) in a Llama skeleton.

Queries and keys are stored blocked: all signal heads, then all noise heads. Values are two halves:
output head i reads head ⌊i/r⌋ of each half, concatenated, so a key-value head names a row block in
both halves, and ``o_proj`` reads ``2 · head_dim`` values per signal head. The head norm has no
weight, and λ belongs to the layer, so neither grows.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/diffllama
"""

from __future__ import annotations

from dataclasses import replace

from growkit.algebra.axes import in_halves
from growkit.families.description import DiffForm, Norm, linear
from growkit.families.diff_transformer import (
    DIFF_BASE,
    lambda_vectors,
    paper_lambda_init,
)
from growkit.families.llama import (
    ATTENTION,
    BASE,
    SKELETON_AXES,
    attention_bias,
    gated_mlp,
    skeleton,
)

FAMILY = replace(
    DIFF_BASE,
    name="DiffLlama",
    model_types=("diffllama",),
    architecture="DiffLlamaForCausalLM",
    axes={
        **SKELETON_AXES,
        "num_attention_heads": ("signal_heads", "noise_heads"),
        "num_key_value_heads": ("kv_heads", "kv_heads"),
        "head_dim": ("head_dim",),
    },
    defaults={
        "num_key_value_heads": BASE.defaults["num_key_value_heads"],
        "head_dim": BASE.defaults["head_dim"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
    tensors=skeleton(
        (
            *linear(
                ATTENTION + "q_proj",
                "signal_heads.head_dim + noise_heads.head_dim <- hidden",
                attention_bias,
            ),
            *linear(
                ATTENTION + "k_proj",
                "kv_heads.head_dim + kv_heads.head_dim <- hidden",
                attention_bias,
            ),
            *linear(
                ATTENTION + "v_proj",
                "kv_heads.half.head_dim <- hidden",
                attention_bias,
                order=in_halves("kv_heads", "half", "head_dim"),
            ),
            *linear(ATTENTION + "o_proj", "hidden <- signal_heads.half.head_dim", attention_bias),
            *lambda_vectors(),
        ),
        gated_mlp(),
    ),
    constants={"half": 2},
    norms=(Norm("head_dim", "rms_norm_eps"),),  # of heads
    multiples=BASE.multiples,
    form=DiffForm(
        switches={
            "lambda_type": "vectors",
            "noise_keys": "own",
            "head_norm": "plain",
            "head_output_scale": "one_minus_lambda_init",
            "integral": "none",
            "qk_projection": "full",
            "mlp_bias": False,
        },
        keys={"head_norm_eps": "rms_norm_eps"},
        lambda_init=paper_lambda_init,
    ),
)
