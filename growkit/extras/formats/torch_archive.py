"""Archives as ``torch.save`` writes them, planned from headers; tensors follow as a stream."""

import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import TensorInfo
from growkit.base.torch_internals import fake_tensors, stored_dtypes
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.scratch import temporary
from growkit.model.checkpoint.weight_file import WEIGHTS, open_saved, plain_tensors
from growkit.model.checkpoint.writing import Shard


def placeholder(info: TensorInfo) -> Tensor:
    """A fake tensor to save instead of a real one; it takes no memory."""
    with fake_tensors():
        return torch.empty(info.shape, dtype=info.torch_dtype)


def archive_shard(
    file: str, tensors: Mapping[str, TensorInfo], aliases: Mapping[str, str] = MappingProxyType({})
) -> Shard:
    """Plan one archive with all tensors, as ``torch.save`` writes their dictionary.

    Args:
        file: name of the file.
        tensors: headers of the tensors.
        aliases: further names in the dictionary, each with the tensor that it names as well.
    """
    frame, offsets, checksums = archive_frame(
        tensors, lambda saved: saved | {name: saved[of] for name, of in aliases.items()}
    )
    return Shard(file, tensors, frame, offsets, checksums)


def archive_frame(
    tensors: Mapping[str, TensorInfo],
    content: Callable[[dict[str, Tensor]], Any] = lambda placeholders: placeholders,
) -> tuple[dict[int, bytes], dict[str, int], dict[str, list[int]]]:
    """Plan an archive as ``torch.save`` writes it; headers determine all bytes around the data.

    Args:
        tensors: headers of the tensors.
        content: maps placeholders of the tensors, by name, to what is saved.

    Returns:
        The bytes around the data, by their offset in the file; the offset of every tensor; and
        those of its checksums, see ``Shard``.
    """
    from torch.serialization import skip_data

    saved = {name: placeholder(info) for name, info in tensors.items()}
    with temporary("archive") as folder:
        file = folder / "archive"
        with (
            file.open("wb") as stream,
            stored_dtypes(),
            skip_data(materialize_fake_tensors=True),
        ):
            save_archive(content(saved), stream)
        _, select = open_saved(Folder(folder), file.name, WEIGHTS)
        named = select(
            lambda read: plain_tensors(
                read if isinstance(read, dict) else {next(iter(tensors)): read}
            )
        )
        offsets = {name: named.places[name].begin for name in tensors}
        frame, end = dict[int, bytes](), 0
        with file.open("rb") as stream:
            for name in sorted(tensors, key=offsets.__getitem__):
                stream.seek(end)
                frame[end] = stream.read(offsets[name] - end)
                end = offsets[name] + tensors[name].bytes
            stream.seek(end)
            frame[end] = stream.read()
        return frame, offsets, checksum_places(file, offsets)


DESCRIPTOR, LOCAL, CENTRAL = 4, 30, 46
"""In a ZIP archive: the bytes before the checksum that follows the data of a record, and the sizes
of its headers before their names (APPNOTE 4.3.7, 4.3.9 and 4.3.12)."""


def checksum_places(file: Path, offsets: Mapping[str, int]) -> dict[str, list[int]]:
    """Find where an archive that ``torch.save`` wrote holds the checksums of its tensors.

    Args:
        file: the archive.
        offsets: the offset of every tensor's data.
    """
    places: dict[int, list[int]] = {}
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        at = archive.start_dir
        for record in archive.infolist():
            stream.seek(record.header_offset + LOCAL - 4)
            lengths = struct.unpack("<HH", stream.read(4))
            data = record.header_offset + LOCAL + sum(lengths)
            places[data] = [data + record.file_size + DESCRIPTOR, at + 16]
            stream.seek(at + 28)
            at += CENTRAL + sum(struct.unpack("<HHH", stream.read(6)))
    return {name: places[offset] for name, offset in offsets.items()}


def archive_of(content: Any) -> bytes:
    """The bytes that ``torch.save`` writes."""
    stream = io.BytesIO()
    save_archive(content, stream)
    return stream.getvalue()


def save_archive(content: Any, stream: IO[bytes]) -> None:
    """Call ``torch.save``, which may hide the error of a full disk behind one of its own.

    Raises:
        OSError: the stream cannot be written.
    """
    try:
        torch.save(content, stream)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
