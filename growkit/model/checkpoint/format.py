"""Formats of weights: how a model is found by its files, and what its tensors are named and hold.

Each file of ``growkit.model.checkpoint.formats``, or of ``weight_formats`` in an extra, defines one
format, as ``FORMAT``. It recognises its files in a folder, opens them, knows the config, and
describes as data how its tensors hold those that the class in transformers reads (``Held``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import registered
from growkit.base.tensors import Config, Weights
from growkit.model.checkpoint.folder import FOLLOWED, SINGLE, Folder, instead_of_weights, no_folder
from growkit.model.checkpoint.layout import Held
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
    """

    tensors: Weights
    shards: Sequence[Shard]
    files: Mapping[str, bytes]
    warnings: Sequence[str] = ()


class Format:
    """A format of weights.

    Attributes:
        title: name for users.
        name: name on the command line, as a conversion's target; empty if it is not written.
        models: types of models that are written; empty for any.
        self_contained: whether config and tokenizer are in the files, not next to them.
        rank: formats of a lower rank are tried first; files of two of the same rank are refused.
        read_by_transformers: whether ``from_pretrained`` reads these files by itself.
        complete: whether the config has every setting that the class has by no default.
    """

    title: str
    name: str = ""
    models: Collection[str] = ()
    self_contained: bool = False
    rank: int = 2
    read_by_transformers: bool = False
    complete: bool = True

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

    def layout(self, config: Config) -> Sequence[Held]:
        """How the stored tensors hold those of transformers; empty if they have the same names."""
        return ()

    def check_type(self, config: Config) -> None:
        """Refuse a type that is not among ``models``.

        Raises:
            InputError: see above.
        """
        if str(config.get("model_type")) not in self.models:
            raise InputError(
                f"a checkpoint of {self.title} is read if it is a {' or '.join(self.models)}, but "
                f"config.json says {config.get('model_type')!r}; convert it to safetensors with "
                f"{self.title}"
            )

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

    def notes(self, folder: Folder, names: Sequence[str]) -> Iterator[str]:
        """Sentences on what is in the folder, but not read."""
        yield from ()


class ForeignSettings:
    """Settings of another program; what is not taken is not known.

    Args:
        stored: the settings, by name.
        prefix: beginning of the names of those in question, which is left out.
    """

    def __init__(self, stored: Mapping[str, Any], prefix: str = "") -> None:
        self._prefix = prefix
        self._left = {k[len(prefix) :]: v for k, v in stored.items() if k.startswith(prefix)}

    def take(self, key: str, default: Any = None, *kinds: type) -> Any:
        """A setting of certain types, or a number without any.

        Raises:
            ValueError: it has another type.
        """
        value = self._left.pop(key, default)
        if value is not default and type(value) not in (kinds or (int, float)):
            raise ValueError(f"{self._prefix}{key} is {value!r:.80}")
        return value

    def expect(self, key: str, *expected: Any) -> None:
        """Refuse a setting that is there and has none of these values.

        Raises:
            ValueError: it has another value.
        """
        if (value := self._left.pop(key, expected[0])) not in expected:
            raise ValueError(
                f"{self._prefix}{key} is {value!r:.80}, where {expected[0]!r} was expected"
            )

    def ignore(self, *keys: str) -> None:
        """Leave out settings that do not change what the model computes."""
        for key in keys:
            self._left.pop(key, None)

    def finish(self) -> None:
        """Refuse what is left.

        Raises:
            ValueError: a setting is not known.
        """
        if self._left:
            raise ValueError(f"{self._prefix}{min(self._left)} is a setting that is not known")


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
