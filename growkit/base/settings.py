"""Settings of a proof; and how a setting is described once for commands, recipes and Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import perhaps


def option(default: Any, help: str, form: str = "", values: Iterable[str] = ()) -> Any:  # noqa: A002
    """A field of a dataclass that is an option of commands and a key of recipes.

    Args:
        default: of the field.
        help: one line for ``--help``.
        form: a freely written value, e.g. ``FILE``.
        values: the values to choose from.
    """
    return field(default=default, metadata={"help": help, "form": form, "values": values})


def check_seed(seed: int) -> None:
    """Refuse a seed that random generators do not take.

    Raises:
        InputError: it is negative or does not fit into 63 bits.
    """
    if not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise InputError(f"seed {seed!r} cannot be used; choose one from 0 to {2**63 - 1}")


DEVICES = ("auto", "cpu", "cuda")
"""Where a proof runs; the first is the default."""

NO_GPU = "device cuda was asked for, but torch sees no GPU; use --device cpu"

MANY, LONG = 8, 512
"""Default number of prompts, and of tokens in each."""

FEW, SHORT = 4, 48
"""Defaults where every weight was recovered, and only the function is left to be shown
(``docs/numerics.md``, "How many tokens")."""

SETTLED = "if every weight was recovered"

MOST_PROMPTS = 1 << 16
"""Each is a tensor by itself."""

MOST_STEPS = 10_000
"""Training steps in a proof."""


@dataclass(frozen=True)
class Settings:
    """What a proof compares.

    Attributes:
        text: file with real text, or None for seeded random tokens. A ``Path`` becomes its name.
        prompts: number of windows of text, or of random prompts; None for 8, or for 4 where every
            weight was recovered.
        length: tokens in each; None for 512, or for 48 there.
        seed: of the random prompts.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
        trainability: whether every parameter of the target must be able to train.
        max_kl: largest KL of a target that is kept, in nats per token in strict float64, also if it
            was asked to be another function; None for no limit.
        steps: AdamW steps that both models take in strict float64, to see whether they learn the
            same; None for no training.
    """

    text: str | None = option(None, "UTF-8 text to compare on; random tokens without.", "FILE")
    prompts: int | None = option(
        None, f"Windows of text, or random prompts: {MANY}, or {FEW} {SETTLED}."
    )
    length: int | None = option(
        None, f"Tokens in each window or prompt: {LONG}, or {SHORT} {SETTLED}."
    )
    seed: int = option(0, "Seed of everything random.")
    device: str = option("auto", "Where the proof runs: auto, cpu or cuda.", values=DEVICES)
    trainability: bool = option(False, "Every parameter of OUT must be able to train.")
    max_kl: float | None = option(
        None, "Largest KL that OUT may cost, in nats per token; exit code 1 above it.", "NATS"
    )
    steps: int | None = option(
        None, "Also train both models for this many steps in float64, and compare what they learn."
    )

    @property
    def amount(self) -> tuple[int, int]:
        """Prompts, and tokens in each, where weights may be lost."""
        return (
            MANY if self.prompts is None else self.prompts,
            LONG if self.length is None else self.length,
        )

    @property
    def settled(self) -> Settings:
        """The same settings for a target whose weights were all recovered."""
        return replace(
            self,
            prompts=FEW if self.prompts is None else self.prompts,
            length=SHORT if self.length is None else self.length,
        )

    def __post_init__(self) -> None:
        if isinstance(self.text, Path):  # recipes hold strings
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
    """The settings of a proof, from an argument ``verify``; None for no proof."""
    return Settings() if verify is True else verify or None
