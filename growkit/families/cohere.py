"""Cohere: LayerNorm without bias, one for attention and MLP, side by side; and Cohere 2.

Heads of Cohere 2 are always as wide as their share of hidden.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/cohere
https://github.com/huggingface/transformers/tree/main/src/transformers/models/cohere2
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import Norm, Tensor, except_every, is_set, windows
from growkit.families.llama import ATTENTION, BASE

NORM = Norm("hidden", "layer_norm_eps", centred=True)
HEAD_NORM = Norm("head_dim", "layer_norm_eps", centred=True)

_qk_norms = is_set("use_qk_norm")

SIDE_BY_SIDE = tuple(
    replace(tensor, norm=NORM) if tensor.norm else tensor
    for tensor in BASE.tensors
    if "post_attention_layernorm" not in tensor.name
)

COHERE = replace(
    BASE,
    name="Cohere",
    model_types=("cohere",),
    architecture="CohereForCausalLM",
    defaults={
        "num_key_value_heads": BASE.defaults["num_key_value_heads"],
        "head_dim": BASE.defaults["head_dim"],
        "tie_word_embeddings": True,
        "attention_bias": False,
        "use_qk_norm": False,
        "layer_norm_eps": 1e-5,
    },
    tensors=(
        *SIDE_BY_SIDE,
        Tensor(ATTENTION + "q_norm.weight", "heads, head_dim", _qk_norms, norm=HEAD_NORM),
        Tensor(ATTENTION + "k_norm.weight", "kv_heads, head_dim", _qk_norms, norm=HEAD_NORM),
    ),
)

COHERE2 = replace(
    COHERE,
    name="Cohere 2",
    model_types=("cohere2",),
    architecture="Cohere2ForCausalLM",
    defaults={
        **COHERE.defaults,
        "layer_types": windows(except_every(4, "sliding_window_pattern")),
    },
    derived=frozenset({"head_dim"}),
    tensors=SIDE_BY_SIDE,
)

FAMILIES = {"cohere": COHERE, "cohere2": COHERE2}
