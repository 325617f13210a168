"""Attention maps as whole matrices, and how much of them goes to an answer and to noise.

The models never hold these matrices. Here they are computed from the same projections; the tests
hold what they give against what the models give.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks.continual.needles import DEPTHS, QUESTION, WIDTH, asked, counts_in


@contextmanager
def seen(model: Any) -> Iterator[list[Tensor]]:
    """Maps of every layer of a pass, each [batch, signal heads, tokens, tokens]."""
    found: list[Tensor] = []

    def look(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        call = dict(zip(("hidden_states", "position_embeddings"), given, strict=False)) | named
        found.append(maps(module, call["hidden_states"], call["position_embeddings"]))

    hooks = [
        layer.self_attn.register_forward_pre_hook(look, with_kwargs=True)
        for layer in model.model.layers
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def maps(module: Any, hidden: Tensor, positions: tuple[Tensor, Tensor]) -> Tensor:
    """What values are multiplied with: softmax, or A₁ - λ A₂ + γ softmax(G).

    Args:
        module: attention of a Llama, or of a DIFF Transformer with a causal integral or none.
        hidden: [batch, tokens, hidden].
        positions: cosines and sines.
    """
    config, tokens = module.config, hidden.shape[1]
    width = module.head_dim if config.model_type != "diff_transformer" else config.head_dim
    shape = (*hidden.shape[:2], -1, width)
    query = module.q_proj(hidden).view(shape).transpose(1, 2)
    key = module.k_proj(hidden).view(shape).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *positions)
    later = torch.ones(tokens, tokens, dtype=torch.bool, device=hidden.device).triu(1)

    def softmax(query: Tensor, key: Tensor) -> Tensor:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = (query @ key.transpose(-1, -2)).float() * module.scaling
        return scores.masked_fill(later, -torch.inf).softmax(-1)

    if config.model_type != "diff_transformer" or not config.num_noise_heads:
        return softmax(query, key)
    assert config.integral in ("none", "causal"), config.integral
    signal, noise = config.num_signal_heads, config.num_noise_heads
    found = softmax(query[:, :signal], key[:, : config.num_value_heads])
    other = softmax(query[:, signal:], key[:, -config.num_value_heads :])
    strength = module._lambda(hidden)
    whole = found - strength * other.repeat_interleave(signal // noise, dim=1)
    if config.integral == "causal":
        counts = torch.arange(1, tokens + 1, device=hidden.device)[:, None]
        means = found.cumsum(-2) / counts
        whole = whole + module._gamma(strength) * means.masked_fill(later, -torch.inf).softmax(-1)
    return whole


@torch.no_grad()
def attention(model: Any, text: Any, context: int, device: str) -> dict[str, float]:
    """The share of attention that goes to the answer, and to what has nothing to do with it.

    Of the token before the answer, the sizes of its row in a map, which add up to one; over all
    layers, heads and depths. The question itself is neither.
    """
    needles = counts_in(context)[-1]
    answers, noise = [], []
    for depth in DEPTHS:
        question = asked(text, context, needles, depth)
        with seen(model) as found:
            model(input_ids=question.windows.to(device))
        of_answer = torch.zeros(question.windows.shape, device=device)
        for number in range(WIDTH):
            places = (question.answer + number).to(device)
            of_answer.scatter_(1, places[:, None], 1.0)
        of_noise = 1 - of_answer
        of_noise[:, -QUESTION:] = 0
        for each in found:
            row = each[:, :, -WIDTH - 1].abs()  # [batch, heads, tokens]
            row = row / row.sum(-1, keepdim=True)
            answers.append((row * of_answer[:, None]).sum(-1).mean())
            noise.append((row * of_noise[:, None]).sum(-1).mean())
    return {
        "attention to the answer": float(torch.stack(answers).mean()),
        "attention to noise": float(torch.stack(noise).mean()),
    }
