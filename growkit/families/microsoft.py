"""Microsoft's DIFF attention (arXiv 2410.05258) in a Llama skeleton.

The attention module of ``multihead_flashdiff_1.py`` and ``multihead_flashdiff_2.py``; the older
``multihead_diffattn.py`` is another function where key-value heads are fewer. There is no official
model around it: the skeleton's tensors have Llama's names, its config Llama's keys.
``num_attention_heads`` and ``num_key_value_heads`` count pairs, as the module does.

Queries and keys are striped (signal, noise, signal, noise, …), RoPE turns neighbours.

https://github.com/microsoft/unilm/tree/master/Diff-Transformer
"""

from __future__ import annotations

from growkit.algebra.axes import in_groups
from growkit.families.description import DiffForm, Multiple, Tensor
from growkit.families.diff_transformer import (
    HEADS_SHARE_KEYS,
    head_norm_weight,
    lambda_vectors,
    paper_lambda_init,
)
from growkit.families.family import Family
from growkit.families.llama import ATTENTION, MLP_WITHOUT_BIAS, SKELETON_AXES, skeleton
from growkit.families.llama import FAMILY as LLAMA

HEAD_NORM_EPS = 1e-5
QUERIES = Tensor(
    ATTENTION + "q_proj.weight",
    "signal_heads.head_dim + noise_heads.head_dim <- hidden",
    order=in_groups("signal_heads", "noise_heads", "head_dim", interleaved=True),
)
"""Striped: the noise heads of a group beside its signal heads."""

FAMILY = Family(
    name="Microsoft DIFF",
    model_types=("microsoft_diff",),
    loads_with="Microsoft's attention module in a Llama skeleton of yours; not transformers",
    axes={
        **SKELETON_AXES,
        "num_attention_heads": ("signal_heads",),
        "num_key_value_heads": ("kv_heads",),
        "head_dim": ("head_dim",),
    },
    same={"noise_heads": "signal_heads"},
    defaults={
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"] // 2,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
    },
    tensors=skeleton(
        (
            QUERIES,
            Tensor(
                ATTENTION + "k_proj.weight",
                "kv_heads.head_dim + kv_heads.head_dim <- hidden",
                order=in_groups("kv_heads", "kv_heads", "head_dim", interleaved=True),
            ),
            Tensor(ATTENTION + "v_proj.weight", "kv_heads.half.head_dim <- hidden"),
            Tensor(
                ATTENTION + "out_proj.weight",
                "hidden <- signal_heads.half.head_dim",
                canonical=ATTENTION + "o_proj.weight",
            ),
            *lambda_vectors(),
            head_norm_weight("subln"),
        ),
        MLP_WITHOUT_BIAS,
    ),
    constants={"half": 2},
    grouped=frozenset({"signal_heads", "noise_heads", "kv_heads"}),
    served={"signal_heads": ("noise_heads", "kv_heads"), "noise_heads": ("kv_heads",)},
    multiples=(
        Multiple("num_attention_heads", "num_key_value_heads", HEADS_SHARE_KEYS),
        Multiple("head_dim", "half", "because RoPE turns pairs"),
    ),
    recomputed=LLAMA.recomputed,
    duplicates=LLAMA.duplicates,
    form=DiffForm(
        switches={
            "lambda_type": "vectors",
            "noise_keys": "own",
            "head_norm": "affine",
            "head_norm_eps": HEAD_NORM_EPS,
            "head_output_scale": "one_minus_lambda_init",
            "integral": "none",
            "qk_projection": "full",
            "attention_bias": False,
            "mlp_bias": False,
        },
        lambda_init=paper_lambda_init,
    ),
)
