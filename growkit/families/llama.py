"""Llama: RMSNorm before each block, rotary grouped-query attention, gated MLP.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/llama
"""

from __future__ import annotations

from growkit.checkpoint import Config
from growkit.families import Family, Multiple, Tensor


def tied(config: Config) -> bool:
    """The output head is the embedding."""
    return bool(config["tie_word_embeddings"])


def untied(config: Config) -> bool:
    """The output head has a weight of its own."""
    return not tied(config)


def attention_bias(config: Config) -> bool:
    """q, k, v and o have biases."""
    return bool(config["attention_bias"])


def mlp_bias(config: Config) -> bool:
    """gate, up and down have biases."""
    return bool(config["mlp_bias"])


FAMILY = Family(
    name="Llama",
    model_types=("llama",),
    axes={
        "vocab_size": ("vocab",),
        "hidden_size": ("hidden",),
        "intermediate_size": ("ffn",),
        "num_hidden_layers": ("layers",),
        "num_attention_heads": ("heads",),
        "num_key_value_heads": ("kv_heads",),
        "head_dim": ("head_dim",),
    },
    defaults={
        "num_key_value_heads": lambda config: config["num_attention_heads"],
        "head_dim": lambda config: config["hidden_size"] // config["num_attention_heads"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
    tensors=(
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        Tensor("model.layers.{layer}.input_layernorm.weight", "hidden"),
        Tensor("model.layers.{layer}.self_attn.q_proj.weight", "heads.head_dim <- hidden"),
        Tensor("model.layers.{layer}.self_attn.q_proj.bias", "heads.head_dim", attention_bias),
        Tensor("model.layers.{layer}.self_attn.k_proj.weight", "kv_heads.head_dim <- hidden"),
        Tensor("model.layers.{layer}.self_attn.k_proj.bias", "kv_heads.head_dim", attention_bias),
        Tensor("model.layers.{layer}.self_attn.v_proj.weight", "kv_heads.head_dim <- hidden"),
        Tensor("model.layers.{layer}.self_attn.v_proj.bias", "kv_heads.head_dim", attention_bias),
        Tensor("model.layers.{layer}.self_attn.o_proj.weight", "hidden <- heads.head_dim"),
        Tensor("model.layers.{layer}.self_attn.o_proj.bias", "hidden", attention_bias),
        Tensor("model.layers.{layer}.post_attention_layernorm.weight", "hidden"),
        Tensor("model.layers.{layer}.mlp.gate_proj.weight", "ffn <- hidden"),
        Tensor("model.layers.{layer}.mlp.gate_proj.bias", "ffn", mlp_bias),
        Tensor("model.layers.{layer}.mlp.up_proj.weight", "ffn <- hidden"),
        Tensor("model.layers.{layer}.mlp.up_proj.bias", "ffn", mlp_bias),
        Tensor("model.layers.{layer}.mlp.down_proj.weight", "hidden <- ffn"),
        Tensor("model.layers.{layer}.mlp.down_proj.bias", "hidden", mlp_bias),
        # A tied output head is the embedding, whose columns are copied. What is read from the
        # copies must then be shared out one step earlier: logits = Σ_c E (α_c · g ⊙ x̂).
        Tensor("model.norm.weight", "<- hidden", tied),
        Tensor("model.norm.weight", "hidden", untied),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    grouped=frozenset({"heads", "kv_heads"}),
    multiples=(
        Multiple(
            "num_attention_heads",
            "num_key_value_heads",
            "because each key-value head serves a whole group of query heads",
        ),
        Multiple("hidden_size", "num_attention_heads", "because LlamaConfig accepts nothing else"),
    ),
    recomputed=("rotary_emb.inv_freq",),
    duplicates={"lm_head.weight": "model.embed_tokens.weight"},
)
