"""Tensors that wait on disk until they are needed: together they grow with the depth of a model."""

from __future__ import annotations

from pathlib import Path
from weakref import finalize

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from growkit.base.errors import InputError, reason
from growkit.checkpoint.scratch import temporary_scratch


class Spool:
    """A list of tensors in a folder for temporary files; it goes when the object goes."""

    def __init__(self) -> None:
        scratch = temporary_scratch("spool")
        self._count = 0
        finalize(self, scratch.close)
        try:
            scratch.make()
        except OSError as error:
            raise InputError(
                f"{scratch.path} cannot be made ({reason(error)}); "
                "set TMPDIR to a folder that has room"
            ) from error
        self._folder = scratch.path

    def __len__(self) -> int:
        """Number of tensors."""
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        """A tensor, on the CPU; indices below 0 count from the last."""
        return load_file(self._file(range(self._count)[index]))["tensor"]

    def append(self, tensor: Tensor) -> None:
        """Keep a tensor.

        Raises:
            InputError: there is no room for temporary files.
        """
        try:
            save_file({"tensor": tensor.detach().cpu().contiguous()}, self._file(self._count))
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"{self._folder} cannot take {tensor.nbytes:,} bytes per layer "
                f"({reason(error)}); set TMPDIR to a folder that has room"
            ) from error
        self._count += 1

    def _file(self, index: int) -> Path:
        return self._folder / f"{index}.safetensors"
