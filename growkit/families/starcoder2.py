"""StarCoder2: Llama's attention, LayerNorm, and an MLP without a gate.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/starcoder2
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import Norm, Tensor, always
from growkit.families.llama import (
    ATTENTION,
    MLP,
    attention_bias,
    last_layer_norm,
    layer_norm,
    untied,
)
from growkit.families.llama import FAMILY as LLAMA

NORM = Norm("hidden", "norm_epsilon", centred=True)


def _bias(config: Config) -> bool:
    return bool(config["use_bias"])


FAMILY = replace(
    LLAMA,
    name="StarCoder2",
    model_types=("starcoder2",),
    architecture="Starcoder2ForCausalLM",
    form=None,  # no DIFF Transformer has LayerNorm
    defaults={
        "num_key_value_heads": 2,
        "head_dim": LLAMA.defaults["head_dim"],
        "tie_word_embeddings": True,
        "use_bias": True,
        "norm_epsilon": 1e-5,
    },
    tensors=(
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        *layer_norm("model.layers.{layer}.input_layernorm", NORM),
        *(
            replace(each, when=_bias if each.when is attention_bias else always)
            for each in LLAMA.tensors
            if each.name.startswith(ATTENTION)
        ),
        *layer_norm("model.layers.{layer}.post_attention_layernorm", NORM),
        Tensor(MLP + "c_fc.weight", "ffn <- hidden"),
        Tensor(MLP + "c_fc.bias", "ffn", _bias),
        Tensor(MLP + "c_proj.weight", "hidden <- ffn"),
        Tensor(MLP + "c_proj.bias", "hidden", _bias),
        *last_layer_norm("model.norm", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    multiples=LLAMA.multiples[:1],
)
