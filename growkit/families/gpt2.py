"""GPT-2: learned positions, LayerNorm, attention and MLP as convolutions of width 1.

``Conv1D`` stores its matrices as [in, out], and queries, keys and values are one matrix, one after
the other.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gpt2
"""

from __future__ import annotations

from growkit.base.tensors import Config
from growkit.families.description import Multiple, Norm, Tensor
from growkit.families.family import Family

LAYER = "transformer.h.{layer}."
NORM = Norm("hidden", "layer_norm_epsilon", centred=True)


def _tied(config: Config) -> bool:
    return bool(config["tie_word_embeddings"])


def _numbered(config: Config) -> str | None:
    key = "scale_attn_by_inverse_layer_idx"
    return key if config[key] else None


def _untied(config: Config) -> bool:
    return not _tied(config)


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
        "scale_attn_by_inverse_layer_idx": False,
    },
    numbered=_numbered,
    derived=frozenset({"head_dim"}),
    constants={"three": 3},
    tensors=(
        Tensor("transformer.wte.weight", "vocab -> hidden"),
        Tensor("transformer.wpe.weight", "positions -> hidden"),
        Tensor(LAYER + "ln_1.weight", "hidden", norm=NORM),
        Tensor(LAYER + "ln_1.bias", "hidden"),
        Tensor(LAYER + "attn.c_attn.weight", "hidden -> three.heads.head_dim"),
        Tensor(LAYER + "attn.c_attn.bias", "three.heads.head_dim"),
        Tensor(LAYER + "attn.c_proj.weight", "heads.head_dim -> hidden"),
        Tensor(LAYER + "attn.c_proj.bias", "hidden"),
        Tensor(LAYER + "ln_2.weight", "hidden", norm=NORM),
        Tensor(LAYER + "ln_2.bias", "hidden"),
        Tensor(LAYER + "mlp.c_fc.weight", "hidden -> ffn"),
        Tensor(LAYER + "mlp.c_fc.bias", "ffn"),
        Tensor(LAYER + "mlp.c_proj.weight", "ffn -> hidden"),
        Tensor(LAYER + "mlp.c_proj.bias", "hidden"),
        # What a tied head reads is shared out one step earlier, in the norm before it.
        Tensor("transformer.ln_f.weight", "<- hidden", _tied, norm=NORM),
        Tensor("transformer.ln_f.bias", "<- hidden", _tied),
        Tensor("transformer.ln_f.weight", "hidden", _untied, norm=NORM),
        Tensor("transformer.ln_f.bias", "hidden", _untied),
        Tensor("lm_head.weight", "vocab <- hidden", _untied),
    ),
    grouped=frozenset({"heads"}),
    multiples=(Multiple("n_embd", "n_head", "because each head has its share of hidden"),),
    recomputed=(".attn.bias", ".attn.masked_bias"),
    duplicates={"lm_head.weight": "transformer.wte.weight"},
)
