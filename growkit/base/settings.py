"""Settings of a proof and of a run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from growkit.base.options import check_options, documented, option

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
(``docs/explanation/numerics.md``, "How many tokens")."""

SHORT_TEXT = 128
"""Default length of the ``MANY`` windows of a text in that case: its loss is also a result."""

IF_RECOVERED = "if every weight was recovered"

MAX_WHOLE_MODELS = 1 << 29
"""Limit, in bytes of float64, for two models that a proof also runs whole; the rest of it needs
only a layer at a time."""


@documented
@dataclass(frozen=True)
class Settings:
    """Settings of a proof."""

    text: str | None = option(None, "UTF-8 text to compare on, instead of random tokens.", "FILE")
    prompts: int | None = option(
        None,
        f"Windows of text, or random prompts: {MANY}, or {FEW} {IF_RECOVERED}.",
        limits=(1, 1 << 16),  # each prompt is a tensor
    )
    length: int | None = option(
        None,
        f"Tokens in each window or prompt: {LONG}, or {SHORT} ({SHORT_TEXT} of a text, in {MANY} "
        f"windows) {IF_RECOVERED}.",
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
    def if_weights_recovered(self) -> Settings:
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


@dataclass(frozen=True)
class Running:
    """Options of a run, beyond its recipe; see ``growkit.run``."""

    overwrite: bool = option(False, "Replace an OUT that growkit wrote.")
    proof_only: bool = option(
        False, "Keep the proof but no weights, which growkit.load can recompute from SRC."
    )
    dry_run: bool = option(False, "Show the plan; write nothing.")
