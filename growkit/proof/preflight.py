"""Checks before a proof begins, some of them before torch and transformers are imported."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

from growkit.base.errors import InputError
from growkit.base.settings import Settings, no_device
from growkit.engine.prompts import check_tokenizer, make_prompts, read_text
from growkit.engine.transformers_class import check_accepted
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.model import Model
from growkit.proof.check import checks


def check_settings(settings: Settings, source: Checkpoint, *, adapter: bool = False) -> None:
    """Refuse settings that cannot be used, as far as this shows without importing torch.

    Args:
        settings: settings of the proof.
        source: the source.
        adapter: whether both models have an adapter.

    Raises:
        InputError: the text cannot be read or has no tokenizer, torch is built for CPUs only,
            or PEFT is missing.
    """
    if settings.device not in ("auto", "cpu") and version("torch").endswith("+cpu"):
        raise InputError(no_device(settings.device))
    if adapter and find_spec("peft") is None:
        raise InputError(
            "adapters are proved with PEFT, which is not installed; install growkit[adapters], or "
            "leave out the proof or the adapter"
        )
    if settings.text is not None:
        read_text(settings.text)
        instead = ", or leave out --text to compare on random tokens"
        check_tokenizer(source.opened, instead)


def preflight(settings: Settings, source: Checkpoint, grown: Model) -> None:
    """Refuse everything that the proof would refuse, before anything is written.

    Args:
        settings: settings of the proof.
        source: the source.
        grown: the planned target.

    Raises:
        InputError: the device, the text, the tokenizer or one of the configs cannot be used, or
            a check refuses.
    """
    from growkit.engine.device import choose_device
    from growkit.engine.loader import loading

    choose_device(settings.device)
    for check in checks().values():
        if check.preflight:
            check.preflight(settings, grown)
    make_prompts(settings, source.folder, source.config)
    loading(source)
    file = source.folder / "config.json"
    check_accepted(grown.config, f"the grown model's config, made from {file}")
