"""Phi-3 and Phi-4: Llama's tensors; queries, keys and values are one matrix, gate and up another.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/phi3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.families.description import Tensor
from growkit.families.llama import ATTENTION, MLP, skeleton
from growkit.families.llama import FAMILY as LLAMA


def _check(config: Config) -> None:
    """LongRoPE has a factor for each pair of a head's coordinates, as wide as its share."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    share = config["hidden_size"] // config["num_attention_heads"]
    if isinstance(rope, Mapping) and "short_factor" in rope and config["head_dim"] != share:
        raise InputError(
            f"a Phi-3 model with LongRoPE cannot have head_dim {config['head_dim']} with "
            f"hidden_size {config['hidden_size']} and {config['num_attention_heads']} heads; "
            "grow heads like hidden"
        )


FAMILY = replace(
    LLAMA,
    name="Phi-3",
    model_types=("phi3",),
    architecture="Phi3ForCausalLM",
    form=None,  # the DIFF Transformer has biases and factors of positions of its own
    defaults={**LLAMA.defaults, "rms_norm_eps": 1e-5},
    constants={"two": 2},
    tensors=skeleton(
        (
            Tensor(
                ATTENTION + "qkv_proj.weight",
                "heads.head_dim + kv_heads.head_dim + kv_heads.head_dim <- hidden",
            ),
            Tensor(ATTENTION + "o_proj.weight", "hidden <- heads.head_dim"),
        ),
        (
            Tensor(MLP + "gate_up_proj.weight", "two.ffn <- hidden"),
            Tensor(MLP + "down_proj.weight", "hidden <- ffn"),
        ),
    ),
    multiples=LLAMA.multiples[:1],
    check=_check,
)
