"""The frequencies of rotary position embeddings, as a config gives them to its class."""

from __future__ import annotations

from dataclasses import dataclass

from growkit.base.errors import foreign
from growkit.base.tensors import Config
from growkit.engine.transformers_class import parsed

FIXED = ("linear", "llama3", "yarn", "longrope")
"""Types of scaling whose frequencies depend only on whether a text is longer than a number."""


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings.

    Attributes:
        kind: the type of scaling.
        short: for each pair of coordinates, positions per radian, in texts of at most ``original``
            tokens.
        long: likewise in longer texts.
        factor: factor of cosines and sines.
        original: number of tokens from which ``long`` holds.
    """

    kind: str
    short: tuple[float, ...]
    long: tuple[float, ...]
    factor: float
    original: int

    def same_angles(self, other: Rotary) -> bool:
        """Whether this has only frequencies of the other, each any number of times."""
        fixed = self.short == self.long and other.short == other.long
        switches = self.original == other.original or fixed
        return (
            switches
            and _close({self.factor}, {other.factor})
            and all(
                _close({*mine}, {*theirs})
                for mine, theirs in ((self.short, other.short), (self.long, other.long))
            )
        )


def _close(first: set[float], second: set[float]) -> bool:
    return all(any(abs(x - y) <= 1e-12 * abs(x) for y in second) for x in first)


@foreign("config.json gives no rotary angles", "correct its settings")
def rotary_of(config: Config) -> Rotary | None:
    """The rotary embeddings of a model; None if they are not fixed, or not the same in all layers.

    Raises:
        InputError: transformers does not read the config.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from growkit.engine.strict import strict_float64  # which imports torch

    read = parsed(config)
    rope = getattr(read, "rope_parameters", None) or {}
    kind, context = rope.get("rope_type"), getattr(read, "max_position_embeddings", None)
    if "rope_theta" not in rope or not isinstance(context, int):
        return None
    original = rope.get("original_max_position_embeddings") or context
    if kind == "default":
        width = getattr(read, "head_dim", None) or read.hidden_size // read.num_attention_heads
        width = int(width * rope.get("partial_rotary_factor", 1.0))
        periods = tuple(rope["rope_theta"] ** (pair / width) for pair in range(0, width, 2))
        return Rotary(kind, periods, periods, 1.0, original)
    if kind not in FIXED:
        return None
    with strict_float64():
        (short, factor), (long, _) = (
            ROPE_INIT_FUNCTIONS[kind](read, None, seq_len=length) for length in (None, original + 1)
        )
    first, later = (1 / short).tolist(), (1 / long).tolist()
    return Rotary(kind, tuple(first), tuple(later), float(factor), original)
