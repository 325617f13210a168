"""What a proof compares, as people set it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from growkit.base.errors import InputError
from growkit.base.names import perhaps


def check_seed(seed: int) -> None:
    """Refuse a seed that random generators do not take.

    Raises:
        InputError: it is negative or does not fit into 63 bits.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"seed {seed!r} cannot be used; choose one from 0 to {2**63 - 1}")


DEVICES = ("auto", "cpu", "cuda")
"""Where a proof runs, the first by default."""

NO_GPU = "device cuda was asked for, but torch sees no GPU; use --device cpu"

MANY, LONG = 8, 512
"""Prompts, and tokens in each, if nothing else is said."""

FEW, SHORT = 4, 48
"""The same where no weight can be lost any more, and only the function is left to be shown
(``docs/numerics.md``, "How many tokens")."""


MOST_PROMPTS = 1 << 16
"""Each is a tensor by itself."""

MOST_STEPS = 10_000
"""Of training in a proof."""


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Attributes:
        text: file with real text, or None for seeded random tokens. A ``Path`` becomes its name.
        prompts: number of windows of text, or of random prompts; None for 8, or for 4 where every
            weight has given the source's back, so that only the function is left to be shown.
        length: tokens in each; None for 512, or for 48 there.
        seed: of the random prompts.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
        trainability: whether every parameter of the target must be able to train.
        max_kl: nats per token of KL, in strict float64, above which a target is not kept, also one
            that was asked to be another function; None for no limit.
        steps: of AdamW that both models take in strict float64, to see whether they learn the
            same; None for no training.
    """

    text: str | None = None
    prompts: int | None = None
    length: int | None = None
    seed: int = 0
    device: str = "auto"
    trainability: bool = False
    max_kl: float | None = None
    steps: int | None = None

    @property
    def amount(self) -> tuple[int, int]:
        """Prompts, and tokens in each, where weights may be lost."""
        return (
            MANY if self.prompts is None else self.prompts,
            LONG if self.length is None else self.length,
        )

    @property
    def settled(self) -> Settings:
        """The same where they cannot."""
        return replace(
            self,
            prompts=FEW if self.prompts is None else self.prompts,
            length=SHORT if self.length is None else self.length,
        )

    def __post_init__(self) -> None:
        if isinstance(self.text, Path):  # recipes hold words
            object.__setattr__(self, "text", str(self.text))
        check_seed(self.seed)
        prompts, length = self.amount
        if not 1 <= prompts <= MOST_PROMPTS or not 2 <= length < 2**31:
            raise InputError(
                f"{prompts} prompts of {length} tokens cannot be compared; at least 1 prompt of 2 "
                f"tokens is needed, at most {MOST_PROMPTS:,} prompts of less than {2**31:,} tokens"
            )
        if self.device not in DEVICES:
            raise InputError(
                f"device {self.device!r} is not known; choose auto, cpu or cuda"
                + perhaps(self.device, DEVICES, {"gpu": "cuda"})
            )
        if self.steps is not None and not 1 <= self.steps <= MOST_STEPS:
            raise InputError(
                f"{self.steps} steps of training cannot be taken; choose 1 to {MOST_STEPS:,}"
            )
        if self.max_kl is not None and not 0 < self.max_kl < 1e300:  # false for a NaN
            raise InputError(
                f"max_kl {self.max_kl} is no limit; give nats per token above 0, such as 0.01"
            )


def settings_of(verify: Settings | bool | None) -> Settings | None:
    """What a proof compares, from what is asked for; None for no proof."""
    return Settings() if verify is True else verify or None
