"""How the candidates of a probe are trained, as people set it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import perhaps
from growkit.base.settings import DEVICES, option

COMPUTED = ("float32", "bfloat16")
"""What a training computes in; weights and moments are float32."""

MOST_STEPS, MOST_SEEDS, MOST_RATES, MOST_TOKENS = 100_000, 100, 20, 1 << 24
"""Limits: of a training, and of the tokens of a step."""

LARGEST = 1e15
"""Rate or decay; what comes of them must stay within float32."""


@dataclass(frozen=True)
class ProbeSettings:
    """How every candidate is trained, and the source beside them.

    Attributes:
        steps: of AdamW that each takes.
        seeds: trainings of each, on as many orders of the same windows, the same for all.
        lr: learning rates of the source, of which every candidate gets the best; a candidate's
            follow from each by the law of updates.
        weight_decay: of all but norms and biases, as transformers' Trainer has it.
        warmup: steps until the rate is reached. Then it stays, so that a training is one of its
            length wherever it is cut.
        batch: windows in a step.
        length: tokens in a window, at most as many as the source takes.
        dtype: ``float32``, or ``bfloat16`` by autocast; None for bfloat16 on a GPU alone.
        device: ``auto`` (CUDA when there is one), ``cpu`` or ``cuda``.
    """

    steps: int = option(120, "Steps of AdamW that each takes.")
    seeds: int = option(3, "Trainings of each, on other orders of the text.")
    lr: tuple[float, ...] = option(
        (1e-4,),
        "Learning rates of SRC; each candidate gets the best, by the law of updates.",
        "RATE…",
    )
    weight_decay: float = option(0.1, "Of all but norms and biases, as in Trainer.")
    warmup: int = option(10, "Steps until the rate is reached; then it stays.")
    batch: int = option(4, "Windows in a step.")
    length: int = option(128, "Tokens in a window, at most.")
    dtype: str | None = option(
        None,
        "What is computed in: float32, or bfloat16 by autocast, the default on a GPU.",
        values=COMPUTED,
    )
    device: str = option("auto", "Where it trains: auto, cpu or cuda.", values=DEVICES)

    def __post_init__(self) -> None:
        given: Any = self.lr
        rates = (given,) if isinstance(given, int | float | str) else tuple(given)
        _check_numbers("lr", *rates)
        _check_numbers("weight_decay", self.weight_decay)
        object.__setattr__(self, "lr", tuple(dict.fromkeys(map(float, rates))))
        for name, fewest, most in (
            ("steps", 1, MOST_STEPS),
            ("seeds", 2, MOST_SEEDS),
            ("warmup", 0, MOST_STEPS),
            ("batch", 1, MOST_TOKENS),
            ("length", 2, MOST_TOKENS),
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or not fewest <= value <= most:
                why = ", as one alone shows no spread" if name == "seeds" else ""
                raise InputError(f"{name} {value} cannot be had; give {fewest} to {most:,}{why}")
        if self.batch * self.length > MOST_TOKENS:
            raise InputError(
                f"{self.batch:,} windows of {self.length:,} tokens are too many for a step; give "
                f"fewer or shorter ones, of at most {MOST_TOKENS:,} tokens in all"
            )
        if not 1 <= len(self.lr) <= MOST_RATES:
            raise InputError(f"{len(self.lr)} learning rates were given; give 1 to {MOST_RATES}")
        for rate in self.lr:
            if not 0 < rate <= LARGEST:  # false for a NaN
                raise InputError(
                    f"lr {rate:g} is no learning rate; give one above 0, such as 1e-4, of at most "
                    f"{LARGEST:g}"
                )
        if not 0 <= self.weight_decay <= LARGEST:
            raise InputError(
                f"weight_decay {self.weight_decay:g} cannot be had; give 0 to {LARGEST:g}"
            )
        for name, known in (("dtype", (None, *COMPUTED)), ("device", DEVICES)):
            value = getattr(self, name)
            if value not in known:
                names = [each for each in known if each]
                raise InputError(
                    f"{name} {value!r} is not known; choose {' or '.join(names)}"
                    + perhaps(value, names, {"gpu": "cuda"} if name == "device" else {})
                )


def _check_numbers(name: str, *values: object) -> None:
    for value in values:
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{name} is {value!r}; a number was expected")
