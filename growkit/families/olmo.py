"""OLMo: Llama's tensors, but norms have no weights.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/olmo
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.base.tensors import Config
from growkit.families.description import Norm
from growkit.families.llama import FAMILY as LLAMA
from growkit.families.llama import mlp_bias, tied


def _fixed(config: Config) -> Mapping[str, str]:
    if not tied(config):
        return {}
    return {
        "hidden": "cannot grow: its head is tied to the embedding, and the norm before it has no "
        "weight that could take back what the head reads more than once; give it a head of its "
        "own with --untie, or write the embedding as lm_head.weight and set tie_word_embeddings "
        "to false"
    }


FAMILY = replace(
    LLAMA,
    name="OLMo",
    model_types=("olmo",),
    architecture="OlmoForCausalLM",
    form=None,  # no DIFF Transformer has LayerNorm
    tensors=tuple(each for each in LLAMA.tensors if not each.norm and each.when is not mlp_bias),
    norms=(Norm("hidden", None, centred=True),),
    fixed=_fixed,
    multiples=LLAMA.multiples[:1],
)
