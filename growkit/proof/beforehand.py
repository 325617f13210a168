"""What would end a proof, found out before the seconds that torch and transformers take."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from growkit.base.errors import InputError
from growkit.base.settings import NO_GPU, Settings
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import Weights
from growkit.engine.texts import check_tokenizer, read_text


def check_settings(settings: Settings, source: Checkpoint) -> None:
    """Refuse what cannot be compared on, as far as that is seen without torch.

    Raises:
        InputError: the text cannot be read or has no tokenizer, or torch is built without GPUs.
    """
    if settings.text is not None:
        read_text(settings.text)
        check_tokenizer(source.opened)
    if settings.device == "cuda" and "torch" not in sys.modules and _built_without_gpus():
        raise InputError(NO_GPU)


def preflight(settings: Settings | None, source: Checkpoint, grown: Weights) -> None:
    """Find out what a proof would refuse, before anything is written.

    Args:
        settings: of the proof; None for no proof.
        source: the source.
        grown: the target, planned.

    Raises:
        InputError: see ``growkit.proof.verdict.preflight``.
    """
    if settings is not None:
        from growkit.proof import verdict

        verdict.preflight(settings, source, grown)


def _built_without_gpus() -> bool:
    try:
        return version("torch").endswith("+cpu")
    except PackageNotFoundError:
        return False
