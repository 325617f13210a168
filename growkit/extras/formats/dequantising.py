"""Quantised checkpoints, read as dense models, a few rows at a time.

Each file of ``quantised`` in an extra defines one format: the stored tensors of a dense
tensor, and how its numbers are computed. All arithmetic is that of the library which defines the
format, down to the last bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping

from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, registered, torch
from growkit.base.tensors import Config, TensorInfo, Weights
from growkit.base.torch_internals import stored_dtypes
from growkit.model.checkpoint.reading import NARROWEST, Checkpoint, View, check_finite

REMEDY = (
    "load the model with the library that quantised it, dequantise and save it there, and give "
    "that folder"
)

INSIDE = "text_config"
"""Config key of the language model inside a larger one, which may have the settings instead."""


class Parts:
    """The stored tensors of one dense tensor.

    Args:
        stored: the quantised checkpoint.
        name: name of the dense tensor.
        names: names of the stored tensors, by suffix.
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
        """Read a slice of the stored tensor with a suffix."""
        return self.stored.read(self.names[suffix], *where)

    def shape(self, suffix: str) -> tuple[int, ...]:
        """Shape of the stored tensor with a suffix; empty if it is missing."""
        return self.stored.tensors[self.names[suffix]].shape if suffix in self.names else ()

    def check(self, suffix: str, shape: tuple[int, ...], *dtypes: str) -> str:
        """Check shape and dtype of a stored tensor.

        Args:
            suffix: suffix of the tensor.
            shape: the expected shape.
            *dtypes: the accepted dtypes.

        Returns:
            The dtype.

        Raises:
            InputError: the tensor is missing, or has another shape or dtype.
        """
        if suffix not in self.names:
            raise InputError(
                f"tensor {self.name} in {self.stored.where(self.first)} is quantised, but its "
                f"tensor with suffix {suffix} is missing; copy the checkpoint again"
            )
        info = self.stored.tensors[self.names[suffix]]
        if info.shape != shape or info.dtype not in dtypes:
            raise InputError(
                f"tensor {self.names[suffix]} in {self.stored.where(self.names[suffix])} has shape "
                f"{list(info.shape)} and dtype {info.dtype}, but {list(shape)} and "
                f"{' or '.join(dtypes)} were expected; {REMEDY}"
            )
        return info.dtype

    def require(self, fits: bool, what: str) -> None:
        """Check a condition on the stored tensors.

        Args:
            fits: the condition.
            what: the shapes or settings in question, for the message.

        Raises:
            InputError: the condition is false.
        """
        if not fits:
            raise InputError(
                f"tensor {self.name} in {self.stored.where(self.first)} is quantised, but {what} "
                f"do not fit together; {REMEDY}"
            )


class Scheme(ABC):
    """A format of quantised weights.

    Attributes:
        method: ``quant_method`` in configs.
        title: name for users.
        suffixes: suffixes of the stored tensors of a dense tensor; every quantised tensor has the
            first, and no dense tensor does.
        suffix: suffix of the dense tensor.
        unused: suffixes of tensors that only quantised arithmetic reads, such as scales of
            activations.
        exact: whether the dense dtype represents every number.
    """

    method: str
    title: str
    suffixes: tuple[str, ...]
    suffix: str = ".weight"
    unused: tuple[str, ...] = ()
    exact: bool = False

    def applies(self, settings: Config) -> bool:
        """Whether a model with this ``quantization_config`` has this format."""
        return settings.get("quant_method") == self.method

    def unread(self, settings: Config) -> str:
        """The variant of the format, if growkit does not read it; else empty."""
        return ""

    @abstractmethod
    def header(self, parts: Parts, settings: Config, dtype: str) -> TensorInfo:
        """Derive the header of a dense tensor.

        Args:
            parts: the stored tensors.
            settings: ``quantization_config`` of the model.
            dtype: dtype of the model, a safetensors name.

        Raises:
            InputError: the stored tensors do not fit together.
        """

    @abstractmethod
    def rows(self, parts: Parts, settings: Config, info: TensorInfo, rows: slice) -> Tensor:
        """Compute rows of a dense tensor, along dimension 0.

        Args:
            parts: the stored tensors.
            settings: ``quantization_config`` of the model.
            info: header of the dense tensor.
            rows: start and stop.

        Returns:
            The rows, in any float dtype; the caller rounds them to the dtype of the header.
        """

    def transformers(self, settings: Config) -> Config | None:
        """The settings that make transformers dequantise while it loads; None if none do."""
        return None

    def misread(self, parts: Parts, settings: Config) -> str:
        """Why transformers makes other numbers of a dense tensor than the format; else empty."""
        return ""


class Dequantised(View):
    """A quantised checkpoint, read as a dense model.

    Args:
        stored: the quantised checkpoint.
        scheme: the format of its quantised tensors.
        settings: its ``quantization_config``.

    Attributes:
        stored: see above.
        scheme: see above.
        settings: see above.
        parts: the stored tensors of every dense tensor, by its name.

    Raises:
        InputError: the stored tensors do not fit together.
    """

    def __init__(self, stored: Checkpoint, scheme: Scheme, settings: Config) -> None:
        super().__init__(stored)
        self.scheme, self.settings = scheme, settings
        self.stands_alone = False
        self.config = without_settings(stored.config)
        self.parts = self.in_blocks = _parts(stored, scheme)
        dtype = _dtype_of(self.config)
        dense = {name: scheme.header(parts, settings, dtype) for name, parts in self.parts.items()}
        self.tensors = dict(sorted((self._stored_dense() | dense).items()))
        self.quantised = _describe(scheme, {info.dtype for info in dense.values()})

    def _stored_dense(self) -> dict[str, TensorInfo]:
        """Tensors that are stored dense, except those that only quantised arithmetic reads."""
        made_of = {name for parts in self.parts.values() for name in parts.names.values()}
        marks = tuple({*self.scheme.suffixes} - {self.scheme.suffix})  # of no dense tensor
        infos = {}
        for name, info in self.stored.tensors.items():
            if name in made_of or name.endswith(self.scheme.unused):
                continue
            if name.endswith(marks) or info.dtype.startswith("F8"):
                raise InputError(
                    f"tensor {name} in {self.stored.where(name)} is {info.dtype}, but tensors that "
                    f"belong to it in {self.scheme.title} are missing; copy the checkpoint again, "
                    f"or {REMEDY}"
                )
            infos[name] = info
        return infos

    def where(self, name: str | None = None) -> str:
        """See ``Checkpoint``; for a quantised tensor, the file of its first stored tensor."""
        parts = self.parts.get(name) if name else None
        return self.stored.where(parts.first if parts else name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Checkpoint``; a dequantised tensor is rounded once, to its dtype."""
        if name not in self.parts:
            return self.stored.read(name, *where)
        info, parts = self.tensors[name], self.parts[name]
        (rows, *_), inner = tensors.full(info.shape, where), (None, *where[1:])
        with stored_dtypes():  # strict float64 must not apply
            values = torch.empty(
                [span.stop - span.start for span in tensors.full(info.shape, where)],
                dtype=info.torch_dtype,
            )
            for part, *_ in tensors.slabs(info.shape, self.cuts(name), where=[rows]):
                block = self.scheme.rows(parts, self.settings, info, part)
                values[part.start - rows.start : part.stop - rows.start] = tensors.cut(block, inner)
            return check_finite(values, name, self.where(name))

    def cuts(self, name: str) -> int:
        """See ``Checkpoint``; dequantised tensors are computed by rows."""
        if name not in self.parts:
            return self.stored.cuts(name)
        return min(1, *(self.stored.cuts(part) for part in self.parts[name].names.values()))


def dense(checkpoint: Checkpoint) -> Checkpoint:
    """Read a quantised checkpoint as a dense one; return any other unchanged.

    Raises:
        InputError: growkit does not read the format, or the checkpoint is damaged.
    """
    quantisation = format_of(checkpoint.config, checkpoint.where())
    return Dequantised(checkpoint, *quantisation) if quantisation else checkpoint


def format_of(config: Config, where: str) -> tuple[Scheme, Config] | None:
    """Find the format and the settings of a quantised model; None if it is not quantised.

    Raises:
        InputError: growkit does not read the format.
    """
    places = [place for place in (config, config.get(INSIDE)) if isinstance(place, dict)]
    all_given = ((key, place.get(key)) for place in places for key in tensors.QUANTISED)
    key, settings = next((entry for entry in all_given if entry[1] is not None), ("", None))
    if settings is None:
        return None
    formats: dict[str, Scheme] = registered("quantised", "FORMAT")
    for scheme in formats.values() if isinstance(settings, dict) else ():
        if scheme.applies(settings):
            if variant := scheme.unread(settings):
                raise InputError(
                    f"the model in {where} is quantised with {scheme.title} in a variant that "
                    f"growkit does not read, {variant}; dequantise it first: {REMEDY}"
                )
            return scheme, settings
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    known = ", ".join(sorted({scheme.method for scheme in formats.values()}))
    if method is None:
        raise InputError(
            f"{key} of config.json in {where} has no quant_method; add it, one of "
            f"{known}, or {REMEDY}"
        )
    raise InputError(
        f"the model in {where} is quantised with {method!r}, but growkit reads {known}; dequantise "
        f"it first: {REMEDY}"
    )


def dense_config(config: Config, where: str) -> tuple[Config, str]:
    """Turn a quantised model's config into that of the dense model; return any other unchanged.

    Returns:
        The config, and how the weights are stored; see ``Weights.quantised``.

    Raises:
        InputError: growkit does not read the format.
    """
    quantisation = format_of(config, where)
    if quantisation is None:
        return config, ""
    config = without_settings(config)
    return config, _describe(quantisation[0], {_dtype_of(config)})


def without_settings(config: Config) -> Config:
    """Remove the settings of quantisation from a config, and from that of its language model."""
    kept = {key: value for key, value in config.items() if key not in tensors.QUANTISED}
    if isinstance(inner := kept.get(INSIDE), dict):
        kept[INSIDE] = {key: value for key, value in inner.items() if key not in tensors.QUANTISED}
    return kept


def _describe(format: Scheme, dtypes: Collection[str]) -> str:  # noqa: A002
    names = " and ".join(sorted(tensors.TORCH_NAMES[dtype] for dtype in dtypes))
    holds = "which represents every number" if format.exact else "to which every number is rounded"
    return f"{format.title}; it is read as a dense model in {names}, {holds}"


def _dtype_of(config: Config) -> str:
    """The safetensors name of a config's dtype; BF16 if it has none."""
    dtype = tensors.SAFETENSORS_NAMES.get(str(config.get("dtype", config.get("torch_dtype"))), "")
    return dtype if tensors.FLOAT_BYTES.get(dtype, 0) >= NARROWEST else "BF16"


def _parts(stored: Checkpoint, form: Scheme) -> dict[str, Parts]:
    """Find the stored tensors of every dense tensor.

    Raises:
        InputError: no tensor is quantised.
    """
    first, parts = form.suffixes[0], {}
    for name in stored.tensors:
        if name.endswith(first):
            stem = name.removesuffix(first)
            names = {
                suffix: stem + suffix for suffix in form.suffixes if stem + suffix in stored.tensors
            }
            parts[stem + form.suffix] = Parts(stored, stem + form.suffix, names)
    if not parts:
        raise InputError(
            f"config.json in {stored.folder} states that the model is quantised with {form.title}, "
            f"but no tensor ends in {first}; if all are dense, remove quantization_config, else "
            f"copy them again, or {REMEDY}"
        )
    return parts
