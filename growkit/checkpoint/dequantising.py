"""Quantised checkpoints, read as the dense models that they stand for, a few rows at a time.

A file of ``growkit.checkpoint.quantised`` is one format: it says which stored tensors make one
tensor of the dense model, and what its numbers are. All arithmetic is that of the library which
defines the format, down to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import cast

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, members, torch
from growkit.base.tensors import (
    FLOAT_BYTES,
    QUANTISED,
    SAFETENSORS_NAMES,
    TORCH_NAMES,
    Config,
    TensorInfo,
    Weights,
    cut,
    full,
    slabs,
)
from growkit.checkpoint.reading import NARROWEST, Checkpoint, check_finite

REMEDY = (
    "load the model with the library that quantised it, dequantise it there, save it and give that "
    "folder"
)


class Parts:
    """The stored tensors that one tensor of the dense model is made from.

    Args:
        stored: the quantised checkpoint.
        name: name of the tensor of the dense model.
        names: names of the stored tensors, by their suffix.
    """

    def __init__(self, stored: Weights, name: str, names: Mapping[str, str]) -> None:
        self.stored, self.name, self.names = stored, name, names

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.names

    @property
    def first(self) -> str:
        """Name of the first stored tensor."""
        return next(iter(self.names.values()))

    def read(self, suffix: str, *where: slice | None) -> Tensor:
        """A part of the stored tensor with this suffix."""
        return self.stored.read(self.names[suffix], *where)

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Shape of the stored tensor with this suffix."""
        return self.stored.tensors[self.names[suffix]].shape

    def check(self, suffix: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Check a stored tensor.

        Args:
            suffix: its suffix.
            shape: its shape.
            *dtypes: dtypes that it may have.

        Raises:
            InputError: it is missing, or has another shape or dtype.
        """
        if suffix not in self.names:
            raise InputError(
                f"tensor {self.name} in {self.stored.where(self.first)} is quantised, but what "
                f"ends in {suffix} is missing; copy the checkpoint again"
            )
        info = self.stored.tensors[self.names[suffix]]
        if info.shape != shape or info.dtype not in dtypes:
            raise InputError(
                f"tensor {self.names[suffix]} in {self.stored.where(self.names[suffix])} has shape "
                f"{list(info.shape)} and dtype {info.dtype}, but {list(shape)} and "
                f"{' or '.join(dtypes)} were expected; {REMEDY}"
            )

    def require(self, fits: bool, what: str) -> None:
        """Check what the stored tensors must have in common.

        Args:
            fits: whether it holds.
            what: the shapes or settings that do not fit, for the message.

        Raises:
            InputError: it does not hold.
        """
        if not fits:
            raise InputError(
                f"tensor {self.name} in {self.stored.where(self.first)} is quantised, but {what} "
                f"do not fit each other; {REMEDY}"
            )


class Format(ABC):
    """A format of quantised weights.

    Attributes:
        method: its ``quant_method`` in configs.
        title: its name for users.
        suffixes: endings of the stored tensors of one dense tensor; only quantised ones have the
            first.
        suffix: ending of the dense tensor.
        unused: endings of what only quantised arithmetic reads, such as scales of activations.
        exact: whether the dense dtype holds every number.
    """

    method: str
    title: str
    suffixes: tuple[str, ...]
    suffix: str = ".weight"
    unused: tuple[str, ...] = ()
    exact: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Suffixes that no dense tensor has."""
        return tuple(each for each in self.suffixes if each != self.suffix)

    def applies(self, settings: Config) -> bool:
        """Whether a model with these settings, its ``quantization_config``, is of this format."""
        return settings.get("quant_method") == self.method

    def unread(self, settings: Config) -> str:
        """The variant of these settings, if it is one that is not read; else empty."""
        return ""

    @abstractmethod
    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """The header of a tensor of the dense model.

        Args:
            parts: the stored tensors.
            settings: of the model.
            dtype: dtype of the model, a safetensors name.

        Raises:
            InputError: the stored tensors do not fit each other.
        """

    @abstractmethod
    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """Rows of a tensor of the dense model, along dimension 0.

        Args:
            parts: the stored tensors.
            settings: of the model.
            info: the header.
            rows: begin and end.

        Returns:
            The rows in a dtype of any precision; they are then rounded to the dtype of the header.
        """

    def transformers(self, settings: Config) -> Config | None:
        """The settings with which transformers dequantises while it loads; None if it does not."""
        return None


class Dequantised(Checkpoint):
    """A model folder whose quantised tensors are read as those of a dense model.

    Args:
        stored: the folder.
        format: the format of its quantised tensors.
        settings: its ``quantization_config``.

    Attributes:
        stored: the folder, whose tensors are read as they are.
        format: as above.
        settings: as above.
        parts: what each dense tensor is made from, by its name.

    Raises:
        InputError: the stored tensors do not fit each other.
    """

    def __init__(self, stored: Checkpoint, format: Format, settings: Config) -> None:  # noqa: A002
        self.__dict__.update(stored.__dict__)  # the same folder, opened once
        self.stored, self.format, self.settings = stored, format, settings
        self.stands_alone = False
        self.config = without_settings(stored.config)
        self.parts = _parts(stored, format)
        dtype = _dtype_of(self.config)
        dense = {name: format.header(each, settings, dtype) for name, each in self.parts.items()}
        self.tensors = dict(sorted((self._others() | dense).items()))
        self.quantised = _phrase(format, {info.dtype for info in dense.values()})

    def _others(self) -> dict[str, TensorInfo]:
        """Stored tensors that are dense, without those that only quantised arithmetic reads."""
        made_of = {name for parts in self.parts.values() for name in parts.names.values()}
        found = {}
        for name, info in self.stored.tensors.items():
            if name in made_of or name.endswith(self.format.unused):
                continue
            if name.endswith(self.format.marks) or info.dtype.startswith("F8"):
                raise InputError(
                    f"tensor {name} in {self.stored.where(name)} is quantised, but what belongs to "
                    "it is missing; copy the checkpoint again"
                )
            found[name] = info
        return found

    def where(self, name: str | None = None) -> str:
        """See ``Checkpoint``; the file of the first tensor that a dense one is made from."""
        parts = self.parts.get(name) if name else None
        return self.stored.where(parts.first if parts else name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Checkpoint``; a dense tensor is rounded once, to its dtype."""
        if name not in self.parts:
            return self.stored.read(name, *where)
        info, parts = self.tensors[name], self.parts[name]
        (rows, *_), inner = full(info.shape, where), (None, *where[1:])
        with torch._C.DisableTorchFunction():  # strict float64 must not apply
            found = torch.empty(
                [each.stop - each.start for each in full(info.shape, where)],
                dtype=info.torch_dtype,
            )
            for part, *_ in slabs(info.shape, self.cuts(name), where=[rows]):
                made = self.format.rows(parts, self.settings, info, part)
                found[part.start - rows.start : part.stop - rows.start] = cut(made, inner)
            return check_finite(found, name, self.where(name))

    def cuts(self, name: str) -> int:
        """See ``Checkpoint``; dense tensors are made by rows."""
        if name not in self.parts:
            return self.stored.cuts(name)
        return min(1, *(self.stored.cuts(each) for each in self.parts[name].names.values()))


def dense(checkpoint: Checkpoint) -> Checkpoint:
    """Read a quantised checkpoint as a dense one; return any other unchanged.

    Raises:
        InputError: its format is not read, or it is damaged.
    """
    found = format_of(checkpoint.config, checkpoint.where())
    return Dequantised(checkpoint, *found) if found else checkpoint


def format_of(config: Config, where: str) -> tuple[Format, Config] | None:
    """The format of a model and its settings; None if it is not quantised.

    Raises:
        InputError: the format is not read.
    """
    given = next((config[key] for key in QUANTISED if config.get(key) is not None), None)
    if given is None:
        return None
    formats = cast("dict[str, Format]", members("growkit.checkpoint.quantised", "FORMAT"))
    for each in formats.values() if isinstance(given, dict) else ():
        if each.applies(given):
            if variant := each.unread(given):
                raise InputError(
                    f"the model in {where} is quantised with {each.title} in a variant that is "
                    f"not read, {variant}; dequantise it first: {REMEDY}"
                )
            return each, given
    method = given.get("quant_method") if isinstance(given, dict) else given
    known = ", ".join(sorted({each.method for each in formats.values()}))
    raise InputError(
        f"the model in {where} is quantised with {method!r}, but growkit reads {known}; dequantise "
        f"it first: {REMEDY}"
    )


def dense_config(config: Config, where: str) -> tuple[Config, str]:
    """The config of the dense model that a quantised one stands for; any other as it is.

    Returns:
        The config, and how its numbers are stored; see ``Weights.quantised``.

    Raises:
        InputError: the format is not read.
    """
    found = format_of(config, where)
    if found is None:
        return config, ""
    config = without_settings(config)
    return config, _phrase(found[0], {_dtype_of(config)})


def without_settings(config: Config) -> Config:
    """A config without what it says of quantisation."""
    return {key: value for key, value in config.items() if key not in QUANTISED}


def _phrase(format: Format, dtypes: Collection[str]) -> str:  # noqa: A002
    names = " and ".join(sorted(TORCH_NAMES[dtype] for dtype in dtypes))
    holds = "which holds every number" if format.exact else "to which every number is rounded"
    return f"{format.title}; it is read as a dense model in {names}, {holds}"


def _dtype_of(config: Config) -> str:
    """The dtype of the model that a config names, as a safetensors name; BF16 for none."""
    dtype = SAFETENSORS_NAMES.get(str(config.get("dtype", config.get("torch_dtype"))), "")
    return dtype if FLOAT_BYTES.get(dtype, 0) >= NARROWEST else "BF16"


def _parts(stored: Checkpoint, form: Format) -> dict[str, Parts]:
    """What each dense tensor is made from.

    Raises:
        InputError: no tensor is quantised.
    """
    first, found = form.suffixes[0], {}
    for name in stored.tensors:
        if name.endswith(first):
            stem = name.removesuffix(first)
            names = {each: stem + each for each in form.suffixes if stem + each in stored.tensors}
            found[stem + form.suffix] = Parts(stored, stem + form.suffix, names)
    if not found:
        raise InputError(
            f"config.json in {stored.folder} says that the model is quantised with {form.title}, "
            f"but no tensor ends in {first}; remove quantization_config, or copy the weights again"
        )
    return found


def unpacked(words: Tensor, bits: int) -> Tensor:
    """Unsigned numbers of some bits out of words, which hold the first in their lowest bits.

    Args:
        words: integers, [..., words].
        bits: number of bits, which divide those of a word.

    Returns:
        Integers, [..., words · bits of a word // bits].
    """
    shifts = torch.arange(0, 8 * words.element_size(), bits, dtype=words.dtype)
    numbers: Tensor = (words[..., None] >> shifts) & (2**bits - 1)
    return numbers.flatten(-2)


def scaled(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, by_row: Tensor, by_column: Tensor
) -> Tensor:
    """Numbers less their zeros, times their scales, in the dtype of the scales.

    Args:
        numbers: [rows, columns].
        scales: [row groups, column groups].
        zeros: of the same shape, or None.
        by_row: index of the row group of every row.
        by_column: index of the column group of every column.
    """

    def spread(values: Tensor) -> Tensor:
        return values.to(scales.dtype)[by_row][:, by_column]

    made = numbers.to(scales.dtype)
    return (made if zeros is None else made - spread(zeros)) * spread(scales)


def powers_of_two(exponents: Tensor) -> Tensor:
    """2^(e - 127) of exponents that are stored in a byte each (E8M0); float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)
