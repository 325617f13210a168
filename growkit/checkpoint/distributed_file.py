"""The weights in a folder of torch.distributed.checkpoint, of which any slice is read by itself.

Every tensor lies in any number of parts, and each part is an archive of torch of its own. So of a
slice those bytes are read that it is made of, whatever mesh has written them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from growkit.checkpoint.distributed_list import LIST, Listed, Part, read_list, refusing
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import STORED_NAMES, TensorInfo
from growkit.checkpoint.torch_file import open_part
from growkit.checkpoint.weight_file import WeightFile, check_header
from growkit.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

_NAMES = {torch_name: name for name, torch_name in STORED_NAMES.items()}

OPTIMIZER = ("optim", "state.", "param_groups.")
"""How names of states, or of entries that lie flat, begin that are an optimizer's."""


OF_TORCHTITAN = "tok_embeddings.weight"
"""A tensor that Hugging Face files call otherwise."""


class DistributedFile:
    """All tensors of the model in a folder.

    Args:
        folder: that has a list of entries.

    Attributes:
        path: of the list.
        paths: of all files that are read.
        tensors: the header of every tensor, by name.

    Raises:
        InputError: the folder is damaged, or holds no model or several.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder, self.path = folder, folder.path / LIST
        self._entries = _of_the_model(folder, read_list(folder))
        self.tensors: dict[str, TensorInfo] = {}
        for name, entry in self._entries.items():
            assert entry.shape is not None
            dtype = _NAMES.get(str(entry.dtype), str(entry.dtype))
            with refusing(folder, name):
                check_header(self.path, name, entry.shape, dtype)
            self.tensors[name] = TensorInfo(entry.shape, dtype)
        names = {part.file for entry in self._entries.values() for part in entry.parts}
        self.paths = [self.path, *(folder.path / name for name in sorted(names))]
        self._opened: dict[tuple[str, int], WeightFile] = {}

    def by_rows(self, name: str) -> bool:
        """Some rows of a tensor are had without the others."""
        return True

    def read(self, name: str, rows: slice | None, columns: slice | None = None) -> Tensor:
        """See ``WeightFile.read``."""
        import torch

        info = self.tensors[name]
        asked = [slice(0, size) for size in info.shape]
        for dimension, some in enumerate((rows, columns)):
            if some is not None:
                begin, end, _ = some.indices(info.shape[dimension])
                asked[dimension] = slice(begin, max(begin, end))
        shape = [each.stop - each.start for each in asked]
        parts = [part for part in self._entries[name].parts if _meets(part, asked)]
        if len(parts) == 1 and parts[0].sizes == info.shape:
            return self._open(name, parts[0]).read(name, rows, columns)
        found = torch.empty(shape, dtype=getattr(torch, STORED_NAMES[info.dtype]))
        for part in parts:
            here, there = [], []
            for each, begin, size in zip(asked, part.offsets, part.sizes, strict=True):
                first, last = max(each.start, begin), min(each.stop, begin + size)
                here.append(slice(first - begin, last - begin))
                there.append(slice(first - each.start, last - each.start))
            across = here[1] if len(here) > 1 else None
            piece = self._open(name, part).read(name, here[0], across)
            with torch._C.DisableTorchFunction():
                found[tuple(there)] = piece
        return found

    def _open(self, name: str, part: Part) -> WeightFile:
        """The archive of a part, whose header is read when it is needed first."""
        key = part.file, part.begin
        file = self._opened.get(key)
        if file is None:
            file = open_part(self._folder, part.file, name, part.begin, part.length)
            info = TensorInfo(part.sizes, self.tensors[name].dtype)
            if file.tensors[name] != info:
                raise InputError(
                    f"{file.path} holds another tensor than {self.path} says where a part of "
                    f"{name} should be; the two are not of one checkpoint, copy it again"
                )
            self._opened[key] = file
        return file


def _meets(part: Part, asked: list[slice]) -> bool:
    """Whether some of a part is asked for."""
    each = zip(asked, part.offsets, part.sizes, strict=True)
    return all(a.start < begin + size and begin < a.stop for a, begin, size in each)


def _of_the_model(folder: Folder, entries: Mapping[str, Listed]) -> dict[str, Listed]:
    """The tensors of the model by their own names.

    A model that was saved as one state among several has its name before those of its tensors. Of
    entries that lie at the same place the others are further names of the first.
    """
    states: defaultdict[tuple[str, ...], dict[str, Listed]] = defaultdict(dict)
    seen: set[tuple[Part, ...]] = set()
    for entry in entries.values():
        *state, name = entry.path
        of_optimizer = (state or [name])[0].startswith(OPTIMIZER)
        if entry.shape is None or of_optimizer or entry.parts in seen:
            continue
        seen.add(entry.parts)
        states[tuple(state)][name] = entry
        if name == OF_TORCHTITAN:
            raise InputError(
                f"{folder.path / LIST} has tensors under torchtitan's own names ({name}), where "
                "rows also lie in another order; save the model as Hugging Face files there "
                "(checkpoint.last_save_in_hf), and give that folder"
            )
    if len(states) == 1:
        return next(iter(states.values()))
    if not states:
        raise InputError(
            f"{folder.path / LIST} lists no tensors of a model; save its state with "
            "torch.distributed.checkpoint, beside its config.json"
        )
    names = ", ".join(".".join(state) or "tensors without a name before theirs" for state in states)
    raise InputError(
        f"{folder.path / LIST} lists tensors of several states ({names}), of which one was "
        "expected; save the state of the model by itself, beside its config.json"
    )
