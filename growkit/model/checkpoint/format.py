"""Formats of weights: how a model is found by its files, and what its tensors are named and hold.

Each file of ``growkit.model.checkpoint.formats``, or of ``weight_formats`` in an extra, defines one
format, as ``FORMAT``. It recognises its files in a folder, opens them, knows the config, and
turns its tensors into those that the class in transformers reads, and back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import registered
from growkit.base.tensors import Config, Weights
from growkit.model.checkpoint.folder import FOLLOWED, SINGLE, Folder, instead_of_weights, no_folder
from growkit.model.checkpoint.weight_file import StoredWeights
from growkit.model.checkpoint.writing import Shard
from growkit.model.model import Model

MAX_DIGITS = 18
"""Largest number of digits of a whole number in a config; more do not fit into 64 bits."""


@dataclass(frozen=True)
class Output:
    """A model as a format writes it.

    Attributes:
        tensors: the stored tensors.
        shards: the files that hold them.
        files: contents of the files beside these, by name, if they do not depend on the shards.
        warnings: sentences on what is not written.
        config: keys of ``config.json`` that the format's program reads and transformers does not
            write.
    """

    tensors: Weights
    shards: Sequence[Shard]
    files: Mapping[str, bytes]
    warnings: Sequence[str] = ()
    config: Config = field(default_factory=dict)


class Format:
    """A format of weights.

    Attributes:
        title: name for users.
        name: name on the command line, as a conversion's target; empty if it is none.
        in_recipes: name as ``format`` of a recipe; empty if it is none.
        models: types of models that are written; empty for any.
        self_contained: whether config and tokenizer are in the files, not next to them.
        rank: formats of a lower rank are tried first; files of two of the same rank are refused.
        read_by_transformers: whether ``from_pretrained`` reads these files by itself.
        complete: whether the config has every setting that the class has by no default.
        beside: names of the files beside those with weights, without ``config.json``.
    """

    title: str
    name: str = ""
    in_recipes: str = ""
    models: Collection[str] = ()
    self_contained: bool = False
    rank: int = 2
    read_by_transformers: bool = False
    complete: bool = True
    beside: Collection[str] = ()

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """Find the files of a model.

        Returns:
            Their names, each with the tensors that it must hold as far as another file lists them;
            empty if the folder holds no model of this format.

        Raises:
            InputError: a file is missing or damaged.
        """
        raise NotImplementedError

    def open(self, folder: Folder, names: Sequence[str]) -> Sequence[StoredWeights]:
        """Read the headers of the files; see ``StoredWeights``.

        Raises:
            InputError: a file is damaged.
        """
        raise NotImplementedError

    def config(self, folder: Folder, files: Sequence[StoredWeights]) -> Config:
        """The config of the model, as transformers writes it.

        Raises:
            InputError: there is none, or transformers has no such model.
        """
        return folder.json("config.json", MAX_DIGITS)

    def to_transformers(self, stored: Weights, config: Config) -> Weights:
        """The tensors with the names of transformers, made from stored ones when they are read.

        Raises:
            InputError: a tensor is not one of such a model.
        """
        return stored

    def from_transformers(self, model: Model, config: Config) -> Weights:
        """The stored tensors, made from those of a model when they are read.

        Raises:
            InputError: the format has no place for a tensor of the model.
        """
        return model

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """Plan the files that hold a model.

        Args:
            model: the model, with the names of transformers.
            config: its config, with the defaults of its class.
            source: the folder that it was read from, for its tokenizer.
            shard_bytes: limit for the tensors of a file, if the format has several files.

        Raises:
            InputError: the format, as far as growkit knows it, cannot hold the model.
        """
        raise NotImplementedError

    def check_held(self, files: Output, source: Model, lineage: Any) -> None:
        """Refuse a model of which another program would read other settings or tensors.

        Args:
            files: the planned files.
            source: the source.
            lineage: the plan that keeps it, a ``growkit.planning.plan.Lineage``.

        Raises:
            InputError: a setting or tensor is lost; the message names it.
        """

    def notes(self, folder: Folder, names: Sequence[str]) -> Iterator[str]:
        """Sentences on what is in the folder, but not read."""
        yield from ()


def formats() -> tuple[Format, ...]:
    """All formats, in the order in which they are tried."""
    known = registered("weight_formats", "FORMAT", "growkit.model.checkpoint.formats").values()
    return tuple(sorted(known, key=lambda one: one.rank))


def find_format(folder: Folder) -> tuple[Format, Mapping[str, Sequence[str]]]:
    """Find the format of a folder, and its files with weights; see ``Format.files``.

    Raises:
        InputError: the folder holds no weights, or those of two formats, or a file is missing.
    """
    for _, alike in groupby(formats(), key=lambda one: one.rank):
        matches = [(one, files) for one in alike if (files := one.files(folder))]
        if len(matches) > 1:
            both = " and ".join(f"{min(files)} ({one.title})" for one, files in matches)
            raise InputError(
                f"{folder} has {both}, which are models of two formats; move one of them into a "
                "folder of its own"
            )
        if matches:
            return matches[0]
    if folder.only:
        raise InputError(no_folder(folder.path / folder.only))
    folder.require("config.json")
    folder.check_files()
    why = instead_of_weights(folder.path) or f"{', '.join(SINGLE)} or an index was expected"
    raise InputError(f"{folder} has no weights; {why}")


def other_formats(folder: Folder, read: Collection[str]) -> Iterator[str]:
    """A sentence on each format in which a folder holds a model in other files than those read."""
    for one in formats():
        with suppress(InputError):  # nobody asked for that model
            if unread := sorted({*one.files(folder)}.difference(read)):
                yield (
                    f"{folder} also has {unread[0]} ({one.title}), which was not read; give it in "
                    "a folder of its own if you mean that model"
                )


def refuse_followed(config: Config, folder: Folder) -> None:
    """Refuse a config with which transformers loads something else than the folder's usual files.

    Raises:
        InputError: the message names the key.
    """
    for key, what in FOLLOWED.items():
        if config.get(key) is not None:
            raise InputError(
                f"config.json in {folder} has {key}, with which transformers loads {what}; "
                "load the model with transformers, save it again and use that copy"
            )


def read_config(folder: Folder) -> Config:
    """The config of a model; that of a folder without weights is in ``config.json``.

    Raises:
        InputError: see ``Format.config``.
    """
    if folder.only or not folder.has("config.json"):
        one, files = find_format(folder)
        return one.config(folder, one.open(folder, [*files]))
    return folder.json("config.json", MAX_DIGITS)
