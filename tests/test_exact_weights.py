"""The written weights themselves: copies and coefficients, element by element."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import growkit
from tests.conftest import edit_weights, relative_error, save_model

Array = NDArray[np.float64]


def copies_of(target: Array, source: Array, written: tuple[int, ...], read: int) -> bool:
    """Whether the target holds copies of the source whose parts sum to it exactly.

    Plain loops over rows and columns, written from the definition: of (heads, head_dim) the heads
    have copies side by side; hidden and ffn are repeated as a whole.

    Args:
        target: [rows, columns].
        source: [rows, columns].
        written: copies of the rows, and how many rows a head has (0 where there are no heads).
        read: copies of the columns, in the same form.
    """

    def origin_of(coordinate: int, copies: int, head: int, size: int) -> int:
        if not head:
            return coordinate % size
        return coordinate // head // copies * head + coordinate % head

    for row in range(target.shape[0]):
        origin = source[origin_of(row, *written, source.shape[0])]
        sums = np.zeros_like(origin)
        for column, value in enumerate(target[row]):
            sums[origin_of(column, *read, source.shape[1])] += value
        if not np.array_equal(sums, origin):
            return False
    return True


@pytest.mark.sampled(24)
@pytest.mark.parametrize("kind", ["llama", "diffllama"])
@pytest.mark.parametrize("symmetry", ["break", "keep"])
@pytest.mark.parametrize("factor", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("tied", [True, False])
def test_coefficients_sum_to_the_weight(
    kind: str, symmetry: str, factor: int, dtype: torch.dtype, tied: bool, tmp_path: Path
) -> None:
    n, d = factor, 4
    sizes = {"attention_bias": True, "head_dim": d, "num_key_value_heads": 4}
    source_folder, target_folder = tmp_path / "source", tmp_path / "target"
    save_model(source_folder, kind, dtype=dtype, tie_word_embeddings=tied, **sizes)
    growkit.grow(source_folder, target_folder, hidden=f"x{n}", symmetry=symmetry, verify=None)
    source = load_file(source_folder / "model.safetensors")
    target = load_file(target_folder / "model.safetensors")
    assert source.keys() == target.keys()

    # DiffLlama's q, k and v are two lists of heads, one after the other.
    halves = 2 if kind == "diffllama" else 1
    value = 2 * d if kind == "diffllama" else d
    plain, heads, values, once = (n, 0), (n, d), (n, value), (1, 0)
    expected = {
        "norm": (plain, once),
        "o_proj": (plain, values),
        "lambda": (once, once),
        **dict.fromkeys(("embed_tokens", "lm_head"), (once, plain)),
        **dict.fromkeys(("q_proj", "k_proj", "v_proj"), (heads, plain)),
        **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), (plain, plain)),
    }
    for name, tensor in target.items():
        assert tensor.dtype == dtype
        grown, weight = tensor.double().numpy(), source[name].double().numpy()
        kind_of = next(key for key in expected if key in name)
        written, read = expected[kind_of]
        if name == "model.norm.weight" and tied:  # read by the embedding as output head
            grown, weight, written, read = grown[None], weight[None], once, plain
        elif grown.ndim == 1:
            grown, weight, read = grown[:, None], weight[:, None], once
        elif kind_of == "embed_tokens":  # [vocab, hidden]: written along dimension 1
            grown, weight, written, read = grown.T, weight.T, plain, once
        lists = halves if kind_of in ("q_proj", "k_proj", "v_proj") else 1
        for part, origin in zip(np.split(grown, lists), np.split(weight, lists), strict=True):
            assert copies_of(part, origin, written, read), name
        if read[0] > 1:
            spoiled = grown.copy()
            spoiled[0, 0] *= 1 + torch.finfo(dtype).eps
            parts = (np.split(each, lists)[0] for each in (spoiled, weight))
            assert not copies_of(*parts, written, read)
    assert relative_error(source_folder, target_folder) < 1e-12


def test_float8(tmp_path: Path) -> None:
    """Formats without arithmetic of their own grow as well; they are compared in float64."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16)
    with edit_weights(source) as tensors:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(torch.float8_e4m3fn)
    growkit.grow(source, tmp_path / "target", hidden="x3", verify=None)
    kept = load_file(tmp_path / "target" / "model.safetensors")
    assert {tensor.dtype for tensor in kept.values()} == {torch.float8_e4m3fn}
    assert relative_error(source, tmp_path / "target") < 1e-12
