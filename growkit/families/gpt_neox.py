"""GPT-NeoX and Pythia: LayerNorm; queries, keys and values of a head are neighbours.

Files call the head ``embed_out``, the class ``lm_head``; both forms exist.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gpt_neox
"""

from __future__ import annotations

from growkit.families.description import (
    Multiple,
    Norm,
    Tensor,
    always,
    last_layer_norm,
    layer_norm,
    linear,
    untied,
)
from growkit.families.family import Family
from growkit.families.llama import SKELETON_AXES, attention_bias

LAYER = "gpt_neox.layers.{layer}."
NORM = Norm("hidden", "layer_norm_eps", centred=True)


def _tensors(head: str) -> tuple[Tensor, ...]:
    return (
        Tensor("gpt_neox.embed_in.weight", "vocab -> hidden"),
        *layer_norm(LAYER + "input_layernorm", NORM),
        *linear(
            LAYER + "attention.query_key_value", "heads.three.head_dim <- hidden", attention_bias
        ),
        *linear(LAYER + "attention.dense", "hidden <- heads.head_dim", attention_bias),
        *layer_norm(LAYER + "post_attention_layernorm", NORM),
        *linear(LAYER + "mlp.dense_h_to_4h", "ffn <- hidden", always),
        *linear(LAYER + "mlp.dense_4h_to_h", "hidden <- ffn", always),
        *last_layer_norm("gpt_neox.final_layer_norm", NORM),
        Tensor(f"{head}.weight", "vocab <- hidden", untied),
    )


FAMILY = Family(
    name="GPT-NeoX",
    model_types=("gpt_neox",),
    architecture="GPTNeoXForCausalLM",
    axes={**SKELETON_AXES, "num_attention_heads": ("heads",), "head_dim": ("head_dim",)},
    defaults={
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "layer_norm_eps": 1e-5,
    },
    derived=frozenset({"head_dim"}),
    constants={"three": 3},
    tensors=_tensors("embed_out"),
    other_forms=(_tensors("lm_head"),),
    grouped=frozenset({"heads"}),
    multiples=(
        Multiple("hidden_size", "num_attention_heads", "because each head has its share of hidden"),
    ),
    recomputed=(".attention.bias", ".attention.masked_bias", "rotary_emb.inv_freq"),
    duplicates={
        "embed_out.weight": "gpt_neox.embed_in.weight",
        "lm_head.weight": "gpt_neox.embed_in.weight",
    },
)
