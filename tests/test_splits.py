"""Parts of a weight sum to it, bit for bit: all numbers of small formats, many of large ones."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from growkit.algebra.shares import LEAST_SNR_DB, Shares
from growkit.algebra.splits import split

AMPLITUDES = [0.0, 0.01, Shares(10.0).amplitude, 0.5]
EVERY_BYTE = torch.arange(256, dtype=torch.uint8)
EVERY_SHORT = torch.arange(-(2**15), 2**15, dtype=torch.int16)


def every_finite(dtype: torch.dtype) -> Tensor:
    numbers = (EVERY_BYTE if dtype.itemsize == 1 else EVERY_SHORT).view(dtype)
    return numbers[numbers.float().isfinite()]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("amplitude", AMPLITUDES)
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2],
    ids=str,
)
def test_every_number_of_a_small_format(dtype: torch.dtype, parts: int, amplitude: float) -> None:
    numbers = every_finite(dtype)
    pieces = split(numbers, parts, amplitude, generator())
    assert len(pieces) == parts
    assert all(piece.dtype == dtype and piece.shape == numbers.shape for piece in pieces)
    # Sums of a few of these numbers are exact in float64: their bits lie within 53 of each other
    # or below the smallest number of the format.
    total = torch.stack([piece.double() for piece in pieces]).sum(0)
    assert total.equal(numbers.double())


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
    pieces = split(numbers, parts, amplitude, generator())
    for index, number in enumerate(numbers.tolist()):
        assert sum(Fraction(piece[index].item()) for piece in pieces) == Fraction(number)


def test_dividing_by_three_is_not_exact() -> None:
    """What the splits are for: the sum above is a property that the plain 1/n does not have."""
    numbers = every_finite(torch.bfloat16)
    third = numbers / 3
    assert not (3 * third.double()).equal(numbers.double())


@pytest.mark.parametrize("snr_db", [LEAST_SNR_DB, 6.0, 10.0, 20.0, 40.0])
def test_the_noise_is_as_loud_as_asked(snr_db: float) -> None:
    weights = torch.randn(200_000, generator=generator(), dtype=torch.float64)
    first, second = split(weights, 2, Shares(snr_db).amplitude, generator(1))
    for part in (first, second):
        noise = part - weights / 2
        measured = 10 * torch.log10((weights / 2).square().sum() / noise.square().sum())
        assert float(measured) == pytest.approx(snr_db, abs=0.05)


def test_plain_halves_are_equal() -> None:
    weights = torch.randn(1000, generator=generator()).to(torch.bfloat16)
    first, second = split(weights, 2, 0.0, generator())
    assert first.equal(second)


def test_seeds_depend_on_name_and_seed_alone() -> None:
    assert Shares(10.0, 1).seed_of("a") == Shares(10.0, 1).seed_of("a")
    seeds = {Shares(10.0, seed).seed_of(name) for seed in range(3) for name in "abc"}
    assert len(seeds) == 9
