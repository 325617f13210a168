"""Microsoft's DIFF attention V2 in a Llama skeleton: λ from every token, keys shared, no head norm.

``num_attention_heads`` counts heads with an output, as the module does; there are twice as many
queries, striped (signal, noise, …), and both heads of a pair read the same key and value. RoPE
turns neighbours. As in ``microsoft.py``, there is no official model around the module.

https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2
"""

from __future__ import annotations

from dataclasses import replace

from growkit.algebra.axes import head_by_head
from growkit.families.description import DiffForm, Tensor
from growkit.families.diff_transformer import lambda_projection
from growkit.families.llama import ATTENTION, MLP_WITHOUT_BIAS, skeleton
from growkit.families.microsoft import FAMILY as MICROSOFT
from growkit.families.microsoft import QUERIES

FAMILY = replace(
    MICROSOFT,
    name="Microsoft DIFF V2",
    model_types=("microsoft_diff_v2",),
    defaults={
        **MICROSOFT.defaults,
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
    },
    tensors=skeleton(
        (
            QUERIES,
            Tensor(
                ATTENTION + "k_proj.weight",
                "kv_heads.head_dim <- hidden",
                order=head_by_head("kv_heads", "head_dim", interleaved=True),
            ),
            Tensor(ATTENTION + "v_proj.weight", "kv_heads.head_dim <- hidden"),
            Tensor(ATTENTION + "o_proj.weight", "hidden <- signal_heads.head_dim"),
            lambda_projection(),
        ),
        MLP_WITHOUT_BIAS,
    ),
    form=DiffForm(
        switches={
            "lambda_type": "projected",
            "noise_keys": "shared",
            "head_norm": "none",
            "head_output_scale": "none",
            "integral": "none",
            "qk_projection": "full",
            "attention_bias": False,
            "mlp_bias": False,
        },
    ),
)
