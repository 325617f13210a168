"""Settings of a proof, each described once for commands, recipes and Python."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from growkit.base.errors import InputError
from growkit.base.names import perhaps

Limits = tuple[float | None, float]
"""Smallest and largest value of a number; a smallest value of None means more than 0."""


def option(
    default: Any,
    help: str,  # noqa: A002
    form: str = "",
    values: Iterable[str] = (),
    limits: Limits | None = None,
) -> Any:
    """A field of a dataclass that is an option of commands and a key of recipes.

    Args:
        default: default of the field.
        help: one line for ``--help``.
        form: placeholder of the value in help texts, e.g. ``FILE``.
        values: the allowed values; empty for any.
        limits: limits of a number, or of each number in a tuple.
    """
    metadata = {"help": help, "form": form, "values": values, "limits": limits}
    return field(default=default, metadata=metadata)


def check_options(settings: Any) -> None:
    """Refuse options beyond their limits, or with a value outside the allowed ones.

    Raises:
        InputError: an option is invalid; the message names it and its allowed values.
    """
    hints = get_type_hints(type(settings))
    for each in fields(settings):
        value, known = getattr(settings, each.name), each.metadata["values"]
        if value is None and each.default is None:
            continue
        if known and value not in known:
            hint = perhaps(value, known, {"gpu": "cuda"})
            choices = ", ".join(known)
            raise InputError(f"{each.name} {value!r} is not known; choose from {choices}{hint}")
        for number in value if isinstance(value, tuple) else (value,):
            if each.metadata["limits"]:
                kind = hints[each.name]
                whole = int in (kind, *get_args(kind))
                check_number(each.name, number, each.metadata["limits"], whole=whole)


def check_number(name: str, value: Any, limits: Limits, *, whole: bool) -> None:
    """Refuse a value that is not a number, or is beyond its limits.

    Raises:
        InputError: the value is invalid; the message names it and its limits.
    """
    least, most = limits
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise InputError(f"{name} is {value!r}; a {'whole ' if whole else ''}number was expected")
    if not (value > 0 if least is None else least <= value) or not value <= most:  # also for a NaN
        first = "more than 0, at most" if least is None else f"{least:,} to"
        last = f"{most:,}" if whole else f"{most:g}"
        raise InputError(f"{name} {value} cannot be used; choose {first} {last}")


SEEDS = (0, 2**63 - 1)
"""Limits of a seed, as random generators require."""

DEVICES = ("auto", "cpu", "cuda", "hpu", "mps", "mtia", "npu", "xpu")
"""Devices that a proof can run on, by torch's names; the first is the default."""


def no_device(name: str) -> str:
    """The error for a device that torch does not see."""
    return f"device is {name}, but torch sees no such device; use --device cpu"


MANY, LONG = 8, 512
"""Default number of prompts, and of tokens in each."""

FEW, SHORT = 4, 48
"""Defaults if every weight was recovered, so that only the function is left to be proved
(``docs/numerics.md``, "How many tokens")."""

SHORT_TEXT = 128
"""Default length of the ``MANY`` windows of a text in that case: its loss is also a result."""

SETTLED = "if every weight was recovered"


@dataclass(frozen=True)
class Settings:
    """Settings of a proof.

    Attributes:
        text: file with real text, or None for seeded random tokens. A ``Path`` becomes a string.
        prompts: number of windows of text, or of random prompts; None for 8, or for 4 if every
            weight was recovered.
        length: tokens in each prompt; None for 512, or for 48 (128 of a text, in 8 windows) if
            every weight was recovered.
        seed: seed of the random prompts.
        device: ``auto`` (torch's accelerator if there is one, else the CPU), ``cpu``, or another
            of ``DEVICES``. What it cannot compute in strict float64, the CPU computes.
        trainability: whether every parameter of the target must be able to train.
        max_kl: largest accepted KL, in nats per token in strict float64, also where the promise
            allows another function; None for no limit.
        steps: AdamW steps that both models take in strict float64, to compare what they learn; None
            for no training.
    """

    text: str | None = option(None, "UTF-8 text to compare on, instead of random tokens.", "FILE")
    prompts: int | None = option(
        None,
        f"Windows of text, or random prompts: {MANY}, or {FEW} {SETTLED}.",
        limits=(1, 1 << 16),  # each prompt is a tensor
    )
    length: int | None = option(
        None,
        f"Tokens in each window or prompt: {LONG}, or {SHORT} ({SHORT_TEXT} of a text, in {MANY} "
        f"windows) {SETTLED}.",
        limits=(2, 2**31 - 1),
    )
    seed: int = option(0, "Seed of everything random.", limits=SEEDS)
    device: str = option("auto", "Where the proof runs: auto, cpu, cuda, xpu, …", values=DEVICES)
    trainability: bool = option(False, "Require that every parameter of OUT can train.")
    max_kl: float | None = option(
        None,
        "Largest accepted KL, in nats per token; exit code 1 above it.",
        "NATS",
        limits=(None, 1e300),
    )
    steps: int | None = option(
        None,
        "Also train both models for this many steps in float64, and compare the results.",
        limits=(1, 10_000),
    )

    @property
    def amount(self) -> tuple[int, int]:
        """Number of prompts, and of tokens in each, if not every weight was recovered."""
        return (
            MANY if self.prompts is None else self.prompts,
            LONG if self.length is None else self.length,
        )

    @property
    def settled(self) -> Settings:
        """The same settings for a target whose weights were all recovered."""
        prompts, length = (FEW, SHORT) if self.text is None else (MANY, SHORT_TEXT)
        return replace(
            self,
            prompts=prompts if self.prompts is None else self.prompts,
            length=length if self.length is None else self.length,
        )

    def __post_init__(self) -> None:
        if isinstance(self.text, Path):  # recipes hold strings
            object.__setattr__(self, "text", str(self.text))
        check_options(self)


def settings_of(verify: Settings | bool | None) -> Settings | None:
    """Convert an argument ``verify`` to the settings of a proof; None for no proof."""
    return Settings() if verify is True else verify or None
