"""Ministral: Mistral's tensors; which layers look through a window is no tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/ministral
"""

from __future__ import annotations

from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.layers import windows
from growkit.families.mistral import FAMILY as MISTRAL


def _has_window(config: Config, layer: int) -> bool:
    return config.get("sliding_window", 4096) is not None


FAMILY = replace(
    MISTRAL,
    name="Ministral",
    model_types=("ministral",),
    architecture="MinistralForCausalLM",
    form=None,  # no DIFF Transformer has windows in some layers
    defaults={
        **{key: value for key, value in MISTRAL.defaults.items() if key != "head_dim"},
        "layer_types": windows(_has_window),
    },
)
