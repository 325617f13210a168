"""What would end a proof, found out before the seconds that torch and transformers take."""

from importlib.metadata import version

from growkit.base.errors import InputError
from growkit.base.settings import NO_GPU, Settings
from growkit.base.tensors import Weights
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.oracle import check_accepted
from growkit.engine.prompts import check_tokenizer, make_prompts, read_text


def check_settings(settings: Settings, source: Checkpoint) -> None:
    """Refuse what cannot be compared on, as far as that is seen without torch.

    Raises:
        InputError: the text cannot be read or has no tokenizer, or torch is built for CPUs alone.
    """
    if settings.device == "cuda" and version("torch").endswith("+cpu"):
        raise InputError(NO_GPU)
    if settings.text is not None:
        read_text(settings.text)
        check_tokenizer(source.opened)


def preflight(settings: Settings, source: Checkpoint, grown: Weights) -> None:
    """Find out what a proof would refuse, before anything is written.

    Args:
        settings: of the proof.
        source: the source.
        grown: the target, planned.

    Raises:
        InputError: the device, the text, the tokenizer or one of the configs cannot be used, or
            there is no room to train.
    """
    from growkit.engine.loader import loading
    from growkit.engine.strict import choose_device
    from growkit.proof.training import check_room

    check_room(settings, grown.tensors, choose_device(settings.device))
    make_prompts(settings, source.folder, source.config)
    loading(source)
    file = source.folder / "config.json"
    check_accepted(source.config, f"{file}")
    check_accepted(grown.config, f"the grown model's config, made from {file}")


def check_vocabularies(before: Checkpoint, after: Checkpoint) -> None:
    """Refuse a target that cannot answer with all tokens of the source.

    Raises:
        InputError: it cannot, or a config does not say how many there are.
    """
    for checkpoint in (before, after):
        check_vocabulary(checkpoint)
    if after.config["vocab_size"] < before.config["vocab_size"]:
        order = f"the source comes first; if that is {after.folder}, exchange the two"
        raise vocabulary_error(before, after, f"only a target may have more tokens ({order})")


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


def vocabulary_error(before: Checkpoint, after: Checkpoint, why: str) -> InputError:
    """The error for models that do not share a vocabulary."""
    both = before, after
    sizes = " and ".join(f"{each.config['vocab_size']} in {each.folder}" for each in both)
    only = "only models of the same vocabulary can be compared"
    return InputError(f"vocab_size is {sizes}; {only}: {why}")
