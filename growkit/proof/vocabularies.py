"""Checks of the vocabularies of source and target."""

from growkit.base.errors import InputError
from growkit.model.checkpoint.reading import Checkpoint


def check_vocabularies(before: Checkpoint, after: Checkpoint) -> None:
    """Refuse a target with a smaller vocabulary than the source.

    Raises:
        InputError: its vocabulary is smaller.
    """
    sizes = [model.config["vocab_size"] for model in (before, after)]
    if sizes[1] < sizes[0]:
        raise InputError(
            f"vocab_size is {sizes[0]} in {before.folder} and {sizes[1]} in {after.folder}; only a "
            f"target may have more tokens (the source comes first; if it is {after.folder}, swap "
            "the two)"
        )


def check_vocabulary(checkpoint: Checkpoint) -> None:
    """Refuse a config without a usable ``vocab_size``.

    Raises:
        InputError: ``vocab_size`` is not a whole number above 0, or is that of a part.
    """
    size, kind = checkpoint.config.get("vocab_size"), checkpoint.config.get("model_type")
    if size is None and isinstance(checkpoint.config.get("text_config"), dict):
        raise InputError(
            f"the language model inside the {kind} model in {checkpoint.folder} cannot be taken "
            "out by the names of its tensors; save it as a folder of its own"
        )
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(
            f"vocab_size is {size!r} in {checkpoint.folder}; a whole number above 0 was "
            "expected, correct config.json"
        )
