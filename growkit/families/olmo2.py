"""OLMo 2 and 3: norms behind attention and MLP, and over all queries and all keys.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmo2
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Norm, Tensor
from growkit.families.llama import ATTENTION, HIDDEN_NORM, mlp_bias
from growkit.families.llama import FAMILY as LLAMA

LAYER = "model.layers.{layer}."

QK_NORMS = (
    Tensor(ATTENTION + "q_norm.weight", "heads.head_dim", norm=Norm("heads", "rms_norm_eps")),
    Tensor(ATTENTION + "k_norm.weight", "kv_heads.head_dim", norm=Norm("kv_heads", "rms_norm_eps")),
)

FAMILY = replace(
    LLAMA,
    name="OLMo 2",
    model_types=("olmo2", "olmo3"),
    architecture="Olmo2ForCausalLM",
    form=None,  # no DIFF Transformer has norms behind its blocks
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    tensors=(
        *(
            tensor
            for tensor in LLAMA.tensors
            if tensor.when is not mlp_bias and "input_layernorm" not in tensor.name
        ),
        *QK_NORMS,
        Tensor(LAYER + "post_feedforward_layernorm.weight", "hidden", norm=HIDDEN_NORM),
    ),
    multiples=LLAMA.multiples[:1],
)
