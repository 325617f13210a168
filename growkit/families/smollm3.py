"""SmolLM3: Llama's tensors; every fourth layer has no rotary embedding, which is no tensor.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/smollm3
"""

from __future__ import annotations

from dataclasses import replace

from growkit.families.llama import FAMILY as LLAMA

FAMILY = replace(
    LLAMA,
    name="SmolLM3",
    model_types=("smollm3",),
    architecture="SmolLM3ForCausalLM",
    form=None,  # no DIFF Transformer has layers without positions
    defaults={**LLAMA.defaults, "num_key_value_heads": 4, "tie_word_embeddings": True},
    multiples=LLAMA.multiples[:1],
)
