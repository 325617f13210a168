"""Where models come from: from a path or address to a checkpoint.

Everything that reads a model asks for it here. An address belongs to one kind of source; anything
else is a folder on this machine. A new kind is one new file in this folder, which defines ``KIND``.
If its files are read in another way, it returns a subclass of ``Source``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

from growkit.base.errors import InputError
from growkit.base.names import ADDRESS
from growkit.base.registry import members
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.model_files import check_names, weight_files
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import Weights
from growkit.engine.inside import alone
from growkit.families.headers import headers_of


@dataclass(frozen=True)
class Source:
    """A model that was found but not read.

    Attributes:
        name: the address that leads to it from anywhere, or the path as it was given.
        folder: that has its files.
        base_model: what a model card calls it; None for a folder, or without an organisation.
        warning: what users should know of it; empty for nothing.
    """

    name: str
    folder: Path
    base_model: str | None = None
    warning: str = ""

    @property
    def by_address(self) -> bool:
        """Whether its name is an address, not the path of its folder."""
        return ADDRESS.match(self.name) is not None

    def whole(self) -> Checkpoint:
        """The checkpoint; see there for errors."""
        return Checkpoint(self.folder)

    def open(self) -> Checkpoint:
        """The checkpoint; of a model that sees or hears as well, the language model inside of it.

        Raises:
            InputError: see ``Checkpoint``; or transformers does not take its config.
        """
        return alone(self.whole())

    def headers(self) -> Weights:
        """The checkpoint, for a plan; where there are no weights, as its config implies them.

        Raises:
            InputError: see ``Checkpoint``, or ``headers_of``.
        """
        folder = Folder(self.folder)
        config = folder.json("config.json")
        check_names(str(folder), os.listdir(folder.path))
        try:
            weight_files(folder, config)
        except InputError:
            return headers_of(folder)
        return self.whole()


class SourceKind(Protocol):
    """What the file of a kind defines."""

    def knows(self, given: str) -> bool:
        """Whether something is an address of this kind.

        Raises:
            InputError: it can be nothing else, but is malformed.
        """
        ...

    def find(self, given: str, *, weights: bool) -> Source:
        """The model of an address.

        Args:
            given: the address.
            weights: whether weights are needed, or only the files next to them.

        Raises:
            InputError: there is none, or it cannot be had.
        """
        ...


def find(given: Path | str, *, weights: bool = True) -> Source:
    """Find a model, and fetch it if it is not on this machine.

    Args:
        given: a path or an address.
        weights: see ``SourceKind.find``.

    Raises:
        InputError: an address leads nowhere. Of a path, opening it reports that.
    """
    kind = _kind_of(str(given))
    return kind.find(str(given), weights=weights) if kind else Source(str(Path(given)), Path(given))


def leads_to_folder(given: str) -> bool:
    """Whether something is an address that leads to a folder; see ``SourceKind.knows``."""
    return _kind_of(given) is not None


def pair(source: Source, target: Source) -> tuple[Checkpoint, Checkpoint]:
    """Two models to be compared: a language model alone with that inside of its source.

    Raises:
        InputError: see ``Source.open``.
    """
    after = target.whole()
    return source.whole() if "text_config" in after.config else source.open(), after


def _kind_of(given: str) -> SourceKind | None:
    """The kind of an address; None for a path."""
    kinds = cast("list[SourceKind]", list(members(__name__, "KIND").values()))
    found = [kind for kind in kinds if kind.knows(given)]
    assert len(found) <= 1, f"{given} is an address of several kinds"
    return found[0] if found else None
