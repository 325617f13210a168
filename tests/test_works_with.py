"""A sample of what ``python -m tests.works_with`` tries: libraries that install in seconds."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from growkit.modeling.modeling_diff_transformer import HeadUpdates, SharedProjection
from tests.conftest import seeded
from tests.works_with import CHECKS, VARIANTS, installed, model_of

QUICK = {
    "trl_sft": 1,
    "trl_dpo": 1,
    "trl_grpo": 1,
    "peft_lora": 2,
    "torchao_int8": 2,
    "dynamic_int8": 2,
    "accelerate_device_map": 2,
    "onnx_export": 1,
}
"""How many variants of each the suite takes."""

SAMPLE = [
    (name, variant)
    for name, count in QUICK.items()
    for variant in seeded(list(QUICK).index(name)).sample(list(VARIANTS), count)
]


@pytest.mark.parametrize(("name", "variant"), SAMPLE)
def test_works_with(name: str, variant: str) -> None:
    package, check = CHECKS[name]
    assert installed(package) is not None, f"{package} is in the extra 'dev'"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of others' code, which is what is tried
        assert check(model_of(variant))


class FormerProjection(nn.Module):
    """As the class was once: its updates are a Linear that is never called."""

    def __init__(self, projection: SharedProjection) -> None:
        super().__init__()
        self.base, self.down, self.rank = projection.base, projection.down, projection.rank
        self.head_dim = projection.head_dim
        self.up = nn.Linear(self.rank, projection.up.weight.shape[0], bias=False)
        self.up.weight = projection.up.weight
        self.bases, self.heads = projection.bases, projection.heads

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape = hidden_states.shape[:-1]
        bases = self.base(hidden_states).view(*shape, self.bases, self.head_dim)
        base = torch.cat([bases.repeat_interleave(n // self.bases, -2) for n in self.heads], -2)
        low = self.down(hidden_states).view(*shape, -1, self.rank)
        weight = self.up.weight.view(-1, self.head_dim, self.rank)
        return (base + torch.einsum("...hr,hdr->...hd", low, weight)).flatten(-2)


@pytest.mark.parametrize("name", ["peft_lora", "dynamic_int8", "torchao_int8"])
def test_a_linear_that_is_never_called_is_seen(name: str) -> None:
    model = model_of("Shared DIFF")
    for layer in model.model.layers:
        for projection in ("q_proj", "k_proj"):
            former = FormerProjection(getattr(layer.self_attn, projection))
            setattr(layer.self_attn, projection, former)
    assert not any(isinstance(each, HeadUpdates) for each in model.modules())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((AssertionError, AttributeError, RuntimeError, TypeError)):
            CHECKS[name][1](model)


def test_a_scale_of_logits_that_is_a_word_is_seen() -> None:
    """TRL multiplies with it."""
    model = model_of("DIFF")
    model.config.output_multiplier = "none"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(TypeError):
            CHECKS["trl_sft"][1](model)
