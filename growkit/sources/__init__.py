"""Where models come from: a folder on this machine, or the Hub.

Everything that reads a model asks for it here. A model on the Hub is fetched into a folder first.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from growkit.base.errors import InputError
from growkit.base.tensors import Weights
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.model_files import check_names, weight_files
from growkit.checkpoint.reading import MOST_DIGITS, Checkpoint
from growkit.engine.inside import alone
from growkit.families.family import family_of
from growkit.families.headers import Headers
from growkit.sources.hub import address_of, fetch


@dataclass(frozen=True)
class Source:
    """A model that was found but not read.

    Attributes:
        name: the address that leads to it from anywhere, or the path as it was given.
        folder: that has its files.
        by_address: whether ``name`` is an address.
        base_model: its name in a model card; None for a folder, or without an organisation.
        warning: what users should know of it; empty for nothing.
    """

    name: str
    folder: Path
    by_address: bool = False
    base_model: str | None = None
    warning: str = ""

    def whole(self) -> Checkpoint:
        """The checkpoint; see there for errors."""
        return Checkpoint(self.folder)

    def open(self) -> Checkpoint:
        """The checkpoint; of a multimodal model, the language model inside of it.

        Raises:
            InputError: see ``Checkpoint``; or transformers does not take its config.
        """
        return alone(self.whole())

    def headers(self) -> Weights:
        """The checkpoint, for a plan; without weights, the headers that its config implies.

        Raises:
            InputError: see ``Checkpoint``; or no family knows the model.
        """
        folder = Folder(self.folder)
        config = folder.json("config.json", MOST_DIGITS)
        check_names(str(folder), os.listdir(folder.path))
        try:
            weight_files(folder, config)
        except InputError:
            where = str(folder.path / "config.json")
            return Headers(family_of(config, where), config, where)
        return self.whole()


def find(given: Path | str, *, weights: bool = True) -> Source:
    """Find a model, and fetch it if it is on the Hub.

    Args:
        given: a path, or an address (see ``address_of``).
        weights: whether weights are needed, or only the files next to them.

    Raises:
        InputError: the address is malformed, or the model cannot be fetched. For a path, opening
            the model reports errors.
    """
    address = address_of(given)
    if address is None:
        return Source(str(Path(given)), Path(given))
    name, revision = address
    folder, warning = fetch(name, revision, str(given), weights)
    base_model = name if "/" in name else None
    return Source(f"hf://{name}@{folder.name}", folder, True, base_model, warning)


def pair(source: Source, target: Source) -> tuple[Checkpoint, Checkpoint]:
    """Two models to be compared: a language model alone with that inside of its source.

    Raises:
        InputError: see ``Source.open``.
    """
    after = target.whole()
    return source.whole() if "text_config" in after.config else source.open(), after
