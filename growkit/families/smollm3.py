"""SmolLM3: Llama's tensors; every fourth layer has no rotary embedding, which is no tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/smollm3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.family import LISTS
from growkit.families.llama import FAMILY as LLAMA


def _rotated(config: Config) -> list[int]:
    """Whether a layer has a rotary embedding: all but every fourth, if nothing else is said."""
    interval = config.get("no_rope_layer_interval", 4)
    return [int((layer + 1) % interval != 0) for layer in range(config["num_hidden_layers"])]


def _types(config: Config) -> list[str]:
    windows = config.get("use_sliding_window") and config.get("sliding_window") is not None
    return [
        "full_attention" if rotated or not windows else "sliding_attention"
        for rotated in config["no_rope_layers"][: config["num_hidden_layers"]]
    ]


FAMILY = replace(
    LLAMA,
    name="SmolLM3",
    model_types=("smollm3",),
    architecture="SmolLM3ForCausalLM",
    form=None,  # no DIFF Transformer has layers without positions
    defaults={
        **LLAMA.defaults,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "no_rope_layers": _rotated,
        "layer_types": _types,
    },
    lists=LISTS | {"no_rope_layers"},
    multiples=LLAMA.multiples[:1],
)
