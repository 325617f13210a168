"""How the weights of a reader are shared out among the copies of what it reads."""

from __future__ import annotations

import math
from dataclasses import dataclass

LEAST_SNR_DB = 10 * math.log10(3)
"""Signal-to-noise ratio in dB at which a split takes anything from none to all of a weight: no
exact split is noisier."""


@dataclass(frozen=True)
class Shares:
    """The shares of a split: halves, with or without noise (``growkit.algebra.splits``).

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
    def amplitude(self) -> float:
        """Largest |u|. The noise is w·u with u uniform in [-U, U], so SNR = ¼ / (U²/3)."""
        if self.snr_db is None:
            return 0.0
        return min(0.5, math.sqrt(0.75) * 10 ** (-self.snr_db / 20))

    @property
    def step(self) -> float:
        """Between two of the 2¹⁶ values of u.

        It has nine bits: times 15 others that is exact in float32, so that it makes no difference
        whether a machine rounds products before it adds to them.
        """
        mantissa, exponent = math.frexp(self.amplitude / 2**15)
        return math.ldexp(round(mantissa * 2**9), exponent - 9)

    def key(self, name: str, node: int, number: int) -> str:
        """What tells the noise of one node of a tensor's splits from all other noise.

        Args:
            name: of the tensor.
            node: of the tree of splits.
            number: of the draw, where elements are drawn again.
        """
        return f"{self.seed}:{name}:{node}:{number}"
