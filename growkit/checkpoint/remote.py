"""Weights on an object store or a web server, read where they lie: by ranges, through fsspec.

Nothing is downloaded but the config, the index, headers and the parts of tensors that are asked
for. Headers are checked like those of local files (``safetensors_file.py``). If a store drops a
connection, the missing part is requested again a few times. A part that is still missing, or of
another version, ends in an error, never in wrong weights.
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from growkit.checkpoint.carrying import GENERATION
from growkit.checkpoint.elsewhere import STORE, address_in
from growkit.checkpoint.folder import MOST_JSON
from growkit.checkpoint.reading import MOST_DIGITS, check_finite
from growkit.checkpoint.safetensors_file import places_in
from growkit.checkpoint.tensors import Config, TensorInfo
from growkit.checkpoint.weight_file import Place, read_place
from growkit.checkpoint.weight_files import check_config, listed_in
from growkit.errors import InputError, reason
from growkit.parsing import parse_json

if TYPE_CHECKING:
    from torch import Tensor

TRIES = 4
"""Times that a part is asked for before it is given up."""

PAUSE = 0.1
"""Seconds before the second time; twice as many before each of the next."""

AT_A_TIME = 1 << 23
"""Bytes that are asked for at a time where a whole file is read."""

INSTALL = "pip install 'growkit[remote]'"


def is_remote(source: Path | str) -> bool:
    """Whether a source is the address of a folder on a store."""
    return bool(STORE.fullmatch(str(source)))


class Store:
    """A folder on a store.

    Args:
        address: of the folder, as fsspec has it.

    Raises:
        InputError: fsspec has nothing for such addresses.
    """

    def __init__(self, address: Path | str) -> None:
        self.address = address_in(str(address).rstrip("/"))
        try:
            import fsspec

            options = _checked_ranges() if self.address.startswith("http") else {}
            self._files: Any = fsspec.core.url_to_fs(self.address, **options)[0]
        except ImportError as error:
            raise InputError(
                f"{self.address} cannot be read without another package ({reason(error)}); "
                f"install it: {INSTALL}"
            ) from error
        except Exception as error:  # each store has errors of its own, and asks for other things
            raise InputError(
                f"{self.address} is no address that can be read ({_said(error)}); give one like "
                "s3://BUCKET/MODEL or https://HOST/MODEL"
            ) from error

    def about(self, name: str) -> tuple[int, str]:
        """Size of a file, and what changes with its contents.

        Raises:
            FileNotFoundError: there is none.
            InputError: the store does not say its size.
        """
        self._files.invalidate_cache()
        info = self._asked(name, self._files.info)
        if not isinstance(info.get("size"), int):
            raise InputError(
                f"{self.address}/{name} has no size that its server tells, so that no part of it "
                "can be read; download the model, and give its folder"
            )
        marks = [
            str(info[key])
            for key in ("ETag", "Last-Modified", "LastModified", "mtime")
            if key in info
        ]
        return info["size"], " ".join(marks)

    def part(self, name: str, begin: int, count: int) -> bytes:
        """So many bytes of a file.

        Raises:
            InputError: the store does not give them.
        """
        found = b""

        def ask(path: str) -> bytes:
            nonlocal found
            at = begin + len(found)  # what came before a connection broke need not come again
            more: bytes = self._files.cat_file(path, start=at, end=begin + count)
            if len(more) > count - len(found):
                raise InputError(
                    f"{self.address}/{name} comes as a whole where a part was asked for; its "
                    "server has no range requests, so download the model and give its folder"
                )
            found += more
            if len(found) < count:
                raise OSError(f"only {len(found):,} of {count:,} bytes came")
            return found

        self._asked(name, ask)
        return found

    def sha256(self, name: str) -> str:
        """The SHA-256 of a file, all of which is read.

        Raises:
            InputError: it cannot be read, or becomes another one meanwhile.
        """
        digest, about = hashlib.sha256(), self.about(name)
        for begin in range(0, about[0], AT_A_TIME):
            digest.update(self.part(name, begin, min(AT_A_TIME, about[0] - begin)))
        if self.about(name) != about:
            raise InputError(_changed(f"{self.address}/{name}"))
        return digest.hexdigest()

    def _asked(self, name: str, ask: Any) -> Any:
        """What the store answers, which may take several times."""
        path = f"{self.address}/{name}"
        failed: Exception = OSError("nothing came")
        for number in range(TRIES):
            if number:
                time.sleep(PAUSE * 2 ** (number - 1))
            try:
                return ask(path)
            except InputError:
                raise
            except Exception as error:  # each store has errors of its own
                if _is_missing(error):
                    raise FileNotFoundError(path) from error
                failed = error
        raise InputError(
            f"{path} cannot be read ({_said(failed)}), asked "
            f"{TRIES} times; try again when it can be reached, or download the model"
        ) from failed


def _checked_ranges() -> dict[str, Any]:
    """Options of fsspec's HTTP client under which a server must send the bytes that are asked for.

    fsspec looks at neither the status nor the headers of an answer, so bytes from elsewhere in the
    file would be taken for weights.
    """
    import aiohttp

    async def check(session: Any, context: Any, params: Any) -> None:
        wanted, response = params.headers.get("Range"), params.response
        if wanted is None or response.status not in (200, 206):
            return
        first = wanted.removeprefix("bytes=").partition("-")[0]
        if response.status == 206:
            sent = response.headers.get("Content-Range", "no range")
        else:
            sent = "bytes 0-"
        if not sent.startswith(f"bytes {first}-"):
            raise InputError(
                f"{params.url} sends {sent} of a file where {wanted} was asked for; its server "
                "has no range requests that can be relied on, so download the model and give its "
                "folder"
            )

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(check)
    return {"client_kwargs": {"trace_configs": [trace]}}


def _changed(path: str) -> str:
    return f"{path} has changed while it was read; try again when nothing writes to it any more"


def _said(error: Exception) -> str:
    """What went wrong; over HTTP, it is behind an error that only names the file."""
    behind = error.__cause__ if isinstance(error, FileNotFoundError) else None
    told = behind or error
    return f"{type(told).__name__}: {reason(told)}"


def _is_missing(error: Exception) -> bool:
    """Whether there is no such file; over HTTP, whatever went wrong is called that."""
    if not isinstance(error, FileNotFoundError):
        return False
    behind = error.__cause__
    return (
        behind is None
        or getattr(behind, "status", None) in (404, 410)
        or (isinstance(behind, FileNotFoundError))
    )


class RemoteFile:
    """A file of weights on a store, whose header has been read.

    Args:
        store: the folder.
        name: of the file.

    Raises:
        InputError: it is no whole safetensors file, or cannot be read.
    """

    def __init__(self, store: Store, name: str) -> None:
        self.path = f"{store.address}/{name}"
        self._store, self._name = store, name
        self._size, self._mark = store.about(name)
        try:
            self.places: Mapping[str, Place] = places_in(self._header(), self._size, self.path)
        except ValueError as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{self.path} is not a whole safetensors file ({reason(error)}); upload it again"
            ) from None

    def _header(self) -> IO[bytes]:
        """The beginning of the file, as far as it is asked for."""
        return cast("IO[bytes]", io.BufferedReader(_Ranges(self._store, self._name, self._size)))

    def read(self, name: str, rows: slice | None, columns: slice | None = None) -> Tensor:
        """See ``WeightFile.read``; some columns come as one range for every row.

        Raises:
            InputError: the file is another one by now, or cannot be read.
        """
        found = read_place(self._bytes, name, self.places[name], rows, columns)
        if self._store.about(self._name) != (self._size, self._mark):
            raise InputError(_changed(self.path))
        return found

    def _bytes(self, name: str, begin: int, size: int, count: int = 1, step: int = 0) -> Tensor:
        """See ``WeightFile``."""
        import torch

        data = torch.empty(size * count, dtype=torch.uint8)
        whole = data.numpy().data
        for number in range(count if size else 0):
            piece = self._store.part(self._name, begin + number * step, size)
            whole[number * size : (number + 1) * size] = piece
        return data


class _Ranges(io.RawIOBase):
    """A file on a store as a stream, every piece of which is one range."""

    def __init__(self, store: Store, name: str, size: int) -> None:
        self._store, self._name, self._size, self._at = store, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        assert whence == 0
        self._at = offset
        return offset

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        if count:
            buffer[:count] = self._store.part(self._name, self._at, count)
        self._at += count
        return count


class RemoteWeights:
    """A model on a store: config and headers at once, tensors one at a time.

    It has what ``growkit.checkpoint.tensors.Weights`` asks for. Weights are ``model.safetensors``,
    or the shards that ``model.safetensors.index.json`` lists.

    Args:
        address: such as ``s3://BUCKET/MODEL``.

    Attributes:
        config: the contents of ``config.json``.
        tensors: the header of every tensor, by name.

    Raises:
        InputError: there is no such model, or it cannot be read; see ``Checkpoint``.
    """

    def __init__(self, address: Path | str) -> None:
        self._store = Store(address)
        self.config: Config = self._json("config.json", MOST_DIGITS)
        check_config(self._store.address, self.config)
        self._file_of: dict[str, RemoteFile] = {}
        self.tensors: dict[str, TensorInfo] = {}
        listed = self._listed()
        for name in sorted(set(listed.values())) or ["model.safetensors"]:
            self._add(name)
        for tensor, name in listed.items():
            if tensor not in self._file_of or not self._file_of[tensor].path.endswith(f"/{name}"):
                raise InputError(
                    f"tensor {tensor} is missing from {self._store.address}/{name}, where the "
                    "index lists it; upload the checkpoint again"
                )

    def _listed(self) -> dict[str, str]:
        """Where the index says that each tensor is; nothing for a single file, as locally."""
        single = "model.safetensors"
        try:
            self._store.about(single)
        except FileNotFoundError:
            pass
        else:
            return {}
        index = f"{single}.index.json"
        return listed_in(f"{self._store.address}/{index}", self._json(index), "safetensors")

    def _add(self, name: str) -> None:
        try:
            file = RemoteFile(self._store, name)
        except FileNotFoundError:
            raise InputError(
                f"shard {self._store.address}/{name} is missing, the index lists it; upload it"
            ) from None
        for tensor, place in file.places.items():
            if tensor in self._file_of:
                raise InputError(
                    f"tensor {tensor} is in both {self._file_of[tensor].path} and {file.path}; "
                    "remove one, one of the shards may be left over from another model"
                )
            self._file_of[tensor], self.tensors[tensor] = file, place.info

    def _json(self, name: str, digits: int = 100) -> dict[str, Any]:
        path = f"{self._store.address}/{name}"
        try:
            size, _ = self._store.about(name)
        except FileNotFoundError:
            raise InputError(
                f"{path} does not exist; is {self._store.address} a model folder?"
            ) from None
        if size > MOST_JSON:
            raise InputError(f"{path} is larger than JSON of its kind can be; upload it again")
        try:
            parsed = parse_json(self._store.part(name, 0, size), digits)
        except InputError:
            raise
        except ValueError as error:
            raise InputError(f"{path} cannot be read as JSON ({reason(error)})") from None
        if not isinstance(parsed, dict):
            raise InputError(f"{path} holds no JSON object; upload it again")
        return parsed

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON object beside the weights; None if there is none.

        Raises:
            InputError: it cannot be read.
        """
        try:
            self._store.about(name)
        except FileNotFoundError:
            return None
        return self._json(name)

    def hashes(self) -> list[tuple[str, Callable[[], str]]]:
        """Config, settings and files with weights by name, and what gives the SHA-256 of each."""
        files = {file.path.rpartition("/")[2] for file in self._file_of.values()}
        settings = [GENERATION] if self.json(GENERATION) is not None else []
        names = ["config.json", *settings, *sorted(files)]
        return [(name, partial(self._store.sha256, name)) for name in names]

    def where(self, name: str | None = None) -> str:
        """The address of the file that holds a tensor; of the folder, if none is named."""
        return self._file_of[name].path if name else self._store.address

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """See ``Checkpoint.read``."""
        found = self._file_of[name].read(name, rows, columns)
        check_finite(found, name, self.where(name))
        return found

    def blocks(self, name: str) -> Iterator[Tensor]:
        """The tensor, whole."""
        yield self.read(name)

    def by_rows(self, name: str) -> bool:
        """Some rows of a tensor are had without the others."""
        return True
