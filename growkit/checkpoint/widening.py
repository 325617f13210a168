"""A checkpoint in another dtype: a wider one keeps every weight, a narrower one rounds it.

Rounding happens once, here, before anything else is done: what is promised then holds of the
rounded source.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.base.names import perhaps
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import (
    FLOAT_BYTES,
    STORED_NAMES,
    TORCH_NAMES,
    Config,
    TensorInfo,
    Weights,
    main_dtype,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

# Exponent and fraction bits: a format holds another's values if it has no fewer of either.
_BITS = {
    "F64": (11, 52),
    "F32": (8, 23),
    "BF16": (8, 7),
    "F16": (5, 10),
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
}


NARROWEST = 2
"""Bytes per number that a source is rounded to, at least: fewer need a scale for every tensor."""


def rounds(dtype: str, other: str) -> bool:
    """Whether some number of the one format is none of the other."""
    return any(has > gets for has, gets in zip(_BITS[dtype], _BITS[other], strict=True))


def too_narrow(main: str, wanted: str) -> bool:
    """Whether weights of one dtype are not rounded to another, both by their safetensors names."""
    return rounds(main, wanted) and FLOAT_BYTES[wanted] < NARROWEST


def rounded(source: Weights, dtype: str | None) -> str | None:
    """The dtype to which most weights are rounded when they are stored in another; None if none.

    Args:
        source: the checkpoint.
        dtype: torch name of a known dtype, or None for the source's own.
    """
    names = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
    return dtype if dtype in names and rounds(main_dtype(source.tensors), names[dtype]) else None


class Widened(Weights):
    """The tensors of a checkpoint in another dtype; single ones that are wider than most stay so.

    Args:
        source: the checkpoint.
        dtype: torch name of the dtype, e.g. ``float32``; a narrower one rounds every weight once,
            to the nearest number, to the even one of two.

    Raises:
        InputError: the dtype is unknown, or too narrow to round to.

    Attributes:
        rounded: the dtype, if it rounds.
    """

    def __init__(self, source: Weights, dtype: str) -> None:
        names = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
        if dtype not in names:
            main = main_dtype(source.tensors)
            chosen = [each for each, name in names.items() if not too_narrow(main, name)]
            raise InputError(
                f"dtype {dtype!r} is not known; choose one of {', '.join(chosen)}"
                f"{perhaps(dtype, chosen, TORCH_NAMES)}"
            )
        main, wanted = main_dtype(source.tensors), names[dtype]
        if too_narrow(main, wanted):
            name = next(name for name, info in source.tensors.items() if info.dtype == main)
            raise InputError(
                f"dtype {dtype} would round tensor {name} in {source.where(name)}, which is "
                f"{TORCH_NAMES[main]}, and is too narrow for weights without scales; choose "
                "bfloat16, or a wider one"
            )
        self.rounded = rounded(source, dtype)
        self._source = source
        self.config: Config = source.config | {"dtype": dtype}
        if "torch_dtype" in source.config:
            self.config["torch_dtype"] = dtype
        self.tensors = {
            name: TensorInfo(info.shape, wanted)
            if info.dtype in FLOAT_BYTES
            and not (rounds(info.dtype, wanted) and rounds(info.dtype, main))
            else info
            for name, info in source.tensors.items()
        }

    def where(self, name: str | None = None) -> str:
        """Where the tensor comes from."""
        return self._source.where(name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor in its new dtype.

        Raises:
            InputError: a number is too large for the new dtype.
        """
        import torch

        dtype: torch.dtype = getattr(torch, STORED_NAMES[self.tensors[name].dtype])
        before = self._source.tensors[name].dtype
        with torch._C.DisableTorchFunction():  # whatever dtype is wanted around this
            found = self._source.read(name, *where).to(dtype)
        narrower = before in FLOAT_BYTES and rounds(before, self.tensors[name].dtype)
        if narrower and not found.isfinite().all():
            raise InputError(
                f"tensor {name} in {self.where(name)} holds numbers that are too large for "
                f"{str(dtype).removeprefix('torch.')}; choose bfloat16, or a wider dtype"
            )
        return found

    def cuts(self, name: str) -> int:
        """As the tensor before."""
        return self._source.cuts(name)


class RoundedCheckpoint(Checkpoint):
    """A model folder whose weights are read as they are once rounded; for the proof.

    Args:
        source: the folder.
        dtype: see ``Widened``.

    Attributes:
        dtype: to which they are rounded.
    """

    def __init__(self, source: Checkpoint, dtype: str) -> None:
        self.__dict__.update(source.__dict__)  # the same folder, opened once
        self.dtype = dtype
        self._cast = Widened(source, dtype)
        self.config, self.tensors = self._cast.config, self._cast.tensors
        self._of = source

    @property
    def stands_alone(self) -> bool:
        """See ``Checkpoint``."""
        return self._of.stands_alone

    def where(self, name: str | None = None) -> str:
        """See ``Widened``."""
        return self._cast.where(name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Widened``."""
        return self._cast.read(name, *where)

    def as_read(self, model: nn.Module) -> nn.Module:
        """See ``Checkpoint``."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        with torch.no_grad(), torch._C.DisableTorchFunction():  # as in ``Widened``
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        return model
