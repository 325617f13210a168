"""OLMo 2: norms behind attention and MLP, and over all queries and all keys.

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

BEHIND = replace(HIDDEN_NORM, behind=True)


FAMILY = replace(
    LLAMA,
    name="OLMo 2",
    model_types=("olmo2",),
    architecture="Olmo2ForCausalLM",
    form=None,  # no DIFF Transformer has norms behind its blocks
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    tensors=(
        *(
            replace(tensor, norm=BEHIND) if "post_attention_layernorm" in tensor.name else tensor
            for tensor in LLAMA.tensors
            if tensor.when is not mlp_bias and "input_layernorm" not in tensor.name
        ),
        *QK_NORMS,
        Tensor(LAYER + "post_feedforward_layernorm.weight", "hidden", norm=BEHIND),
    ),
    multiples=LLAMA.multiples[:1],
)
