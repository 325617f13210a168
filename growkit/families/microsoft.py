"""Microsoft's DIFF attention (arXiv 2410.05258), and its V2, in a Llama skeleton.

V1 is the attention module of ``multihead_flashdiff_1.py`` and ``multihead_flashdiff_2.py``; the
older ``multihead_diffattn.py`` is another function where key-value heads are fewer. There is no
official model around either: the skeleton's tensors have Llama's names, its config Llama's keys.
``num_attention_heads`` and ``num_key_value_heads`` count pairs, as the module does. Queries (and
the keys of V1) are striped: signal, noise, signal, noise, …; RoPE turns neighbours.

V2 projects λ from every token, shares keys within a pair, and has no head norm.

https://github.com/microsoft/unilm/tree/master/Diff-Transformer
"""

from __future__ import annotations

from dataclasses import replace

from growkit.algebra.axes import head_by_head, in_groups
from growkit.families.description import DiffForm, Multiple, Tensor, linear
from growkit.families.diff_transformer import (
    DIFF_BASE,
    HEADS_SHARE_KEYS,
    head_norm_weight,
    lambda_projection,
    lambda_vectors,
    paper_lambda_init,
)
from growkit.families.llama import ATTENTION, BASE, SKELETON_AXES, gated_mlp, skeleton

QUERIES = Tensor(
    ATTENTION + "q_proj.weight",
    "signal_heads.head_dim + noise_heads.head_dim <- hidden",
    order=in_groups("signal_heads", "noise_heads", "head_dim", interleaved=True),
)
"""Striped: the noise heads of a group follow its signal heads."""

SWITCHES = {
    "integral": "none",
    "qk_projection": "full",
    "attention_bias": False,
    "mlp_bias": False,
}

MICROSOFT = replace(
    DIFF_BASE,
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
        "num_key_value_heads": BASE.defaults["num_key_value_heads"],
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
        gated_mlp(),
    ),
    constants={"half": 2},
    multiples=(
        Multiple("num_attention_heads", "num_key_value_heads", HEADS_SHARE_KEYS),
        Multiple("head_dim", "half", "because RoPE turns pairs"),
    ),
    form=DiffForm(
        switches={
            **SWITCHES,
            "lambda_type": "vectors",
            "noise_keys": "own",
            "head_norm": "affine",
            "head_norm_eps": 1e-5,
            "head_output_scale": "one_minus_lambda_init",
        },
        lambda_init=paper_lambda_init,
    ),
)

MICROSOFT_V2 = replace(
    MICROSOFT,
    name="Microsoft DIFF V2",
    model_types=("microsoft_diff_v2",),
    defaults={**MICROSOFT.defaults, "head_dim": BASE.defaults["head_dim"]},
    tensors=skeleton(
        (
            QUERIES,
            Tensor(
                ATTENTION + "k_proj.weight",
                "kv_heads.head_dim <- hidden",
                order=head_by_head("kv_heads", "head_dim", interleaved=True),
            ),
            *linear(ATTENTION + "v_proj", "kv_heads.head_dim <- hidden"),
            *linear(ATTENTION + "o_proj", "hidden <- signal_heads.head_dim"),
            lambda_projection(),
        ),
        gated_mlp(),
    ),
    form=DiffForm(
        switches={
            **SWITCHES,
            "lambda_type": "projected",
            "noise_keys": "shared",
            "head_norm": "none",
            "head_output_scale": "none",
        },
    ),
)

FAMILIES = {"microsoft": MICROSOFT, "microsoft_v2": MICROSOFT_V2}
