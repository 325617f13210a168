"""Parts of a weight sum to it, bit for bit: all numbers of small formats, many of large ones."""

from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import growkit
from growkit.algebra.expansion import IndexMap, in_blocks
from growkit.algebra.growth_law import grow_slice
from growkit.algebra.splits import LEAST_SNR_DB, Draw, Shares, split
from growkit.base.axes import Role
from growkit.base.tensors import cut
from growkit.training import param_groups
from tests.models import Make, load_strict, train_step

AMPLITUDES = [0.0, 0.01, Shares(10.0).amplitude, 0.5]
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
EVERY_SHORT = torch.arange(-(2**15), 2**15, dtype=torch.int16)


def every_finite(dtype: torch.dtype) -> Tensor:
    numbers = (EVERY_BYTE if dtype.itemsize == 1 else EVERY_SHORT).view(dtype)
    return numbers[numbers.float().isfinite()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(amplitude: float, shape: torch.Size, seed: int = 0) -> Draw:
    """Shares around ½, drawn one after the other; plain halves for no amplitude."""
    source = generator(seed)

    def draw(node: int) -> Tensor | None:
        share = torch.empty(shape).uniform_(0.5 - amplitude, 0.5 + amplitude, generator=source)
        return share if amplitude else None

    return draw


@pytest.mark.parametrize("amplitude", AMPLITUDES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_every_number_of_a_small_format(dtype: torch.dtype, parts: int, amplitude: float) -> None:
    numbers = every_finite(dtype)
    pieces = split(numbers, parts, draws(amplitude, numbers.shape))
    assert len(pieces) == parts
    assert all(piece.dtype == dtype and piece.shape == numbers.shape for piece in pieces)
    # Sums of a few of these numbers are exact in float64: their bits lie within 53 of each other
    # or below the smallest number of the format.
    total = torch.stack([piece.double() for piece in pieces]).sum(0)
    assert total.equal(numbers.double())


@pytest.mark.sampled(6)
@pytest.mark.parametrize("amplitude", AMPLITUDES)
@pytest.mark.parametrize("parts", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_many_numbers_of_a_large_format(dtype: torch.dtype, parts: int, amplitude: float) -> None:
    integers = {torch.float32: torch.int32, torch.float64: torch.int64}[dtype]
    limits = torch.iinfo(integers)
    bits = torch.randint(limits.min, limits.max, (2000,), dtype=integers, generator=generator())
    numbers = bits.view(dtype)
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    edges = torch.tensor([0.0, smallest, 3 * smallest, torch.finfo(dtype).max], dtype=dtype)
    numbers = torch.cat([numbers[numbers.isfinite()], edges, -edges])
    pieces = split(numbers, parts, draws(amplitude, numbers.shape))
    for index, number in enumerate(numbers.tolist()):
        assert sum(Fraction(piece[index].item()) for piece in pieces) == Fraction(number)


def test_dividing_by_three_is_not_exact() -> None:
    """What the splits are for: the sum above is a property that the plain 1/n does not have."""
    numbers = every_finite(torch.bfloat16)
    third = numbers / 3
    assert not (3 * third.double()).equal(numbers.double())


SNRS = pytest.mark.parametrize("snr_db", [LEAST_SNR_DB, 6.0, 10.0, 20.0, 40.0])


@SNRS
def test_the_noise_is_as_loud_as_asked(snr_db: float) -> None:
    weights = torch.randn(200, 1000, generator=generator(), dtype=torch.float64)
    plain = IndexMap(Role.WRITTEN, 200, np.arange(200), np.ones(200))
    copies = in_blocks(1000, 2)
    read = IndexMap(Role.READ, 1000, copies.source, copies.share)
    where = (slice(0, 200), slice(0, 2000))
    grown = grow_slice(
        lambda *rows: cut(weights, rows), (plain, read), "name", Shares(snr_db, 1), where
    )
    for part in grown.chunk(2, 1):
        noise = part - weights / 2
        measured = 10 * torch.log10((weights / 2).square().sum() / noise.square().sum())
        assert float(measured) == pytest.approx(snr_db, abs=0.05)


MULTI_HEAD = {"num_key_value_heads": 4}
RATE = 1e-2


def trained(folder: Path, groups: Any, state: Path | None, steps: int) -> tuple[Any, Any]:
    """A model after some steps in strict float64, and its optimizer."""
    model = load_strict(folder)
    optimizer = torch.optim.AdamW(groups(model), lr=RATE, eps=1e-12)
    if state:
        optimizer.load_state_dict(torch.load(state, weights_only=True))
    generator = torch.Generator().manual_seed(steps)
    for ids in torch.randint(29, (steps, 4, 16), generator=generator):
        train_step(model, optimizer, ids)
    return model, optimizer


def apart(model: Any) -> float:
    """How far copies of MLP rows are apart in what they make of the same, in the last layer."""
    weight = model.model.layers[-1].mlp.up_proj.weight.detach().unflatten(0, (2, -1))
    one, other = weight.unflatten(2, (2, -1)).sum(2).unbind()
    return float((one - other).abs().max() / weight.abs().max())


def test_moments_of_copies_that_begin_anew_let_even_copies_part(make: Make, tmp_path: Path) -> None:
    source, before = tmp_path / "trained", make("llama", dtype=torch.float64, **MULTI_HEAD)
    model, optimizer = trained(before, lambda model: list(model.parameters()), None, 3)
    model.save_pretrained(source)
    torch.save(optimizer.state_dict(), source / "optimizer.pt")
    moments, parted = {}, {}
    for name in ("copy", "reset"):
        folder = tmp_path / name
        state: Any = {"optimizer": source / "optimizer.pt", "moments": name}
        growkit.grow(source, folder, hidden="x2", symmetry="keep", verify=False, **state)
        groups = partial(param_groups, folder=folder, lr=RATE, eps=1e-12, decays=lambda *_: True)
        model, optimizer = trained(folder, groups, folder / "optimizer.pt", 0)
        moments[name] = {n: optimizer.state[p] for n, p in model.named_parameters()}
        model, _ = trained(folder, groups, folder / "optimizer.pt", 4)
        parted[name] = apart(model)
    assert parted["copy"] < 1e-12
    assert parted["reset"] > 1e-3
    for name, copied in moments["copy"].items():
        reset = moments["reset"][name]
        assert reset["step"] == copied["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            kept = reset[key] != 0
            assert reset[key][kept].equal(copied[key][kept]), name
            axes = sum(size != 29 for size in kept.shape)  # each twice as long
            expected = int((copied[key] != 0).sum()) / 2**axes
            assert int(kept.sum()) == pytest.approx(expected, rel=0.1), name
