"""Reading a Hugging Face folder: headers at once, tensors one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from growkit.base.errors import InputError
from growkit.checkpoint.carrying import check_companions
from growkit.checkpoint.distributed_file import DistributedFile
from growkit.checkpoint.distributed_list import LIST
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.safetensors_file import open_safetensors
from growkit.checkpoint.tensors import FLOAT_BYTES, Config, Weights, full
from growkit.checkpoint.torch_file import open_torch_file
from growkit.checkpoint.weight_file import WeightFile
from growkit.checkpoint.weight_files import weight_files

if TYPE_CHECKING:
    from torch import Tensor, nn

_File = WeightFile | DistributedFile

MOST_DIGITS = 18
"""Of a whole number in a config: more do not fit into 64 bits."""


class Checkpoint(Weights):
    """A model folder: ``config.json`` and its weights, of which only headers are read at first.

    Weights are ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists,
    or, where there are none, the same of ``pytorch_model.bin`` (weights-only loading), or files of
    torch.distributed.checkpoint.

    Attributes:
        folder: its path.
        opened: the folder, from which all its files are read.
        config: the contents of ``config.json``.
        files: the files with the weights.
        distributed: whether these are of torch.distributed.checkpoint.
        tensors: the header of every tensor, by name.

    Raises:
        InputError: the folder is no checkpoint, or a file is missing, truncated or malformed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.opened = Folder(folder)
        self.folder = self.opened.path
        self.config: Config = self.opened.json("config.json", MOST_DIGITS)
        check_companions(self.opened)
        names, listed = weight_files(self.opened, self.config)
        files = [self._open(name) for name in names]
        self.files = [path for file in files for path in file.paths]
        self.distributed = names == [LIST]
        self._file_of: dict[str, _File] = {}
        self._known_finite: dict[str, int] = {}  # how many rows from the first on
        for file in files:
            self._add(file)
        self.tensors = {name: file.tensors[name] for name, file in self._file_of.items()}
        for tensor, name in listed.items():
            if tensor not in self._file_of or self._file_of[tensor].path.name != name:
                raise InputError(
                    f"tensor {tensor} is missing from {self.folder / name}, where the index lists "
                    "it; copy the checkpoint again"
                )
        if not any(info.dtype in FLOAT_BYTES and info.elements for info in self.tensors.values()):
            raise InputError(
                f"{self.folder} has no weights of a float dtype ({', '.join(FLOAT_BYTES)}); "
                "copy the checkpoint again, or dequantise the model"
            )

    @property
    def stands_alone(self) -> bool:
        """Whether the folder holds nothing but this model, in files of transformers."""
        return not self.distributed

    @property
    def model_files(self) -> dict[str, Path]:
        """``config.json`` and the files with the weights, by their paths in the folder."""
        files = [*self.files, self.folder / "config.json"]
        return {file.relative_to(self.folder).as_posix(): file for file in files}

    def _open(self, name: str) -> _File:
        if name == LIST:
            return DistributedFile(self.opened)
        return (open_torch_file if name.endswith(".bin") else open_safetensors)(self.opened, name)

    def _add(self, file: _File) -> None:
        for name in file.tensors:
            if name in self._file_of:
                raise InputError(
                    f"tensor {name} is in both {self._file_of[name].path} and {file.path}; remove "
                    "one, one of the shards may be left over from another model"
                )
            self._file_of[name] = file

    def where(self, name: str | None = None) -> str:
        """The file that holds a tensor; the folder, if none is named."""
        return str(self._file_of[name].path if name else self.folder)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor, in the dtype in which it is stored.

        Raises:
            InputError: it holds NaN or infinity, or the file can no longer be read.
        """
        file = self._file_of[name]
        tensor, shape = file.read(name, *where), file.tensors[name].shape
        rows, *rest = where or (None,)
        begin, end, _ = (rows or slice(None)).indices(shape[0] if shape else 1)
        known = self._known_finite.get(name, 0)
        if end > known:
            check_finite(tensor, name, self.where(name))
        whole = full(shape[1:], rest) == full(shape[1:])
        if whole and begin <= known < end:  # a proof reads every tensor several times
            self._known_finite[name] = end
        return tensor

    def as_read(self, model: nn.Module) -> nn.Module:
        """A model that transformers has loaded from the folder, with the weights of this."""
        return model

    def cuts(self, name: str) -> int:
        """See ``WeightFile``."""
        return self._file_of[name].cuts(name)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; see ``Folder.json``."""
    return Folder(file.parent).json(file.name)


def check_finite(tensor: Tensor, name: str, where: str) -> None:
    """Refuse a tensor, or a part of one, that holds what is no number.

    Raises:
        InputError: it does.
    """
    if not _finite(tensor):
        raise InputError(
            f"tensor {name} in {where} holds NaN or infinity; "
            "a model like that cannot be grown or proved, use an earlier checkpoint"
        )


def _finite(tensor: Tensor) -> bool:
    numbers = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no arithmetic
    # A finite sum proves finite elements; only where it overflows is a slower look needed.
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())
