"""Sources of models: a local folder, or what an extra fetches into one.

All code that reads a model finds it here (``growkit.model.checkpoint.folder``). Extras find models
at addresses, such as those of the Hub, read quantised weights as dense ones, and take the language
model out of a multimodal one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import of_extras
from growkit.base.tensors import Config
from growkit.engine.user_family import described_family
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import find_format, read_config
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.families.family import Family, family_of, known_family
from growkit.model.model import Headers, Model


@dataclass(frozen=True)
class Source:
    """A located model, not read yet.

    Attributes:
        name: a globally valid address, or the path as given.
        folder: the folder with its files.
        by_address: whether ``name`` is an address.
        base_model: its name in a model card; None for a folder, or without an organisation.
        warning: a warning for users; empty for none.
    """

    name: str
    folder: Path
    by_address: bool = False
    base_model: str | None = None
    warning: str = ""

    def open_whole(self, described: Family | None = None) -> Checkpoint:
        """Open the checkpoint; a quantised one is read as a dense model.

        Args:
            described: see ``Model``.

        Raises:
            InputError: see ``Checkpoint``; or growkit does not read the quantised weights.
        """
        checkpoint = Checkpoint(self.folder)
        for extra in _extras("dequantising"):
            checkpoint = extra.dense(checkpoint)
        checkpoint.published = checkpoint.config
        checkpoint.config = _with_current_keys(checkpoint.config)
        checkpoint.described = described
        return checkpoint

    def open(self, described: Family | None = None) -> Checkpoint:
        """Open the checkpoint, or the language model inside a multimodal one.

        Args:
            described: see ``Model``.

        Raises:
            InputError: see ``Checkpoint``; or transformers does not accept its config.
        """
        return language_model_of(self.open_whole(described))

    def headers(self, described: Family | None = None) -> Model:
        """Open the checkpoint for a plan; without weights, the headers that its config implies.

        Args:
            described: see ``Model``.

        Raises:
            InputError: see ``Checkpoint``; or no family knows the model.
        """
        folder = Folder(self.folder)
        try:
            find_format(folder)
        except InputError:
            config = read_config(folder)
            folder.check_files()
            where = str(folder.path / "config.json")
            config, quantised = _dense_config(config, where)
            config = _with_current_keys(config)
            headers = Headers(family_of(config, where, described), config, where)
            headers.quantised = quantised
            return headers
        return self.open_whole(described)


def _extras(name: str) -> list[ModuleType]:
    """The modules of a name in the extras: they read checkpoints in other ways."""
    return [import_module(extra) for extra in of_extras(name)]


def _dense_config(config: Config, where: str) -> tuple[Config, str]:
    """The config of the dense model, and how a quantised one is stored; empty for a dense one."""
    stored = ""
    for extra in _extras("dequantising"):
        config, stored = extra.dense_config(config, where)
    return config, stored


def find(model: Path | str, *, weights: bool = True) -> Source:
    """Find a model, and fetch it if it is at an address.

    Args:
        model: a path, or an address, which an extra understands.
        weights: whether weights are needed, or only the files next to them.

    Raises:
        InputError: the address is malformed, or the model cannot be fetched. For a path, opening
            the model reports errors.
    """
    elsewhere = (extra.find_at_address(model, weights) for extra in _extras("addresses"))
    return next(filter(None, elsewhere), None) or Source(str(Path(model)), Path(model))


def open_both(source: Source, target: Source) -> tuple[Checkpoint, Checkpoint]:
    """Open two models for a comparison, or the language models inside of multimodal ones.

    Raises:
        InputError: see ``Source.open``.
    """
    after = target.open_whole()
    if after.wrappers:
        raise InputError(f"{after.notes[0]}, but users would not; save the model without them")
    before = source.open_whole()
    inner, inner_after = language_model_inside(before), language_model_inside(after)
    if inner_after:  # a check of the extra compares the rest
        return inner or before, inner_after
    same = inner and inner.config.get("model_type") == after.config.get("model_type")
    return inner if inner and same else language_model_of(before), after


def language_model_of(checkpoint: Checkpoint) -> Checkpoint:
    """Extract the language model of a multimodal checkpoint; return any other unchanged.

    Raises:
        InputError: transformers does not accept the config of the whole model.
    """

    def is_known(model: Model) -> bool:
        return known_family(model.config, model.described) is not None

    if is_known(checkpoint):
        return checkpoint
    inner = language_model_inside(checkpoint)
    return inner if inner and is_known(inner) else checkpoint


def language_model_inside(checkpoint: Checkpoint) -> Checkpoint | None:
    """The language model inside a multimodal checkpoint; None if none can be taken out.

    Raises:
        InputError: transformers does not accept the config of the whole model.
    """
    views = (extra.view_inside(checkpoint) for extra in _extras("language_models"))
    return next(filter(None, views), None)


def _with_current_keys(config: Config) -> Config:
    """A config that growkit does not describe, with the keys that its class has today."""
    for extra in _extras("descriptions"):
        config = extra.with_keys_of_class(config)
    return config


def family_for(source: Source, description: Mapping[str, Any] | None) -> Family | None:
    """The described family of a source; extras describe types of which growkit has none.

    Args:
        source: the source.
        description: a description by a user; None for none.

    Returns:
        The family; None if growkit's own describe the source.

    Raises:
        InputError: the description is invalid, parts of its class cannot be described, or its
            quantised weights are not read.
    """
    folder = Folder(source.folder)
    config = read_config(folder)
    kind = config.get("model_type")
    if description is not None or not isinstance(kind, str) or known_family(config):
        return described_family(description)
    where = str(source.folder / "config.json")
    config, _ = _dense_config(config, where)
    inner = (extra.config_inside(config, source.folder) for extra in _extras("language_models"))
    config = next(filter(None, inner), {}) or _with_current_keys(config)
    if known_family(config):
        return None
    for extra in _extras("families"):
        if inferred := extra.describe(config, where):
            return described_family(*inferred)
    return None
