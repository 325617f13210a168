"""Tensors in a folder of torch.distributed.checkpoint, of which any slice is read by itself.

Every tensor lies in any number of parts, and each part is an archive of torch of its own. What an
archive says of its tensor is held against the list before a number of it is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.checkpoint.distributed_list import LIST, REMEDY, Listed, Part, refusing
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import ANYWHERE, STORED_NAMES, TensorInfo, Weights, full
from growkit.checkpoint.torch_file import open_part
from growkit.checkpoint.weight_file import WeightFile, check_header

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {torch_name: name for name, torch_name in STORED_NAMES.items()}


class Parts(Weights):
    """Some tensors of a folder.

    Args:
        folder: that has a list of entries.
        entries: that are tensors, by what these are to be called.

    Attributes:
        path: of the list.
        tensors: the header of every tensor, by name.

    Raises:
        InputError: a tensor has a name, shape or dtype that none has.
    """

    def __init__(self, folder: Folder, entries: Mapping[str, Listed]) -> None:
        self._folder, self._entries, self.path = folder, entries, folder.path / LIST
        self.tensors: dict[str, TensorInfo] = {}
        for name, entry in entries.items():
            assert entry.shape is not None
            dtype = _NAMES.get(str(entry.dtype), str(entry.dtype))
            with refusing(folder, name):
                check_header(self.path, name, entry.shape, dtype)
            self.tensors[name] = TensorInfo(entry.shape, dtype)
        self._opened: dict[tuple[str, int], WeightFile] = {}

    def cuts(self, name: str) -> int:
        """All dimensions."""
        return ANYWHERE

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``WeightFile.read``."""
        import torch

        info = self.tensors[name]
        asked = full(info.shape, where)
        parts = [part for part in self._entries[name].parts if _meets(part, asked)]
        if len(parts) == 1 and parts[0].sizes == info.shape:
            return self._open(name, parts[0]).read(name, *where)
        shape = [each.stop - each.start for each in asked]
        with torch._C.DisableTorchFunction():  # whatever dtype is wanted around this
            found = torch.empty(shape, dtype=getattr(torch, STORED_NAMES[info.dtype]))
            for part in parts:
                here, there = [], []
                for each, begin, size in zip(asked, part.offsets, part.sizes, strict=True):
                    first, last = max(each.start, begin), min(each.stop, begin + size)
                    here.append(slice(first - begin, last - begin))
                    there.append(slice(first - each.start, last - each.start))
                found[tuple(there)] = self._open(name, part).read(name, *here)
        return found

    def _open(self, name: str, part: Part) -> WeightFile:
        """The archive of a part, whose header is read when it is needed first.

        Raises:
            InputError: it holds another tensor than the list says.
        """
        key = part.file, part.begin
        file = self._opened.get(key)
        if file is None:
            file = open_part(self._folder, part.file, name, part.begin, part.length)
            self._opened[key] = file
        expected = TensorInfo(part.sizes, self.tensors[name].dtype)
        found = file.tensors.get(name)
        if found != expected:
            shown = f"{found.dtype} {list(found.shape)}" if found else "another tensor"
            raise InputError(
                f"{file.path} holds {shown} where {self.path} says that {expected.dtype} "
                f"{list(expected.shape)} of {name} is; the two are not of one checkpoint, {REMEDY}"
            )
        return file


def _meets(part: Part, asked: list[slice]) -> bool:
    """Whether some of a part is asked for."""
    each = zip(asked, part.offsets, part.sizes, strict=True)
    return all(a.start < begin + size and begin < a.stop for a, begin, size in each)
