"""How much a model computes, as a formula.

A training step takes three times the FLOPs of a forward pass. The forward pass takes, per token,

    2 · Σ elements of matrices  +  (context + 1) · Σ over attention heads (head_dim + value width)

- Matrices are all that a token is multiplied with: the output head counts (tied or not), reading
  the embedding does not; of experts, those that a token goes through.
- A head multiplies its query with the keys so far (head_dim) and its map with their values (value
  width); a token sees (context + 1) / 2 keys on average, and a product with n of them takes 2 · n.
  Noise heads count like signal heads; an integral (DINT) adds one product with values per signal
  head.
- Norms, softmax, rotations, activations and the optimizer are left out, as is usual.
"""

from __future__ import annotations

from typing import Any

from torch import nn

BACKWARD = 2
"""A backward pass computes twice what the forward pass does."""


def training_flops(model: Any, context: int) -> int:
    """FLOPs of a training step, per token."""
    return (1 + BACKWARD) * forward_flops(model, context)


def forward_flops(model: Any, context: int) -> int:
    """FLOPs of a forward pass, per token; see above."""
    layers: int = model.config.num_hidden_layers
    attention = (context + 1) * layers * attention_width(model.config)
    return 2 * matrix_elements(model) + attention


def matrix_elements(model: nn.Module) -> int:
    """Elements that a token is multiplied with."""
    config: Any = model.config
    experts = getattr(config, "num_local_experts", getattr(config, "num_experts", 1))
    chosen = getattr(config, "num_experts_per_tok", 1) if experts > 1 else 1
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
    total = head.weight.numel()
    ends = {id(embedding.weight), id(head.weight)}
    for parameter in model.parameters():
        if id(parameter) in ends or parameter.dim() < 2:
            continue
        of_experts = parameter.dim() == 3
        total += parameter.numel() * chosen // experts if of_experts else parameter.numel()
    return total


def attention_width(config: Any) -> int:
    """Head dims and value widths that a token's maps are computed and used with, in one layer."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if config.model_type == "diff_transformer":
        width = config.value_head_dim
        integral = config.num_signal_heads * width if config.integral != "none" else 0
        return heads * (head_dim + width) + integral
    if config.model_type == "diffllama":
        return heads * 3 * head_dim
    return heads * 2 * head_dim
