"""Families with Llama's attention between LayerNorms: StableLM, StarCoder2 and Nemotron.

StableLM keeps Llama's MLP; some models have attention and MLP side by side, and a norm for every
head of queries and keys, each with its own weight. StarCoder2 and Nemotron have an MLP without a
gate; Nemotron's norms add 1 to their weights.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/stablelm
https://github.com/huggingface/transformers/tree/main/src/transformers/models/starcoder2
https://github.com/huggingface/transformers/tree/main/src/transformers/models/nemotron
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.description import (
    Norm,
    Tensor,
    When,
    always,
    is_set,
    is_unset,
    last_layer_norm,
    layer_norm,
    linear,
    untied,
)
from growkit.families.llama import (
    ATTENTION,
    BASE,
    LAYER,
    LLAMA,
    MLP,
    attention,
    attention_bias,
    gated_mlp,
)

HEAD_NORM = Norm("head_dim", "layer_norm_eps", centred=True)


def _skeleton(
    eps: str, attention: tuple[Tensor, ...], mlp: tuple[Tensor, ...], second: When = always
) -> tuple[Tensor, ...]:
    """All tensors; models that meet ``second`` have a norm before the MLP."""
    norm = Norm("hidden", eps, centred=True)
    return (
        Tensor("model.embed_tokens.weight", "vocab -> hidden"),
        *layer_norm(LAYER + "input_layernorm", norm),
        *attention,
        *layer_norm(LAYER + "post_attention_layernorm", norm, second),
        *mlp,
        *last_layer_norm("model.norm", norm),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    )


def _mlp(up: str, down: str, bias: When) -> tuple[Tensor, ...]:
    """An MLP without a gate."""
    return (
        *linear(MLP + up, "ffn <- hidden", bias),
        *linear(MLP + down, "hidden <- ffn", bias),
    )


_qk_norms, _use_bias = is_set("qk_layernorm"), is_set("use_bias")

STABLELM = replace(
    LLAMA,
    name="StableLM",
    model_types=("stablelm",),
    architecture="StableLmForCausalLM",
    form=None,  # no DIFF Transformer has LayerNorm
    defaults={
        "num_key_value_heads": 32,
        "head_dim": BASE.defaults["head_dim"],
        "tie_word_embeddings": False,
        "use_qkv_bias": False,
        "qk_layernorm": False,
        "use_parallel_residual": False,
        "layer_norm_eps": 1e-5,
    },
    derived=frozenset({"head_dim"}),
    tensors=_skeleton(
        "layer_norm_eps",
        (
            *attention(is_set("use_qkv_bias")),
            *(
                Tensor(f"{ATTENTION}{norms}.weight", "head_dim", _qk_norms, norm=HEAD_NORM)
                for norms in ("q_layernorm.norms.{head}", "k_layernorm.norms.{kv_head}")
            ),
        ),
        gated_mlp(),
        is_unset("use_parallel_residual"),
    ),
)

STARCODER2 = replace(
    BASE,
    name="StarCoder2",
    model_types=("starcoder2",),
    architecture="Starcoder2ForCausalLM",
    defaults={
        "num_key_value_heads": 2,
        "head_dim": BASE.defaults["head_dim"],
        "tie_word_embeddings": True,
        "use_bias": True,
        "norm_epsilon": 1e-5,
    },
    tensors=_skeleton(
        "norm_epsilon", attention(_use_bias, _use_bias), _mlp("c_fc", "c_proj", _use_bias)
    ),
)

NEMOTRON = replace(
    BASE,
    name="Nemotron",
    model_types=("nemotron",),
    architecture="NemotronForCausalLM",
    defaults={
        # The class loads no model whose config leaves out num_key_value_heads.
        "head_dim": BASE.defaults["head_dim"],
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "norm_eps": 1e-5,
    },
    tensors=tuple(
        replace(each, offset=1.0) if each.norm else each
        for each in _skeleton(
            "norm_eps",
            attention(attention_bias, attention_bias),
            _mlp("up_proj", "down_proj", is_set("mlp_bias")),
        )
    ),
)

FAMILIES = {"stablelm": STABLELM, "starcoder2": STARCODER2, "nemotron": NEMOTRON}
