"""DiffLlama: differential attention (arXiv 2410.05258) in a Llama skeleton.

Queries and keys are stored blocked: all signal heads, then all noise heads. Values come as two
halves: output head i reads head ⌊i/r⌋ of each half, side by side, so the same key-value head names
a row block in both halves, and ``o_proj`` reads ``2 · head_dim`` values per signal head. The head
norm has no weight, and λ belongs to the layer, so neither grows.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/diffllama
"""

from __future__ import annotations

from growkit.algebra.axes import in_halves
from growkit.families.description import DiffForm, Multiple, Norm, Tensor
from growkit.families.diff_transformer import lambda_vectors, paper_lambda_init
from growkit.families.family import Family
from growkit.families.llama import (
    ATTENTION,
    MLP_WITHOUT_BIAS,
    SKELETON_AXES,
    attention_bias,
    skeleton,
)
from growkit.families.llama import FAMILY as LLAMA

QUERIES = "signal_heads.head_dim + noise_heads.head_dim"
KEYS = "kv_heads.head_dim + kv_heads.head_dim"
VALUES = "kv_heads.half.head_dim"
VALUE_HALVES = in_halves("kv_heads", "half", "head_dim")

FAMILY = Family(
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
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    },
    tensors=skeleton(
        (
            Tensor(ATTENTION + "q_proj.weight", f"{QUERIES} <- hidden"),
            Tensor(ATTENTION + "q_proj.bias", QUERIES, attention_bias),
            Tensor(ATTENTION + "k_proj.weight", f"{KEYS} <- hidden"),
            Tensor(ATTENTION + "k_proj.bias", KEYS, attention_bias),
            Tensor(ATTENTION + "v_proj.weight", f"{VALUES} <- hidden", order=VALUE_HALVES),
            Tensor(ATTENTION + "v_proj.bias", VALUES, attention_bias, order=VALUE_HALVES),
            Tensor(ATTENTION + "o_proj.weight", "hidden <- signal_heads.half.head_dim"),
            Tensor(ATTENTION + "o_proj.bias", "hidden", attention_bias),
            *lambda_vectors(),
        ),
        MLP_WITHOUT_BIAS,
    ),
    constants={"half": 2},
    norms=(Norm("head_dim", "rms_norm_eps"),),  # of heads
    grouped=frozenset({"signal_heads", "noise_heads", "kv_heads"}),
    served={"signal_heads": ("noise_heads", "kv_heads"), "noise_heads": ("kv_heads",)},
    multiples=(
        Multiple(
            "num_attention_heads",
            "num_key_value_heads",
            "because each key-value head serves a whole group of query heads",
        ),
    ),
    recomputed=LLAMA.recomputed,
    duplicates=LLAMA.duplicates,
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
