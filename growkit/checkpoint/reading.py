"""Reading of model folders: headers at once, tensors on demand, as stored or in another dtype.

A source is rounded to a narrower dtype once, before all steps; a promise then holds for the rounded
source.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from growkit.algebra.splits import widened
from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.names import listed, perhaps
from growkit.base.tensors import (
    FLOAT_BITS,
    FLOAT_BYTES,
    TORCH_NAMES,
    Config,
    TensorInfo,
    Weights,
    main_dtype,
)
from growkit.checkpoint.distributed_file import DistributedFile, open_model
from growkit.checkpoint.folder import LIST, SINGLE, Folder
from growkit.checkpoint.publishing import write_json
from growkit.checkpoint.scratch import temporary
from growkit.checkpoint.weight_file import WeightFile, open_weights
from growkit.checkpoint.writing import header_of
from growkit.families.model import Model

MAX_DIGITS = 18
"""Largest number of digits of a whole number in a config; more do not fit into 64 bits."""


class Checkpoint(Model):
    """A model folder: ``config.json``, and weights whose tensors are read on demand.

    The weights are ``model.safetensors``, or the shards listed by ``model.safetensors.index.json``.
    Without these, they are ``pytorch_model.bin`` or its shards (loaded as weights only), or files
    of torch.distributed.checkpoint.

    Attributes:
        folder: path of the folder.
        opened: the folder, through which all its files are read.
        config: the contents of ``config.json``.
        files: paths of the files with weights.
        distributed: whether these are files of torch.distributed.checkpoint.
        stands_alone: whether transformers loads exactly this model from the folder.
        tensors: the header of every tensor, by name.
        wrappers: the parts of names that modules around the model added, such as ``_orig_mod``;
            they are left out.
        notes: sentences on what is in the folder, but not read as it is.

    Raises:
        InputError: the folder is not a checkpoint, or a file is missing, truncated or malformed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.opened = Folder(folder)
        self.folder = self.opened.path
        self.config: Config = self.opened.json("config.json", MAX_DIGITS)
        self.opened.check_files()
        names, listed = self.opened.weight_files(self.config)
        self.distributed = names == [LIST]
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
                    "one of the files, which may be left over from another model"
                )
            self._file_of |= dict.fromkeys(file.tensors, file)
        self._in_files, self.wrappers = _unwrapped(self._file_of, str(self.folder))
        self.stands_alone = not (self.distributed or self.wrappers)
        self.tensors = {
            name: self._file_of[stored].tensors[stored] for name, stored in self._in_files.items()
        }
        self.notes = [*self._notes(names)]
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
        """See ``Weights``; the file of a tensor, or the folder."""
        return str(self._file_of[self._in_files.get(name, name)].path if name else self.folder)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Read a slice of a tensor in its stored dtype.

        Raises:
            InputError: the slice holds NaN or infinity, or the file cannot be read any more.
        """
        stored = self._in_files[name]
        return check_finite(self._file_of[stored].read(stored, *where), name, self.where(name))

    def as_read(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give a model that transformers loaded from the folder the weights of this checkpoint."""
        return model

    def cuts(self, name: str) -> int:
        """See ``WeightFile``."""
        stored = self._in_files[name]
        return self._file_of[stored].cuts(stored)

    def _notes(self, read: Collection[str]) -> Iterator[str]:
        """See ``notes``; ``read`` are the files with the weights."""
        if self.wrappers:
            yield (
                f"the names of tensors in {self.folder} have {listed(self.wrappers)} of modules "
                "around the model, which transformers does not read; growkit leaves it out"
            )
        for single, index in SINGLE.items():
            stem, _, ending = single.rpartition(".")
            alike = {*self.opened.names(f"{stem}*.{ending}", index)}
            if alike.isdisjoint(read):
                continue
            unread = sorted(alike.difference(read, () if single in read else [index]))
            if unread:
                yield (
                    f"transformers reads the weights of {self.folder} from {min(read)}"
                    f"{'' if single in read else ' and the other files in ' + index}, and not from "
                    f"{listed(unread)}; move away what is left over from another model"
                )


WRAPPER = re.compile(r"(?<![^.])(_[a-z_]*mod(?:ule)?)\.")
"""Parts that torch.compile, FSDP and checkpointing add to names: ``_orig_mod``,
``_fsdp_wrapped_module``, ``_checkpoint_wrapped_module``, ``_forward_module``."""

PARALLEL = "module."
"""The part that DistributedDataParallel and DeepSpeed put before all names."""


def _unwrapped(names: Collection[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Leave out the parts of names that modules around a model added.

    Returns:
        The name in the files of every tensor, and the parts.

    Raises:
        InputError: two names differ only in such parts.
    """
    wrappers = sorted({part for name in names for part in WRAPPER.findall(name)})
    plain = {name: WRAPPER.sub("", name) for name in names}
    if all(name.startswith(PARALLEL) for name in plain.values()):
        plain = {name: short.removeprefix(PARALLEL) for name, short in plain.items()}
        wrappers.append(PARALLEL[:-1])
    stored = {short: name for name, short in plain.items()}
    if twice := next((name for name in names if stored[plain[name]] != name), None):
        raise InputError(
            f"tensors {twice} and {stored[plain[twice]]} in {where} have the same name without "
            f"{listed(wrappers)}; remove the one that is left over from another model"
        )
    return stored, wrappers


def check_finite(tensor: Tensor, name: str, where: str) -> Tensor:
    """Refuse a tensor of a file that is not finite; return any other.

    Raises:
        InputError: the tensor holds NaN or infinity.
    """
    if not tensor.is_floating_point():
        return tensor
    numbers = widened(tensor)
    # A finite sum proves finite elements; if it overflows, each element is checked.
    if not (numbers.sum().isfinite() or numbers.isfinite().all()):
        raise InputError(
            f"tensor {name} in {where} holds NaN or infinity, so the model cannot be grown or "
            "proved; use an earlier checkpoint"
        )
    return tensor


NARROWEST = 2
"""Bytes per number of the narrowest dtype to round to; narrower ones need scales."""


def rounds(dtype: str, other: str) -> bool:
    """Whether another dtype cannot represent all numbers of a dtype (safetensors names)."""
    return any(own > of for own, of in zip(FLOAT_BITS[dtype], FLOAT_BITS[other], strict=True))


def too_narrow(main: str, wanted: str) -> bool:
    """Whether a dtype is too narrow to round weights to it (safetensors names)."""
    return rounds(main, wanted) and FLOAT_BYTES[wanted] < NARROWEST


def rounded(source: Weights, dtype: str | None) -> str | None:
    """The dtype to which most weights are rounded if they are stored in it; None if none are.

    Args:
        source: the checkpoint.
        dtype: torch name of a known dtype, or None for the source's own.
    """
    known = dtype in TORCH_NAMES.values()
    narrows = known and rounds(main_dtype(source.tensors), tensors.SAFETENSORS_NAMES[str(dtype)])
    return dtype if narrows else None


class Widened(Model):
    """A model in another dtype; tensors that are wider than most stay as wide as they are.

    Args:
        source: the checkpoint.
        dtype: torch name of the dtype, e.g. ``float32``; a narrower one rounds every weight once,
            to the nearest number, with ties to even.

    Raises:
        InputError: the dtype is unknown or too narrow.

    Attributes:
        rounded: the dtype if weights are rounded to it, else None.
    """

    def __init__(self, source: Model, dtype: str) -> None:
        main = main_dtype(source.tensors)
        if dtype not in TORCH_NAMES.values():
            chosen = [name for key, name in TORCH_NAMES.items() if not too_narrow(main, key)]
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
        self._source, self.quantised, self.described = source, source.quantised, source.described
        self.config: Config = source.config | {"dtype": dtype}
        if "torch_dtype" in source.config:
            self.config["torch_dtype"] = dtype
        if source.published is not None:
            key = "dtype" if "torch_dtype" not in source.published else "torch_dtype"
            self.published = source.published | {key: dtype}
        self.tensors = {
            name: TensorInfo(info.shape, wanted)
            if info.dtype in FLOAT_BYTES
            and not (rounds(info.dtype, wanted) and rounds(info.dtype, main))
            else info
            for name, info in source.tensors.items()
        }

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return self._source.where(name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Read a slice of a tensor in its new dtype.

        Raises:
            InputError: a number is too large for the new dtype.
        """
        dtype = self.tensors[name].torch_dtype
        before = self._source.tensors[name].dtype
        with torch._C.DisableTorchFunction():  # strict float64 must not apply
            values = self._source.read(name, *where).to(dtype)
        narrower = before in FLOAT_BYTES and rounds(before, self.tensors[name].dtype)
        if narrower and not values.isfinite().all():
            raise InputError(
                f"tensor {name} in {self.where(name)} holds numbers that are too large for "
                f"{str(dtype).removeprefix('torch.')}; choose bfloat16, or a wider dtype"
            )
        return values

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return self._source.cuts(name)


class View(Checkpoint):
    """A checkpoint that reads the files of another one in another way.

    Args:
        stored: the other checkpoint.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self.stored = stored
        self.opened, self.folder, self.files = stored.opened, stored.folder, stored.files
        self.distributed, self.stands_alone = stored.distributed, stored.stands_alone
        self.wrappers, self.notes = stored.wrappers, stored.notes
        self.config, self.published, self.described = (
            stored.config,
            stored.published,
            stored.described,
        )
        self.quantised, self.part_of = stored.quantised, stored.part_of
        self.tensors = stored.tensors

    def where(self, name: str | None = None) -> str:
        """See ``Checkpoint``."""
        return self.stored.where(name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Checkpoint``."""
        return self.stored.read(name, *where)

    def cuts(self, name: str) -> int:
        """See ``Checkpoint``."""
        return self.stored.cuts(name)


class RoundedCheckpoint(Widened, View):
    """A rounded checkpoint that is also a folder, for the proof.

    Args:
        source: the folder.
        dtype: see ``Widened``.
    """

    def __init__(self, source: Checkpoint, dtype: str) -> None:
        View.__init__(self, source)
        Widened.__init__(self, source, dtype)
        self.dtype = dtype

    def as_read(self, model: torch.nn.Module) -> torch.nn.Module:
        """See ``Checkpoint``."""
        with torch.no_grad(), torch._C.DisableTorchFunction():  # as in ``Widened``
            for parameter in model.parameters():
                parameter.copy_(parameter.to(getattr(torch, self.dtype)))
        return model


@contextmanager
def outlined(weights: Weights, config: Config) -> Iterator[Checkpoint]:
    """Make a temporary folder with the headers of a planned checkpoint, but without its data.

    transformers can then examine a model that is not written. The folder takes no disk space.

    Args:
        weights: the planned tensors; they must not be read from the folder.
        config: the contents of ``config.json``.

    Raises:
        InputError: the folder cannot be made.
    """
    with temporary("outline") as folder:
        write_json(folder / "config.json", config)
        header = header_of(weights.tensors)
        with (folder / "model.safetensors").open("wb") as file:
            file.write(header)
            file.truncate(len(header) + tensors.total_bytes(weights.tensors))
        yield Checkpoint(folder)
