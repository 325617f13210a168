"""GPT-2: learned positions, LayerNorm, attention and MLP as convolutions of width 1.

``Conv1D`` stores its matrices as [in, out], and queries, keys and values are one matrix, one after
the other.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gpt2
"""

from __future__ import annotations

from growkit.families.description import (
    Multiple,
    Norm,
    Tensor,
    last_layer_norm,
    layer_norm,
    untied,
)
from growkit.families.family import Family

LAYER = "transformer.h.{layer}."
NORM = Norm("hidden", "layer_norm_epsilon", centred=True)
SCALED_BY_NUMBER = "scale_attn_by_inverse_layer_idx"


FAMILY = Family(
    name="GPT-2",
    model_types=("gpt2",),
    architecture="GPT2LMHeadModel",
    axes={
        "vocab_size": ("vocab",),
        "n_positions": ("positions",),
        "n_embd": ("hidden",),
        "n_inner": ("ffn",),
        "n_layer": ("layers",),
        "n_head": ("heads",),
        "head_dim": ("head_dim",),
    },
    defaults={
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": lambda config: 4 * config["n_embd"],
        "head_dim": lambda config: config["n_embd"] // config["n_head"],
        "tie_word_embeddings": True,
        SCALED_BY_NUMBER: False,
    },
    numbered=lambda config: SCALED_BY_NUMBER if config[SCALED_BY_NUMBER] else None,
    derived=frozenset({"head_dim"}),
    constants={"three": 3},
    tensors=(
        Tensor("transformer.wte.weight", "vocab -> hidden"),
        Tensor("transformer.wpe.weight", "positions -> hidden"),
        *layer_norm(LAYER + "ln_1", NORM),
        Tensor(LAYER + "attn.c_attn.weight", "hidden -> three.heads.head_dim"),
        Tensor(LAYER + "attn.c_attn.bias", "three.heads.head_dim"),
        Tensor(LAYER + "attn.c_proj.weight", "heads.head_dim -> hidden"),
        Tensor(LAYER + "attn.c_proj.bias", "hidden"),
        *layer_norm(LAYER + "ln_2", NORM),
        Tensor(LAYER + "mlp.c_fc.weight", "hidden -> ffn"),
        Tensor(LAYER + "mlp.c_fc.bias", "ffn"),
        Tensor(LAYER + "mlp.c_proj.weight", "ffn -> hidden"),
        Tensor(LAYER + "mlp.c_proj.bias", "hidden"),
        *last_layer_norm("transformer.ln_f", NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    grouped=frozenset({"heads"}),
    multiples=(Multiple("n_embd", "n_head", "because each head has its share of hidden"),),
    recomputed=(".attn.bias", ".attn.masked_bias"),
    duplicates={"lm_head.weight": "transformer.wte.weight"},
)
