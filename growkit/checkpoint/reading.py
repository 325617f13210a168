"""Reading a Hugging Face folder: headers at once, tensors one at a time, as they are or rounded.

Rounding to another dtype happens once, before anything else is done: a promise is then about the
rounded source.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.names import perhaps
from growkit.base.tensors import FLOAT_BYTES, TORCH_NAMES, Config, TensorInfo, Weights, main_dtype
from growkit.checkpoint.distributed_file import DistributedFile, open_model
from growkit.checkpoint.folder import LIST, Folder
from growkit.checkpoint.publishing import temporary, write_json
from growkit.checkpoint.weight_file import WeightFile, open_weights
from growkit.checkpoint.writing import header_of

MOST_DIGITS = 18
"""Of a whole number in a config: more do not fit into 64 bits."""


class Checkpoint(Weights):
    """A model folder: ``config.json`` and weights, whose tensors are read on demand.

    Weights are ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists,
    or, where there are none, the same of ``pytorch_model.bin`` (weights-only loading), or files of
    torch.distributed.checkpoint.

    Attributes:
        folder: its path.
        opened: the folder, from which all its files are read.
        config: the contents of ``config.json``.
        files: the files with the weights.
        distributed: whether these are of torch.distributed.checkpoint.
        stands_alone: whether the folder holds nothing but this model, in files of transformers.
        tensors: the header of every tensor, by name.

    Raises:
        InputError: the folder is no checkpoint, or a file is missing, truncated or malformed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.opened = Folder(folder)
        self.folder = self.opened.path
        self.config: Config = self.opened.json("config.json", MOST_DIGITS)
        self.opened.check_files()
        names, listed = self.opened.weight_files(self.config)
        self.distributed = names == [LIST]
        self.stands_alone = not self.distributed
        files: list[WeightFile | DistributedFile] = (
            [open_model(self.opened)]
            if self.distributed
            else [open_weights(self.opened, name) for name in names]
        )
        self.files = [path for file in files for path in file.paths]
        self._file_of: dict[str, WeightFile | DistributedFile] = {}
        for file in files:
            for name in file.tensors.keys() & self._file_of.keys():
                raise InputError(
                    f"tensor {name} is in both {self._file_of[name].path} and {file.path}; remove "
                    "one, one of the shards may be left over from another model"
                )
            self._file_of |= dict.fromkeys(file.tensors, file)
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
    def model_files(self) -> dict[str, Path]:
        """``config.json`` and the files with the weights, by their paths in the folder."""
        files = [*self.files, self.folder / "config.json"]
        return {file.relative_to(self.folder).as_posix(): file for file in files}

    def where(self, name: str | None = None) -> str:
        """The file that holds a tensor; the folder, if none is named."""
        return str(self._file_of[name].path if name else self.folder)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """A part of a tensor, in the dtype in which it is stored.

        Raises:
            InputError: it holds NaN or infinity, or the file can no longer be read.
        """
        return check_finite(self._file_of[name].read(name, *where), name, self.where(name))

    def as_read(self, model: torch.nn.Module) -> torch.nn.Module:
        """A model that transformers has loaded from the folder, with the weights of this."""
        return model

    def cuts(self, name: str) -> int:
        """See ``WeightFile``."""
        return self._file_of[name].cuts(name)


def check_finite(tensor: Tensor, name: str, where: str) -> Tensor:
    """The tensor, of a file.

    Raises:
        InputError: it holds NaN or infinity.
    """
    if not tensor.is_floating_point():
        return tensor
    numbers = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no sum
    # A finite sum proves finite elements; only where it overflows is a slower look needed.
    if not (numbers.sum().isfinite() or numbers.isfinite().all()):
        raise InputError(
            f"tensor {name} in {where} holds NaN or infinity; "
            "a model like that cannot be grown or proved, use an earlier checkpoint"
        )
    return tensor


NARROWEST = 2
"""Bytes per number that a source is rounded to, at least: fewer need a scale for every tensor."""


def rounds(dtype: str, other: str) -> bool:
    """Whether some number of the one format is none of the other, with fewer bits for a part."""
    one, two = (torch.finfo(TensorInfo((), each).torch_dtype) for each in (dtype, other))
    exponents = [each.bits + math.log2(each.eps) for each in (one, two)]
    return one.eps < two.eps or exponents[0] > exponents[1]


def too_narrow(main: str, wanted: str) -> bool:
    """Whether weights of one dtype are not rounded to another, both by their safetensors names."""
    return rounds(main, wanted) and FLOAT_BYTES[wanted] < NARROWEST


def rounded(source: Weights, dtype: str | None) -> str | None:
    """The dtype to which most weights are rounded when they are stored in another; None if none.

    Args:
        source: the checkpoint.
        dtype: torch name of a known dtype, or None for the source's own.
    """
    known = dtype in TORCH_NAMES.values()
    narrows = known and rounds(main_dtype(source.tensors), tensors.SAFETENSORS_NAMES[str(dtype)])
    return dtype if narrows else None


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
        main = main_dtype(source.tensors)
        if dtype not in TORCH_NAMES.values():
            chosen = [name for each, name in TORCH_NAMES.items() if not too_narrow(main, each)]
            raise InputError(
                f"dtype {dtype!r} is not known; choose one of {', '.join(chosen)}"
                f"{perhaps(dtype, chosen, TORCH_NAMES)}"
            )
        wanted = tensors.SAFETENSORS_NAMES[dtype]
        if too_narrow(main, wanted):
            name = next(name for name, info in source.tensors.items() if info.dtype == main)
            raise InputError(
                f"dtype {dtype} would round tensor {name} in {source.where(name)}, which is "
                f"{TORCH_NAMES[main]}, and is too narrow for weights without scales; choose "
                "bfloat16, or a wider one"
            )
        self.rounded = rounded(source, dtype)
        self._source, self.quantised = source, source.quantised
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
        dtype = self.tensors[name].torch_dtype
        before = self._source.tensors[name].dtype
        with torch._C.DisableTorchFunction():  # strict float64 must not apply
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


class RoundedCheckpoint(Widened, Checkpoint):
    """A model folder whose weights are read as they are once rounded; for the proof.

    Args:
        source: the folder.
        dtype: see ``Widened``.
    """

    def __init__(self, source: Checkpoint, dtype: str) -> None:
        self.__dict__.update(source.__dict__)  # the same folder, opened once
        super().__init__(source, dtype)
        self.dtype = dtype

    def as_read(self, model: torch.nn.Module) -> torch.nn.Module:
        """See ``Checkpoint``."""
        with torch.no_grad(), torch._C.DisableTorchFunction():  # as in ``Widened``
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, self.dtype)))
        return model


@contextmanager
def outlined(weights: Weights, config: Config) -> Iterator[Checkpoint]:
    """A temporary folder with the headers of a planned checkpoint, and no numbers behind them.

    transformers can be asked about a model that is written nowhere. The folder takes no room.

    Args:
        weights: the tensors in its headers; their numbers are not to be read.
        config: the contents of ``config.json``.

    Raises:
        InputError: the folder cannot be made.
    """
    with temporary("outline") as folder:
        write_json(folder / "config.json", config)
        begin = header_of(weights.tensors)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(begin)
            file.truncate(len(begin) + tensors.total_bytes(weights.tensors))
        yield Checkpoint(folder)
