"""How the weights of a reader are shared out among the copies of what it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_SNR_DB = 10 * math.log10(3)
"""Signal-to-noise ratio in dB at which a split takes anything from none to all of a weight: no
exact split is noisier."""


@dataclass(frozen=True)
class Shares:
    """The shares of a split: halves, with or without noise (``growkit.algebra.splits``), or uneven.

    Attributes:
        snr_db: signal-to-noise ratio of the random part in dB, where the signal is an equal half
            and the noise is uniform; None for plain halves (HyperCloning as published).
        seed: with the tensor's name, seeds the noise, so that a tensor's split depends neither on
            the order in which tensors are made nor on their number.
        uneven: whether shares are those of ``uneven_shares``, without noise.
    """

    snr_db: float | None
    seed: int = 0
    uneven: bool = False

    def __post_init__(self) -> None:
        assert self.snr_db is None or (self.snr_db >= LEAST_SNR_DB and not self.uneven)

    @property
    def parting(self) -> bool:
        """Whether copies are read with shares that let them part in training."""
        return self.uneven or self.snr_db is not None

    @property
    def amplitude(self) -> float:
        """Largest |u|. The noise is w·u with u uniform in [-U, U], so SNR = ¼ / (U²/3)."""
        if self.snr_db is None:
            return 0.0
        return min(0.5, math.sqrt(0.75) * 10 ** (-self.snr_db / 20))

    @property
    def step(self) -> float:
        """Between two of the 2¹⁶ values of u.

        It has nine bits: times a number of 15 bits that is exact in float32, so that it makes no
        difference whether a machine rounds products before it adds to them.
        """
        mantissa, exponent = math.frexp(self.amplitude / 2**15)
        return math.ldexp(round(mantissa * 2**9), exponent - 9)

    def key(self, name: str, node: int, number: int) -> str:
        """The key of the noise of one node of a tensor's splits.

        Args:
            name: of the tensor.
            node: of the tree of splits.
            number: of the draw, where elements are drawn again.
        """
        return f"{self.seed}:{name}:{node}:{number}"


def even_shares(parts: int) -> tuple[float, ...]:
    """The shares of parts without noise: halves of halves."""
    if parts <= 1:
        return (1.0,)
    left = (parts + 1) // 2
    return tuple(each / 2 for count in (left, parts - left) for each in even_shares(count))


def uneven_shares(parts: int) -> tuple[float, ...]:
    """Shares that all differ: the first odd numbers, whose sum is a square.

    Two parts have ¼ and ¾, four 1/16, 3/16, 5/16 and 7/16.
    """
    return tuple((2 * part + 1) / parts**2 for part in range(parts))


def uneven_first(parts: int, node: int) -> float:
    """The share that the first half of a node's parts takes of it, where shares are uneven.

    Args:
        parts: of the whole tree of splits.
        node: of the tree (``growkit.algebra.splits.Draw``).
    """
    before, count = 0, parts
    for half in f"{node:b}"[1:]:
        left = (count + 1) // 2
        before, count = (before + left, count - left) if half == "1" else (before, left)
    left = (count + 1) // 2
    return left * (2 * before + left) / (count * (2 * before + count))
