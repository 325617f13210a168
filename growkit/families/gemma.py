"""Gemma: Llama's tensors; embeddings are multiplied by √hidden, and norms add 1 to their weights.

√hidden must keep its bits, so hidden grows by powers of four. Gemma 2 adds norms behind attention
and MLP; Gemma 3 (its text model) also norms of every query and key head.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/gemma
https://github.com/huggingface/transformers/tree/main/src/transformers/models/gemma2
https://github.com/huggingface/transformers/tree/main/src/transformers/models/gemma3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.families.description import Multiple, Norm, Tensor, except_every, tied, windows
from growkit.families.llama import BASE, HIDDEN_NORM, LAYER, qk_norms

BEHIND = replace(HIDDEN_NORM, behind=True)


def _root(sizes: Mapping[str, int]) -> float:
    return float(sizes["hidden"] ** 0.5)


def _as_in_gemma(tensor: Tensor) -> Tensor:
    if tensor.name == "model.embed_tokens.weight":
        return replace(tensor, scale=_root)
    if tensor.norm and tensor.when is tied:
        # The head reads the stored embedding, without the factor of the class.
        return replace(tensor, offset=1.0, scale=lambda sizes: 1 / _root(sizes))
    return replace(tensor, offset=1.0) if tensor.norm else tensor


GEMMA = replace(
    BASE,
    name="Gemma",
    model_types=("gemma",),
    architecture="GemmaForCausalLM",
    defaults={
        **BASE.defaults,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
    },
    tensors=tuple(map(_as_in_gemma, BASE.tensors)),
)

GEMMA2 = replace(
    GEMMA,
    name="Gemma 2",
    model_types=("gemma2",),
    architecture="Gemma2ForCausalLM",
    defaults={**GEMMA.defaults, "num_key_value_heads": 4, "layer_types": windows(except_every(2))},
    multiples=(
        *GEMMA.multiples,
        Multiple("hidden_size", "num_attention_heads", "because its config accepts nothing else"),
    ),
    tensors=(
        *(
            replace(each, norm=BEHIND) if "post_attention" in each.name else each
            for each in GEMMA.tensors
        ),
        *(
            Tensor(f"{LAYER}{name}_feedforward_layernorm.weight", "hidden", norm=norm, offset=1.0)
            for name, norm in (("pre", HIDDEN_NORM), ("post", BEHIND))
        ),
    ),
)

GEMMA3 = replace(
    GEMMA2,
    name="Gemma 3",
    model_types=("gemma3_text",),
    architecture="Gemma3ForCausalLM",
    defaults={
        **GEMMA2.defaults,
        "layer_types": windows(except_every(6, "sliding_window_pattern")),
    },
    tensors=(*GEMMA2.tensors, *qk_norms(Norm("head_dim", "rms_norm_eps"), offset=1.0)),
)

FAMILIES = {"gemma": GEMMA, "gemma2": GEMMA2, "gemma3": GEMMA3}
