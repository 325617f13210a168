"""Layouts: how the tensors of a format hold those of transformers, as data that serves both ways.

``Taken`` finds the tensors of transformers in stored ones; ``Arranged`` makes stored ones from
those of a model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from growkit.base.axes import ORDERS, Order, Pattern
from growkit.base.errors import InputError
from growkit.base.lazy import NDArray, Tensor, np, torch
from growkit.base.tensors import AT_A_TIME, Config, TensorInfo, Weights, full, slabs
from growkit.base.torch_internals import stored_dtypes
from growkit.model.checkpoint.format import Format, Output
from growkit.model.checkpoint.weight_file import MAX_SIZE
from growkit.model.families.family_parts import MAX_EXPERTS
from growkit.model.model import Model

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
        rows: number of rows of each of these as patterns of ``growkit.base.axes``, such as
            ``heads.head_dim``; empty if all have as many.
        order: the order in which the rows are stored, if it is another one; it needs ``rows``.
        transposed: whether the matrix is stored transposed.
        offset: number that is added to every stored element.
        padded: whether more rows may follow, which the class does not have.
        dtype: the dtype in which it is always written (a safetensors name); empty for that of the
            tensors that it holds.
    """

    stored: str
    names: tuple[str, ...]
    rows: tuple[str, ...] = ()
    order: Order | None = None
    transposed: bool = False
    offset: float = 0.0
    padded: bool = False
    dtype: str = ""

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


class Taken(Weights):
    """The tensors of transformers, taken from those of a format when they are read.

    Args:
        stored: the stored tensors.
        config: the config, for the sizes of heads and vocabulary.
        layout: the format's layout.

    Raises:
        InputError: see ``arrange``.
    """

    def __init__(self, stored: Weights, config: Config, layout: Sequence[Held]) -> None:
        self._stored = stored
        self._pieces = arrange(layout, stored.tensors, config, stored.where)
        self.tensors = {
            name: piece.info(stored.tensors[piece.stored]) for name, piece in self._pieces.items()
        }
        pieces = self._pieces.items()
        self.in_blocks = {name for name, piece in pieces if piece.stored in stored.in_blocks}

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return self._stored.where(self._pieces[name].stored if name else None)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        return self._pieces[name].read(self._stored, *where)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        piece = self._pieces[name]
        return piece.cuts(self._stored.cuts(piece.stored))


# The tensors of a format from those of transformers


class StoredTensor(NamedTuple):
    """What a stored tensor is made of.

    Attributes:
        held: the entry of the layout.
        names: names of the tensors of transformers, by place along the leading dimensions.
        order: the canonical row of every stored row; None for the rows as they follow each other.
    """

    held: Held
    names: Mapping[tuple[int, ...], tuple[str, ...]]
    order: NDArray[np.int64] | None


class Arranged(Weights):
    """The tensors of a format, made from those of a model when they are read.

    Args:
        model: the model, with the names of transformers.
        config: its config, with the defaults of its class.
        layout: the format's layout; the first entry that holds a tensor is written.
        title: the format's name, for messages.

    Raises:
        InputError: the format has no place for a tensor of the model.
    """

    def __init__(self, model: Model, config: Config, layout: Sequence[Held], title: str) -> None:
        self._model, self._title = model, title
        sizes, left = row_sizes(config), dict.fromkeys(model.tensors)
        first, sources = {name: at for at, name in enumerate(left)}, dict[str, StoredTensor]()
        for held in layout:
            places = _matching(held, left) if held.names else {}
            for stored, names in places.items():
                order = np.array(held.order(sizes)) if held.order else None
                sources[stored] = StoredTensor(held, names, order)
                for name in (name for those in names.values() for name in those):
                    left.pop(name)
        if left:
            name = next(iter(left))
            raise InputError(
                f"{title} has no place that growkit knows for tensor {name} of {model.where()}, a "
                f"model of type {config.get('model_type')}; convert it with a program that knows it"
            )

        def place(item: tuple[str, StoredTensor]) -> int:
            return min(first[name] for names in item[1].names.values() for name in names)

        self._sources = dict(sorted(sources.items(), key=place))
        self.tensors = {name: self._info(name, of) for name, of in self._sources.items()}

    def _info(self, stored: str, source: StoredTensor) -> TensorInfo:
        """The header of a stored tensor."""
        places = sorted(source.names)
        leading = tuple(size + 1 for size in places[-1])
        every = [self._model.tensors[name] for names in source.names.values() for name in names]
        kinds, dtypes = {info.shape[1:] for info in every}, {info.dtype for info in every}
        rows = {sum(map(self._rows, names)) for names in source.names.values()}
        alike = len(places) == prod(leading) and len(kinds) == len(rows) == len(dtypes) == 1
        fits = source.order is None or {len(source.order)} == rows
        if not (alike and fits):
            names = next(iter(source.names.values()))
            raise InputError(
                f"{self._title} has one tensor, {stored}, for {' and '.join(names)} and those like "
                f"it in {self._model.where()}, which do not fit together; pass --dtype if their "
                "dtypes differ, or correct the config"
            )
        shape = [rows.pop(), *kinds.pop()]
        if source.held.transposed:
            shape[:2] = shape[1::-1]
        return TensorInfo((*leading, *shape), source.held.dtype or dtypes.pop())

    def _rows(self, name: str) -> int:
        return self._model.tensors[name].shape[0]

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        sources = next(iter(self._sources[name].names.values())) if name else [None]
        return self._model.where(sources[0])

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        held, names, _ = self._sources[name]
        cuts = min(self._model.cuts(one) for those in names.values() for one in those)
        return len(next(iter(names))) + (int(cuts > 1) if held.transposed else min(cuts, 1))

    def blocks(self, name: str) -> Iterator[Tensor]:
        """See ``Weights``; of each matrix by itself."""
        for part in slabs(self.tensors[name].shape, self.cuts(name), AT_A_TIME):
            yield self.read(name, *part)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``.

        Raises:
            InputError: a number rounds in the dtype of the format.
        """
        held, names, order = self._sources[name]
        asked = full(self.tensors[name].shape, where)
        count = len(next(iter(names)))
        leading, inner = asked[:count], asked[count:]
        if held.transposed:
            inner[:2] = inner[1::-1]
        with stored_dtypes():  # strict float64 must not apply
            ranges = (range(part.start, part.stop) for part in leading)
            matrices = [self._gather(names[at], order, *inner) for at in product(*ranges)]
            if held.transposed:
                matrices = [matrix.transpose(0, 1) for matrix in matrices]
            tensor = torch.stack(matrices)
            tensor = tensor.view(*(part.stop - part.start for part in leading), *tensor.shape[1:])
            return self._converted(name, held.offset, tensor if count else matrices[0])

    def _gather(
        self, names: Sequence[str], order: NDArray[np.int64] | None, rows: slice, *others: slice
    ) -> Tensor:
        """Stored rows of tensors that follow each other."""
        wanted = np.arange(rows.start, rows.stop) if order is None else order[rows]
        start, gathered = 0, torch.empty(0)
        for name in names:
            own = wanted - start
            inside = (own >= 0) & (own < self._rows(name))
            start += self._rows(name)
            if not inside.any():
                continue
            own = own[inside]
            part = self._model.read(name, slice(int(own.min()), int(own.max()) + 1), *others)
            if len(part) > len(own) or (np.diff(own) != 1).any():
                part = part[torch.from_numpy(own - own.min())]
            if len(own) == len(wanted):
                return part
            if not len(gathered):
                gathered = part.new_empty(len(wanted), *part.shape[1:])
            gathered[torch.from_numpy(inside)] = part
        return gathered

    def _converted(self, name: str, offset: float, tensor: Tensor) -> Tensor:
        """Stored numbers in their dtype, to which they must not round."""
        dtype = self.tensors[name].torch_dtype
        if not offset and tensor.dtype == dtype:
            return tensor.contiguous()
        exact = tensor.double() + offset
        converted = exact.to(dtype)
        if not converted.double().equal(exact):
            raise InputError(
                f"{self._title} stores {name} in {self.tensors[name].dtype}"
                f"{f' with {offset:g} added' if offset else ''}, to which numbers of "
                f"{self.where(name)} round; pass --dtype bfloat16, or a source with fewer bits"
            )
        return converted


def _matching(
    held: Held, tensors: Mapping[str, None]
) -> dict[str, dict[tuple[int, ...], tuple[str, ...]]]:
    """The tensors that an entry of a layout holds, by stored name and place in it."""
    pattern = re.compile(_regex(held.names[0]))
    leading = [k for k in COUNTS.findall(held.names[0]) if k not in COUNTS.findall(held.stored)]
    places: defaultdict[str, dict[tuple[int, ...], tuple[str, ...]]] = defaultdict(dict)
    for match in filter(None, map(pattern.fullmatch, tensors)):
        numbers = match.groupdict()
        names = tuple(name.format(**numbers) for name in held.names)
        if tensors.keys() >= {*names}:
            at = tuple(int(numbers[count]) for count in leading)
            places[held.stored.format(**numbers)][at] = names
    return places


class LaidOut(Format):
    """A format whose tensors hold those of transformers as a layout says."""

    def layout(self, config: Config) -> Sequence[Held]:
        """How the stored tensors hold those of transformers."""
        raise NotImplementedError

    def to_transformers(self, stored: Weights, config: Config) -> Weights:
        """See ``Format``."""
        return Taken(stored, config, self.layout(config))

    def from_transformers(self, model: Model, config: Config) -> Weights:
        """See ``Format``."""
        return Arranged(model, config, self.layout(config), self.title)

    def check_held(self, files: Output, source: Model, lineage: Any) -> None:
        """See ``Format``."""
        from growkit.extras.formats.format_preflight import check_settings_held  # imports torch

        check_settings_held(files, self, source, lineage)

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
