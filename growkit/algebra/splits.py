"""Exact splits: several numbers of a storage format that sum to a given one, bit for bit.

``growkit.algebra.growth_law`` turns the raw numbers of ``noise`` into shares.

``Shares`` distributes the weights of a reader over the copies that it reads.

Two parts of w come from three rounded operations, with any u in [-½, ½]:

    first = w · (½ + u)        between 0 and w, because rounding is monotone
    second = w - first
    first = w - second

If the first is in [w/2, w], Sterbenz' lemma makes the second exact, and the last line repeats the
first. If it is in [0, w/2], the second is in [w/2, w], and the same lemma makes the last line
exact. In the subnormal range every difference is exact. Either way ``first + second = w`` in real
arithmetic: with a random u, which lets the copies diverge, and with u = 0 (plain halves), even
where w/2 has no representation. Parts are split again to get more of them: three are ¼, ¼, ½.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TypeAlias

from growkit.base.lazy import NDArray, Tensor, np, torch
from growkit.base.tensors import same_numbers, widened

LEAST_SNR_DB = 10 * math.log10(3)
"""Lowest signal-to-noise ratio of an exact split in dB: shares are uniform between 0 and 1."""


@dataclass(frozen=True)
class Shares:
    """The shares of a split: halves, with or without noise.

    Attributes:
        snr_db: signal-to-noise ratio of the random part in dB, where the signal is an equal half
            and the noise is uniform; None for plain halves (HyperCloning as published).
        seed: with the tensor's name, seeds the noise, so that a tensor's split depends neither on
            the order in which tensors are made nor on their number.
    """

    snr_db: float | None
    seed: int = 0

    def __post_init__(self) -> None:
        assert self.snr_db is None or self.snr_db >= LEAST_SNR_DB

    @property
    def parting(self) -> bool:
        """Whether the shares let copies diverge in training."""
        return self.snr_db is not None

    @property
    def amplitude(self) -> float:
        """Largest |u|. The noise is w·u with u uniform in [-U, U], so SNR = ¼ / (U²/3)."""
        db = self.snr_db
        return 0.0 if db is None else min(0.5, math.sqrt(0.75) * 10 ** (-db / 20))

    @property
    def step(self) -> float:
        """Distance between adjacent values of u; there are 2¹⁶ values.

        It has nine bits. Its product with a 15-bit number is exact in float32, so the result does
        not depend on whether a machine fuses multiplication and addition.
        """
        mantissa, exponent = math.frexp(self.amplitude / 2**15)
        return math.ldexp(round(mantissa * 2**9), exponent - 9)

    def key(self, name: str, node: int, number: int) -> str:
        """Make the noise key of one node in a tensor's tree of splits.

        Args:
            name: name of the tensor.
            node: number of the node.
            number: number of the draw, for elements that are redrawn.
        """
        return f"{self.seed}:{name}:{node}:{number}"


def even_shares(parts: int) -> tuple[float, ...]:
    """The shares of a split without noise: repeated halves."""
    if parts <= 1:
        return (1.0,)
    left = (parts + 1) // 2
    return tuple(share / 2 for count in (left, parts - left) for share in even_shares(count))


IN_CACHE = 1 << 17
"""Elements added at a time, so that intermediate results stay in the processor's cache."""

LANES = 16
"""16-bit numbers from one step of the counter, which gives four 64-bit words."""

DRAWS = 32
"""Largest number of redraws of an element with equal parts."""

Draw: TypeAlias = "Callable[..., Tensor | None]"
"""Maps a node of the tree of splits (1 is the root, 2n and 2n + 1 are the halves of n) to the share
of the first part of every element, in [0, 1] and float32; None for plain halves."""


def split(weight: Tensor, parts: int, draw: Draw, node: int = 1) -> list[Tensor]:
    """Split every element into ``parts`` numbers of the same dtype that sum to it exactly.

    Args:
        weight: any shape, any floating dtype.
        parts: at least 1. Two parts are about ½ each, three ¼, ¼, ½, four ¼ each.
        draw: gives the shares of first parts, in the shape of ``weight``.
        node: number of the node in the tree.

    Returns:
        ``parts`` tensors of the shape and dtype of ``weight``.
    """
    if parts == 1:
        return [weight]
    share = draw(node)
    if share is None:
        first = (widened(weight) / 2).to(weight.dtype)
    else:
        arithmetic = torch.float64 if weight.dtype == torch.float64 else torch.float32
        product = share.to(arithmetic)  # may be overwritten
        first = product.mul_(weight.to(arithmetic)).to(weight.dtype)
    left = (parts + 1) // 2
    second = (widened(weight) - widened(first)).to(weight.dtype)
    first = (widened(weight) - widened(second)).to(weight.dtype)
    return [*split(first, left, draw, 2 * node), *split(second, parts - left, draw, 2 * node + 1)]


def split_apart(weight: Tensor, parts: int, draw: Draw) -> list[Tensor]:
    """Split a vector so that the parts of each element differ, if the dtype allows it.

    Two copies in a vector differ by a single number. In a short format, two parts may be equal by
    chance; such elements are redrawn. Every draw gives an exact split.

    Args:
        weight: any floating dtype.
        parts: see ``split``.
        draw: maps a node and the number of the draw to shares.
    """
    drawn = split(weight, parts, draw)
    for number in range(1, DRAWS + 1):
        tied = torch.zeros_like(weight, dtype=torch.bool)
        for first, second in combinations(drawn, 2):
            tied |= first.eq(second) & first.ne(0)
        if not bool(tied.any()):
            break
        again = split(weight, parts, partial(draw, number=number))
        drawn = [torch.where(tied, new, old) for new, old in zip(again, drawn, strict=True)]
    return drawn


def join(parts: list[Tensor]) -> Tensor:
    """Undo a split: add its parts in the order of the tree.

    Args:
        parts: parts in the order of ``split``.

    Returns:
        The weight, in the dtype of the parts; NaN for every rounded sum, which parts from ``split``
        never give.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    if first.numel() <= IN_CACHE or len(first) == 1:
        return _join_block(parts)
    rows = max(1, IN_CACHE * len(first) // first.numel())
    joined = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    for piece, *blocks in zip(joined.split(rows), *(p.split(rows) for p in parts), strict=True):
        piece.copy_(_join_block(blocks))
    return joined


def _join_block(parts: list[Tensor]) -> Tensor:
    """Join all parts without dividing them into blocks."""
    left = (len(parts) + 1) // 2
    dtype = parts[0].dtype
    first, second = widened(join(parts[:left])), widened(join(parts[left:]))
    total = first + second
    # A rounded sum is off by multiples of the last place of the smaller part. Subtracting the
    # larger part leaves an error of the same size. Only numbers beyond the next power of two, all
    # larger than the smaller part, could hide it by rounding.
    pairs = [(total - first, second), (total - second, first)]
    if first.dtype != dtype:
        pairs.append((total.to(dtype).to(total.dtype), total))
    if not all(same_numbers(one, other) for one, other in pairs):
        for one, other in pairs:
            total = total.masked_fill(one != other, torch.nan)
    return total.to(dtype)


def noise(key: str, rows: NDArray[np.int64], columns: int) -> NDArray[np.int16]:
    """Counter-based noise: each number depends only on the key and its place in the tensor.

    Philox4×64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key
    and a counter into random words. The key depends on seed, tensor and purpose, the counter on the
    place. So the bits do not depend on order, block size, thread or rank, and any part of the noise
    can be generated alone. Only raw words are used: unlike numpy's distributions, they never
    change.

    Args:
        key: identifies a field of noise.
        rows: rows of the field, in any order; neighbours are drawn together.
        columns: number of columns of the field.

    Returns:
        Whole numbers from -2¹⁵ to 2¹⁵ - 1, all equally likely, [rows, columns].
    """
    steps = -(-columns // LANES)
    words = np.frombuffer(hashlib.sha256(key.encode()).digest()[:16], "<u8").astype(np.uint64)
    drawn = []
    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        generator = np.random.Philox(key=words)
        generator.advance(int(run[0]) * steps if len(run) else 0)
        raw = generator.random_raw(len(run) * steps * 4)
        # Little-endian, so that the four numbers of a word have the same order on every machine.
        numbers = np.asarray(raw, "<u8").view("<i2").astype(np.int16, copy=False)
        drawn.append(numbers.reshape(len(run), steps * LANES))
    return (drawn[0] if len(drawn) == 1 else np.concatenate(drawn))[:, :columns]
