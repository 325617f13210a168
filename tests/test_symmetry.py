"""Whether the new capacity can be used: do copies part in training?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import growkit
from tests.conftest import save_model

STEPS = 10


def parted_after_training(folder: Path, apart: int) -> dict[str, float]:
    """Largest difference between copies of rows, after some steps of AdamW.

    Args:
        folder: of the model.
        apart: how many heads further the copy of a query head stands.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batch = torch.randint(29, (4, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(STEPS):
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    def difference(weight: torch.Tensor, heads: bool = False) -> float:
        both = weight.unflatten(0, (-1, 2, apart)) if heads else weight.unflatten(0, (1, 2, -1))
        first, second = both.unbind(1)
        return float((first - second).abs().max() / weight.abs().max())

    layer = model.model.layers[1]
    heads = layer.self_attn.q_proj.weight.unflatten(0, (-1, 4)).detach()
    return {
        "gate_proj": difference(layer.mlp.gate_proj.weight.detach()),
        "input_layernorm": difference(layer.input_layernorm.weight.detach()),
        "q_proj": difference(heads, heads=True),
        "embed_tokens": difference(model.model.embed_tokens.weight.detach().T),
    }


@pytest.mark.parametrize("kind", ["llama", "diffllama"])
@pytest.mark.parametrize("tied", [True, False])
def test_break_copies_part_and_keep_copies_stay_equal(
    kind: str, tied: bool, tmp_path: Path
) -> None:
    source = save_model(
        tmp_path / "source", kind, tie_word_embeddings=tied, num_attention_heads=4, head_dim=4
    )
    parted = {}
    # Every copy of a KV head serves copies of both its heads, where they are to stay equal.
    for symmetry, apart in (("break", 1), ("keep", 2)):
        growkit.grow(source, tmp_path / symmetry, hidden="x2", symmetry=symmetry, verify=None)
        parted[symmetry] = parted_after_training(tmp_path / symmetry, apart)
    # Equal up to the rounding of sums in float32, which no two copies are promised to share.
    assert max(parted["keep"].values()) < 1e-5
    assert min(parted["break"].values()) > 1e-3
