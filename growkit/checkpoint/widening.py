"""A checkpoint in a wider dtype: every weight keeps its value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from growkit.checkpoint.tensors import TORCH_NAMES, Config, TensorInfo, Weights, main_dtype
from growkit.errors import InputError
from growkit.names import perhaps

if TYPE_CHECKING:
    from torch import Tensor

# Exponent and fraction bits: a format holds another's values if it has no fewer of either.
_BITS = {
    "F64": (11, 52),
    "F32": (8, 23),
    "BF16": (8, 7),
    "F16": (5, 10),
    "F8_E4M3": (4, 3),
    "F8_E5M2": (5, 2),
}


def rounds(dtype: str, other: str) -> bool:
    """Whether some number of the one format is none of the other."""
    return any(has > gets for has, gets in zip(_BITS[dtype], _BITS[other], strict=True))


class Widened:
    """The tensors of a checkpoint, cast without rounding; single tensors that are wider stay so.

    Args:
        source: the checkpoint.
        dtype: torch name of the dtype, e.g. ``float32``.

    Raises:
        InputError: the dtype is unknown, or would round most tensors.
    """

    def __init__(self, source: Weights, dtype: str) -> None:
        names = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
        if dtype not in names:
            raise InputError(
                f"dtype {dtype!r} is not known; choose one of {', '.join(names)}"
                f"{perhaps(dtype, names, TORCH_NAMES)}"
            )
        main, wide = main_dtype(source.tensors), names[dtype]
        if rounds(main, wide):
            name = next(name for name, info in source.tensors.items() if info.dtype == main)
            raise InputError(
                f"dtype {dtype} would round tensor {name} in {source.where(name)}, which is "
                f"{TORCH_NAMES[main]}; growing must not lose anything, choose a wider one"
            )
        self._source = source
        self.config: Config = source.config | {"dtype": dtype}
        if "torch_dtype" in source.config:
            self.config["torch_dtype"] = dtype
        self.tensors = {
            name: info if rounds(info.dtype, wide) else TensorInfo(info.shape, wide)
            for name, info in source.tensors.items()
        }

    def where(self, name: str | None = None) -> str:
        """Where the narrower tensor comes from."""
        return self._source.where(name)

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor, whole."""
        yield self.read(name)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor in its new dtype, or some rows of it, or of these some columns."""
        import torch

        dtype: torch.dtype = getattr(torch, TORCH_NAMES[self.tensors[name].dtype])
        return self._source.read(name, rows, columns).to(dtype)

    def by_rows(self, name: str) -> bool:
        """As the narrower tensor."""
        return self._source.by_rows(name)
