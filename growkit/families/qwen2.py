"""Qwen2 and Qwen2.5: Llama's tensors, with biases of queries, keys and values.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/qwen2
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import Tensor, always
from growkit.families.layers import windows
from growkit.families.llama import FAMILY as LLAMA
from growkit.families.llama import SOFTMAX, attention_bias, mlp_bias


def has_window(config: Config, layer: int) -> bool:
    """The layer looks through a window, unless the config lists which do."""
    used = config.get("use_sliding_window") and config.get("sliding_window", 4096) is not None
    return bool(used and layer >= config.get("max_window_layers", 28))


def _with_partial_biases() -> Iterator[Tensor]:
    for tensor in LLAMA.tensors:
        if tensor.when is attention_bias and "o_proj" not in tensor.name:
            yield replace(tensor, when=always)
        elif tensor.when not in (attention_bias, mlp_bias):
            yield tensor


FAMILY = replace(
    LLAMA,
    name="Qwen2",
    model_types=("qwen2",),
    architecture="Qwen2ForCausalLM",
    form=replace(
        SOFTMAX,
        switches={
            **SOFTMAX.switches,
            "attention_bias": True,
            "attention_output_bias": False,
            "mlp_bias": False,
        },
    ),
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 32,
        "layer_types": windows(has_window),
    },
    tensors=tuple(_with_partial_biases()),
    multiples=LLAMA.multiples[:1],
)
