"""Formats of weights: how a model is found by its files, and what its tensors are named and hold.

Each file of ``growkit.checkpoint.formats``, or of ``weight_formats`` in an extra, defines one
format, as ``FORMAT``. It recognises its files in a folder, opens them, knows the config, and
describes as data how its tensors hold those that the class in transformers reads (``Held``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, np, registered, torch
from growkit.base.tensors import Config, TensorInfo, Weights, full
from growkit.base.torch_internals import stored_dtypes
from growkit.checkpoint.folder import FOLLOWED, SINGLE, Folder, instead_of_weights, no_folder
from growkit.checkpoint.weight_file import MAX_SIZE, StoredWeights
from growkit.families.axes import ORDERS, Order, Pattern
from growkit.families.description import MAX_EXPERTS

MAX_DIGITS = 18
"""Largest number of digits of a whole number in a config; more do not fit into 64 bits."""


class Format:
    """A format of weights.

    Attributes:
        title: name for users.
        rank: formats of a lower rank are tried first.
        read_by_transformers: whether ``from_pretrained`` reads these files by itself.
        complete: whether the config has every setting that the class has by no default.
    """

    title: str
    rank: int = 1
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
    known = registered("weight_formats", "FORMAT", "growkit.checkpoint.formats").values()
    return tuple(sorted(known, key=lambda one: one.rank))


def find_format(folder: Folder) -> tuple[Format, Mapping[str, Sequence[str]]]:
    """Find the format of a folder, and its files with weights; see ``Format.files``.

    Raises:
        InputError: the folder holds no weights, or a file is missing.
    """
    for one in formats():
        if files := one.files(folder):
            return one, files
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


# The tensors of transformers in those of a format

COUNTS = re.compile(r"\{(\w+)\}")
"""A placeholder for a number in the name of a tensor."""


@dataclass(frozen=True)
class Held:
    """A tensor of a format, and the tensors of transformers that it holds.

    A number that the names of transformers count and its own does not is a leading dimension: one
    tensor for all experts, say.

    Attributes:
        stored: its name, with the placeholders ``{layer}`` and ``{expert}``, and ``{name}`` for any
            name.
        names: names of the tensors of transformers, whose rows follow each other; empty if the
            class computes the tensor.
        rows: number of rows of each of these as patterns of ``growkit.families.axes``, such as
            ``heads.head_dim``; empty if all have as many.
        order: the order in which the rows are stored, if it is another one; it needs ``rows``.
        transposed: whether the matrix is stored transposed.
        offset: number that is added to every stored element.
        padded: whether more rows may follow, which the class does not have.
    """

    stored: str
    names: tuple[str, ...]
    rows: tuple[str, ...] = ()
    order: Order | None = None
    transposed: bool = False
    offset: float = 0.0
    padded: bool = False

    def with_pairs(self, heads: str) -> Held:
        """The same, with rows that rotate as a pair next to each other in all heads of an axis.

        Without an axis, nothing changes.
        """
        if not heads:
            return self
        order = ORDERS["head_by_head_interleaved"](heads, "head_dim")
        return replace(self, rows=(f"{heads}.head_dim",), order=order)


class Piece(NamedTuple):
    """A tensor of transformers in a stored one; the attributes are those of ``Held``.

    Attributes:
        stored: name of the stored tensor.
        at: its place along the leading dimensions of the stored tensor.
        rows: the stored row of each of its rows; None for all rows, in their order.
    """

    stored: str
    at: tuple[int, ...] = ()
    rows: range | tuple[int, ...] | None = None
    transposed: bool = False
    offset: float = 0.0

    def info(self, stored: TensorInfo) -> TensorInfo:
        """The header of the tensor, from that of the stored one."""
        shape = list(stored.shape[len(self.at) :])
        if self.transposed:
            shape[:2] = shape[1::-1]
        if self.rows is not None:
            shape[0] = len(self.rows)
        dtype = "F64" if self.offset else stored.dtype  # the difference may need more bits
        return TensorInfo(tuple(shape), dtype)

    def cuts(self, stored: int) -> int:
        """See ``Weights.cuts``."""
        if self.transposed:
            return 2 if stored >= len(self.at) + 2 else 0
        return max(0, stored - len(self.at))

    def read(self, file: Weights, *where: slice | None) -> Tensor:
        """Read a part of the tensor."""
        info = self.info(file.tensors[self.stored])
        if self == Piece(self.stored):
            return file.read(self.stored, *where)
        with stored_dtypes():  # strict float64 must not apply
            asked = full(info.shape, where)
            inside: Sequence[int] | None = None
            if self.rows is not None:
                rows = self.rows[asked[0]]
                start, stop = min(rows, default=0), max(rows, default=-1) + 1
                inside = [row - start for row in rows]
                asked[0] = slice(start, stop)
            if self.transposed:
                asked[:2] = asked[1::-1]
            leading = [slice(place, place + 1) for place in self.at]
            tensor = file.read(self.stored, *leading, *asked)
            tensor = tensor.reshape(tensor.shape[len(leading) :])
            if self.transposed:
                tensor = tensor.transpose(0, 1)
            if inside is not None and inside != [*range(len(inside))]:
                tensor = tensor[torch.tensor(inside, dtype=torch.long)]
            if self.offset:
                tensor = tensor.double() - self.offset
            return tensor.contiguous()


def arrange(
    layout: Sequence[Held],
    stored: Mapping[str, TensorInfo],
    config: Config,
    where: Callable[[str], str],
) -> dict[str, Piece]:
    """Find the tensors of transformers in those of a format.

    Args:
        layout: the format's layout.
        stored: headers of the stored tensors.
        config: the config, for the sizes of heads and vocabulary.
        where: the file of a stored tensor, for messages.

    Raises:
        InputError: the layout has no such tensor, or not with this shape, or two tensors hold the
            same one.
    """
    sizes, pieces = row_sizes(config), dict[str, Piece]()
    patterns = [(re.compile(_regex(held.stored)), held) for held in layout]
    for name, info in stored.items():
        matches = ((pattern.fullmatch(name), held) for pattern, held in patterns)
        match, held = next(((m, held) for m, held in matches if m), (None, None))
        if held and not held.names:
            continue
        if match is None or held is None:
            raise InputError(
                f"tensor {name} in {where(name)} is not one that growkit knows in a model of type "
                f"{config.get('model_type')}; convert the model again with a program that knows it"
            )
        try:
            held_pieces = dict(_pieces(held, name, match.groupdict(), info, sizes))
        except (ValueError, IndexError):
            raise InputError(
                f"tensor {name} in {where(name)} has shape {list(info.shape)}, into which "
                f"{' and '.join(held.names)} do not fit; the file is damaged or its config is wrong"
            ) from None
        if twice := min(pieces.keys() & held_pieces.keys(), default=None):
            raise InputError(
                f"tensors {pieces[twice].stored} and {name} in {where(name)} both hold {twice}; "
                "one may be left over from another model, so convert the model again"
            )
        pieces |= held_pieces
    return pieces


def row_sizes(config: Config) -> dict[str, int]:
    """The sizes of the axes that rows of matrices have.

    Raises:
        InputError: a size is not a whole number above 0.
    """

    def size_of(key: str) -> int:
        size = config.get(key)
        if type(size) is not int or not 0 < size <= MAX_SIZE:
            raise InputError(
                f"{key} is {size!r:.80} in the config of the model, where a whole number above 0 "
                "was expected; correct it"
            )
        return size

    heads, vocab = size_of("num_attention_heads"), size_of("vocab_size")
    kv_heads = size_of("num_key_value_heads") if config.get("num_key_value_heads") else heads
    width = size_of("head_dim") if config.get("head_dim") else size_of("hidden_size") // heads
    return {"heads": heads, "kv_heads": kv_heads, "head_dim": width, "vocab": vocab}


def _regex(name: str) -> str:
    """A regular expression for a name with placeholders."""
    literal = COUNTS.split(name)  # every second part is a placeholder
    literal[::2] = map(re.escape, literal[::2])
    number = r"0|[1-9]\d{0,5}"
    literal[1::2] = [f"(?P<{k}>{'.+' if k == 'name' else number})" for k in literal[1::2]]
    return "".join(literal)


@lru_cache(maxsize=8)  # layers are alike
def _places(order: Order, sizes: tuple[tuple[str, int], ...]) -> tuple[int, ...]:
    """The stored row of every row in canonical order."""
    rows = order(dict(sizes))
    return tuple(sorted(range(len(rows)), key=rows.__getitem__))


def _pieces(
    held: Held, name: str, numbers: Mapping[str, str], info: TensorInfo, sizes: Mapping[str, int]
) -> Iterator[tuple[str, Piece]]:
    """The tensors that one stored tensor holds.

    Raises:
        ValueError: they do not fit into it.
        IndexError: it has too few dimensions.
    """
    counted = [count for count in COUNTS.findall(held.names[0]) if count not in numbers]
    leading, inner = info.shape[: len(counted)], info.shape[len(counted) :]
    if prod(leading) > MAX_EXPERTS:
        raise ValueError("it holds too many")
    total = inner[1 if held.transposed else 0]
    lengths = [Pattern.parse(rows).shape(sizes)[0] for rows in held.rows]
    lengths = lengths or [total // len(held.names)] * len(held.names)
    if sum(lengths) != total and not (held.padded and sum(lengths) < total):
        raise ValueError("its rows are more or fewer")
    start = 0
    places: range | tuple[int, ...] = range(total)
    if held.order:
        assert held.rows, "the number of rows is checked before they are ordered"
        places = _places(held.order, tuple(sizes.items()))
    for target, length in zip(held.names, lengths, strict=True):
        part = places[start : start + length]
        start += length
        rows = None if part == range(total) else part
        for at in np.ndindex(*leading):
            counts = {**numbers, **dict(zip(counted, at, strict=True))}
            yield target.format(**counts), Piece(name, at, rows, held.transposed, held.offset)
