"""Tensors on disk: the states of all layers together do not fit in memory."""

from pathlib import Path
from weakref import finalize

from safetensors.torch import load_file, save_file
from torch import Tensor

from growkit.model.checkpoint.scratch import Scratch, using


class Spool:
    """List of tensors on disk, in a temporary folder that is deleted together with the object."""

    def __init__(self) -> None:
        self._scratch = Scratch("spool")
        self._files: list[Path] = []
        finalize(self, self._scratch.close)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._files)

    def __getitem__(self, index: int) -> Tensor:
        """Read a tensor to the CPU; negative indices count from the end.

        Raises:
            PlaceError: the disk has a fault.
        """
        with using(self._scratch):
            return load_file(self._files[index])["tensor"]

    def append(self, tensor: Tensor) -> None:
        """Append a tensor.

        Raises:
            PlaceError: there is no room for temporary files, or the disk has a fault.
        """
        with using(self._scratch):
            self._scratch.make()
            file = self._scratch.path / f"{len(self._files)}.safetensors"
            save_file({"tensor": tensor.detach().cpu().contiguous()}, file)
        self._files.append(file)
