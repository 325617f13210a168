"""What two models must have in common to be compared, and how much of them is read for that."""

from __future__ import annotations

from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import total_bytes


def check_vocabularies(before: Checkpoint, after: Checkpoint) -> None:
    """Refuse a target that cannot answer with all tokens of the source.

    Raises:
        InputError: it cannot, or a config does not say how many there are.
    """
    for checkpoint in (before, after):
        check_vocabulary(checkpoint)
    if after.config["vocab_size"] < before.config["vocab_size"]:
        raise other_vocabulary(
            before,
            after,
            "only a target may have more tokens (the source comes first; if that is "
            f"{after.folder}, exchange the two)",
        )


def check_vocabulary(checkpoint: Checkpoint) -> None:
    """Refuse a config that does not say how many tokens there are.

    Raises:
        InputError: it does not.
    """
    size = checkpoint.config.get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(
            f"vocab_size is {size!r} in {checkpoint.folder}; a whole number above 0 was "
            "expected, correct config.json"
        )


def other_vocabulary(before: Checkpoint, after: Checkpoint, why: str) -> InputError:
    """What is said of models that do not answer with the same tokens."""
    sizes = [checkpoint.config["vocab_size"] for checkpoint in (before, after)]
    return InputError(
        f"vocab_size is {sizes[0]} in {before.folder} and {sizes[1]} in {after.folder}; only "
        f"models of the same vocabulary can be compared: {why}"
    )


def bytes_of(before: Checkpoint, after: Checkpoint) -> int:
    """The number of bytes that a proof reports as done, but for rounding."""
    return 2 * (total_bytes(before.tensors) + total_bytes(after.tensors))
