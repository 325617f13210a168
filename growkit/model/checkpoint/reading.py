"""Reading of model folders: headers at once, tensors on demand, as stored or in another dtype.

A source is rounded to a narrower dtype once, before all steps; a promise then holds for the rounded
source.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

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
    widened,
)
from growkit.base.torch_internals import stored_dtypes
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import find_format, other_formats, refuse_followed
from growkit.model.checkpoint.publishing import write_json
from growkit.model.checkpoint.scratch import temporary
from growkit.model.checkpoint.weight_file import StoredWeights
from growkit.model.checkpoint.writing import shards_of, write_frame
from growkit.model.model import Derived, Model


class Checkpoint(Model):
    """A model folder, or a file with a whole model: a config, and tensors that are read on demand.

    They have the names of transformers, whatever the format (``growkit.model.checkpoint.format``).

    Attributes:
        folder: path of the folder, or of the file.
        opened: the folder, through which all its files are read.
        config: the contents of ``config.json``, or what it would be.
        files: paths of the files with weights, and of those beside them.
        format: the format of these files.
        tensors: the header of every tensor, by name.
        wrappers: the parts of names that modules around the model added, such as ``_orig_mod``;
            they are left out.
        notes: sentences on what is in the folder, but not read as it is.

    Raises:
        InputError: the folder is not a checkpoint, or a file is missing, truncated or malformed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.opened = Folder(folder)
        self.folder = self.opened.path / self.opened.only
        self.format, names = find_format(self.opened)
        files = self.format.open(self.opened, [*names])
        self.config: Config = self.format.config(self.opened, files)
        refuse_followed(self.config, self.opened)
        self.opened.check_files()
        beside = filter(None, map(self.opened.find, self.format.beside))
        self.files = [*(path for file in files for path in file.paths), *beside]
        stored = _file_by_tensor(files, names, self.folder)
        self._stored = self.format.to_transformers(_Joined(stored), self.config)
        self.wrappers: list[str] = []
        if isinstance(self._stored, _Joined):
            unwrapped, self.wrappers = _unwrapped(stored, str(self.folder))
            self._stored = _Joined(stored, unwrapped)
        self.stands_alone = self.format.read_by_transformers and not self.wrappers
        self.tensors, self.in_blocks = self._stored.tensors, self._stored.in_blocks
        self.notes = [*self._notes([*names]), *(file.note for file in files if file.note)]
        if not any(info.dtype in FLOAT_BYTES and info.elements for info in self.tensors.values()):
            raise InputError(
                f"{self.folder} has no weights of a float dtype ({', '.join(FLOAT_BYTES)}); "
                "copy the checkpoint again, or dequantise the model"
            )

    @property
    def model_files(self) -> dict[str, Path]:
        """``config.json`` and the files with the weights, by their paths in the folder."""
        files = [*self.files, *filter(None, [self.opened.find("config.json")])]
        return {file.relative_to(self.opened.path).as_posix(): file for file in files}

    def where(self, name: str | None = None) -> str:
        """See ``Weights``; the file of a tensor, or the folder."""
        return self._stored.where(name) if name else str(self.folder)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Read a slice of a tensor in its stored dtype.

        Raises:
            InputError: the slice holds NaN or infinity, or the file cannot be read any more.
        """
        return check_finite(self._stored.read(name, *where), name, self.where(name))

    def states(self, key: str) -> bool:
        """Whether the model says the value of a config key, be it by leaving out the key."""
        return self.format.complete or key in self.config

    def as_read(self, model: torch.nn.Module) -> torch.nn.Module:
        """Give a model that transformers loaded from the folder the weights of this checkpoint."""
        return model

    def cuts(self, name: str) -> int:
        """See ``WeightFile``."""
        return self._stored.cuts(name)

    def _notes(self, names: Sequence[str]) -> Iterator[str]:
        """See ``notes``; ``names`` are the files with the weights."""
        if self.wrappers:
            yield (
                f"the names of tensors in {self.folder} have {listed(self.wrappers)} of modules "
                "around the model, which transformers does not read; growkit leaves it out"
            )
        yield from self.format.notes(self.opened, names)
        yield from other_formats(self.opened, names)


WRAPPER = re.compile(r"(?<![^.])(_[a-z_]*mod(?:ule)?)\.")
"""Parts that torch.compile, FSDP and checkpointing add to names: ``_orig_mod``,
``_fsdp_wrapped_module``, ``_checkpoint_wrapped_module``, ``_forward_module``."""

PARALLEL = "module."
"""The part that DistributedDataParallel and DeepSpeed put before all names."""


class _Joined(Weights):
    """The tensors of several files as one; ``names`` are the stored ones by the names to read."""

    def __init__(
        self, file_of: Mapping[str, StoredWeights], names: Mapping[str, str] | None = None
    ) -> None:
        self._names = {name: name for name in file_of} if names is None else names
        self._file_of = {name: file_of[stored] for name, stored in self._names.items()}
        self.tensors = {
            name: self._file_of[name].tensors[stored] for name, stored in self._names.items()
        }
        self.in_blocks = {n for n, of in self._names.items() if of in self._file_of[n].in_blocks}

    def where(self, name: str | None = None) -> str:
        assert name is not None
        return str(self._file_of[name].path)

    def read(self, name: str, *where: slice | None) -> Tensor:
        return self._file_of[name].read(self._names[name], *where)

    def cuts(self, name: str) -> int:
        return self._file_of[name].cuts(self._names[name])


def _file_by_tensor(
    files: Sequence[StoredWeights], needed: Mapping[str, Sequence[str]], folder: Path
) -> dict[str, StoredWeights]:
    """The file of every stored tensor.

    Raises:
        InputError: two files have a tensor, or one that an index lists is missing.
    """
    file_of: dict[str, StoredWeights] = {}
    for file in files:
        for name in file.tensors.keys() & file_of.keys():
            raise InputError(
                f"tensor {name} is in both {file_of[name].path} and {file.path}; remove one of the "
                "files, which may be left over from another model"
            )
        file_of |= dict.fromkeys(file.tensors, file)
    for tensor, file_name in ((tensor, name) for name in needed for tensor in needed[name]):
        if tensor not in file_of or file_of[tensor].path.name != file_name:
            raise InputError(
                f"tensor {tensor} is missing from {folder / file_name}, where the index lists it; "
                "copy the checkpoint again"
            )
    return file_of


def _unwrapped(names: Collection[str], where: str) -> tuple[dict[str, str], list[str]]:
    """Leave out the parts of names that modules around a model added.

    Returns:
        The stored tensor of every tensor, and the parts.

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


class Widened(Derived):
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
        super().__init__(source)
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
        self.config = source.config | {"dtype": dtype}
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

    def read(self, name: str, *where: slice | None) -> Tensor:
        """Read a slice of a tensor in its new dtype.

        Raises:
            InputError: a number is too large for the new dtype.
        """
        dtype = self.tensors[name].torch_dtype
        before = self.source.tensors[name].dtype
        with stored_dtypes():  # strict float64 must not apply
            values = super().read(name, *where).to(dtype)
        narrower = before in FLOAT_BYTES and rounds(before, self.tensors[name].dtype)
        if narrower and not values.isfinite().all():
            raise InputError(
                f"tensor {name} in {self.where(name)} holds numbers that are too large for "
                f"{str(dtype).removeprefix('torch.')}; choose bfloat16, or a wider dtype"
            )
        return values


class View(Derived, Checkpoint):
    """A checkpoint that reads the files of another one in another way.

    Args:
        stored: the other checkpoint.
    """

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        self.stored = stored
        self.opened, self.folder, self.files = stored.opened, stored.folder, stored.files
        self.format, self.stands_alone = stored.format, stored.stands_alone
        self.wrappers, self.notes = stored.wrappers, stored.notes


class RoundedCheckpoint(Widened, View):
    """A rounded checkpoint that is also a folder, for the proof.

    Args:
        source: the folder.
        dtype: see ``Widened``.
    """

    def __init__(self, source: Checkpoint, dtype: str) -> None:
        super().__init__(source, dtype)
        self.dtype = dtype

    def as_read(self, model: torch.nn.Module) -> torch.nn.Module:
        """See ``Checkpoint``."""
        with torch.no_grad(), stored_dtypes():  # as in ``Widened``
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
        for shard in shards_of(weights.tensors, tensors.total_bytes(weights.tensors)):
            write_frame(shard, folder, whole=True)
        yield Checkpoint(folder)
