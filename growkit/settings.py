"""What a proof compares, as people set it."""

from __future__ import annotations

from dataclasses import dataclass

from growkit.errors import InputError


def check_seed(seed: int) -> None:
    """Refuse a seed that random generators do not take.

    Raises:
        InputError: it is negative or does not fit into 63 bits.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"seed {seed!r} cannot be used; choose one from 0 to {2**63 - 1}")


LONG = 512
"""Tokens of a prompt, if nothing else is said."""

SHORT = 64
"""Tokens of a prompt where the weights are known to be the source's (``docs/numerics.md``)."""


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
        text: file with real text, or None for seeded random tokens.
        prompts: number of windows of text, or of random prompts.
        length: tokens in each; None for 512, or for 64 where all weights were held against those
            of the source, bit for bit, so that logits vouch for nothing else than the function.
        seed: of the random prompts.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
        trainability: whether every parameter of the target must be able to train.
    """

    text: str | None = None
    prompts: int = 8
    length: int | None = None
    seed: int = 0
    device: str = "auto"
    trainability: bool = False

    def __post_init__(self) -> None:
        check_seed(self.seed)
        length = LONG if self.length is None else self.length
        if not 1 <= self.prompts < 2**31 or not 2 <= length < 2**31:
            raise InputError(
                f"{self.prompts} prompts of {length} tokens cannot be compared; "
                f"at least 1 prompt of 2 tokens is needed, and fewer than {2**31:,} of each"
            )
        if self.device not in ("auto", "cpu", "cuda"):
            raise InputError(f"device {self.device!r} is not known; choose auto, cpu or cuda")
