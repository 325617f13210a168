"""Reading a Hugging Face folder: headers at once, tensors one at a time."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from growkit.checkpoint import TORCH_NAMES, Config, TensorInfo
from growkit.checkpoint.carrying import carried, code_of
from growkit.checkpoint.folder import Folder
from growkit.errors import InputError, reason

if TYPE_CHECKING:
    from torch import Tensor

_SAFETENSORS_NAMES = {name: dtype for dtype, name in TORCH_NAMES.items()}


class Checkpoint:
    """A model folder: ``config.json`` and its weights, of which only headers are read at first.

    Weights are ``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists,
    or, where there are none, the same of ``pytorch_model.bin`` (weights-only loading).

    Raises:
        InputError: the folder is no checkpoint, or a file is missing, truncated or malformed.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.opened = Folder(folder)
        self.config: Config = self.opened.json("config.json")
        self.files, listed = _weight_files(self.opened)
        for name in (*carried(self.opened), *code_of(self.opened)):
            self.opened.require(name)  # before anything is written
        self.tensors: dict[str, TensorInfo] = {}
        self._file_of: dict[str, Path] = {}
        self._known_finite: dict[str, int] = {}  # how many rows from the first on
        for file in self.files:
            for name, info in _headers(file).items():
                if name in self._file_of:
                    raise InputError(
                        f"tensor {name} is in both {self._file_of[name]} and {file}; remove one, "
                        "one of the shards may be left over from another model"
                    )
                self.tensors[name] = info
                self._file_of[name] = file
        for name, file in listed.items():
            if self._file_of.get(name) != file:
                raise InputError(
                    f"tensor {name} is missing from {file}, where the index lists it; "
                    "copy the checkpoint again"
                )

    def where(self, name: str | None = None) -> str:
        """The file that holds a tensor; the folder, if none is named."""
        return str(self._file_of[name] if name else self.folder)

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor in its storage dtype, or some rows of it; its file is closed again.

        Raises:
            InputError: they hold NaN or infinity, or the file can no longer be read.
        """
        tensor = _read(self._file_of[name], name, rows)
        count = self.tensors[name].shape[0] if self.tensors[name].shape else 1
        begin, end, _ = (rows or slice(None)).indices(count)
        known = self._known_finite.get(name, 0)
        if end > known and not _finite(tensor):
            raise InputError(
                f"tensor {name} in {self._file_of[name]} holds NaN or infinity; "
                "a model like that cannot be grown or proved, use an earlier checkpoint"
            )
        if begin <= known < end:  # a proof reads every tensor several times
            self._known_finite[name] = end
        return tensor

    def by_rows(self, name: str) -> bool:
        """Files of safetensors are mapped, others are read as a whole."""
        return self._file_of[name].suffix == ".safetensors"

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor, whole."""
        yield self.read(name)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; see ``Folder.json``."""
    return Folder(file.parent).json(file.name)


def _weight_files(folder: Folder) -> tuple[list[Path], dict[str, Path]]:
    """The files with the weights, in order, and where the index (if any) says each tensor is."""
    for single in ("model.safetensors", "pytorch_model.bin"):
        file = folder.find(single)
        if file:  # transformers as well prefers it to an index
            return [file], {}
        index = f"{single}.index.json"
        if folder.has(index):
            weight_map = folder.json(index).get("weight_map")
            if not isinstance(weight_map, dict) or not weight_map:
                raise InputError(f"{folder.path / index} has no weight_map; copy the index again")
            listed = {name: folder.path / str(file) for name, file in weight_map.items()}
            files = sorted(set(listed.values()))
            for file in files:
                if not folder.find(file.name):
                    raise InputError(
                        f"shard {file} is missing, {index} lists it; copy it into the folder"
                    )
            return files, listed
    raise InputError(
        f"{folder} has no weights; model.safetensors, model.safetensors.index.json or "
        "pytorch_model.bin was expected"
    )


def _headers(file: Path) -> dict[str, TensorInfo]:
    _check_readable(file)
    if file.suffix == ".bin":
        pickled = _load_pickled(file, "meta").items()
        return {name: TensorInfo(tuple(t.shape), _dtype_name(t)) for name, t in pickled}
    try:
        with safe_open(file, framework="np") as opened:  # no need of torch for headers
            headers = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {
                name: TensorInfo(tuple(header.get_shape()), header.get_dtype())
                for name, header in headers.items()
            }
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} is not a whole safetensors file ({reason(error)}); it may be truncated, "
            "copy it again"
        ) from None


def _check_readable(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            begin = stream.read(40)
    except OSError as error:
        raise InputError(f"{file} cannot be read ({error.strerror}); make it readable") from None
    if begin.startswith(b"version https://git-lfs"):
        raise InputError(f"{file} only points to the weights; fetch them with 'git lfs pull'")


def _dtype_name(tensor: Tensor) -> str:
    """The safetensors name of a dtype, or torch's for what safetensors has no float name for."""
    name = str(tensor.dtype).removeprefix("torch.")
    return _SAFETENSORS_NAMES.get(name, name)


def _read(file: Path, name: str, rows: slice | None) -> Tensor:
    if file.suffix == ".bin":
        whole = _load_pickled(file, "cpu")[name].contiguous()
        return whole if rows is None else whole[rows]
    try:
        # Opened for this tensor alone, so that its pages are given back with it.
        with safe_open(file, framework="pt") as opened:
            tensor: Tensor = (
                opened.get_tensor(name) if rows is None else opened.get_slice(name)[rows]
            )
            return tensor
    except (SafetensorError, OSError) as error:
        raise InputError(f"tensor {name} cannot be read from {file} ({reason(error)})") from None


def _load_pickled(file: Path, device: str) -> dict[str, Tensor]:
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old formats: nothing that a user could change
            try:
                content = torch.load(file, map_location=device, weights_only=True, mmap=True)
            except RuntimeError:  # files from before torch 1.6 cannot be mapped
                content = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # a damaged pickle may raise anything
        why = "it holds more than tensors" if type(error) is UnpicklingError else reason(error)
        raise InputError(
            f"{file} cannot be loaded as plain weights ({why}); it may be truncated or hold code, "
            "save the model as safetensors"
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        for tensor in content.values()
    ):
        raise InputError(
            f"{file} does not hold a plain dictionary of dense tensors; save the model as "
            "safetensors"
        )
    return content


def _finite(tensor: Tensor) -> bool:
    numbers = tensor.float() if tensor.element_size() == 1 else tensor  # float8 has no arithmetic
    # A finite sum proves finite elements; only where it overflows is a slower look needed.
    return bool(numbers.sum().isfinite()) or bool(numbers.isfinite().all())
