"""Writing a folder that torch.distributed.checkpoint loads, as a stream.

Every tensor is an archive of torch in one of the files, as ``torch.save`` writes it; what stands
around the numbers follows from shape and dtype alone, so it is written first.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

from growkit.checkpoint.distributed_list import LIST
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.scratch import temporary
from growkit.checkpoint.tensors import STORED_NAMES, TensorInfo
from growkit.checkpoint.torch_file import open_part, room
from growkit.checkpoint.writing import Shard, divided


class DistributedShard(Shard):
    """A file of torch.distributed.checkpoint."""

    @cached_property
    def frame(self) -> Mapping[int, bytes]:
        """See ``Shard``."""
        found, offset = {}, 0
        for info in self.tensors.values():
            before, behind = _around(info)
            found[offset] = before
            found[offset + len(before) + info.bytes] = behind
            offset += len(before) + info.bytes + len(behind)
        return found

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """See ``Shard``."""
        begins = [offset + len(text) for offset, text in self.frame.items()]
        return dict(zip(self.tensors, begins[::2], strict=True))

    def archives(self) -> dict[str, tuple[int, int]]:
        """Begin and length of the archive of every tensor, in bytes."""
        edges = list(self.frame.items())
        pairs = zip(self.tensors, edges[::2], edges[1::2], strict=True)
        return {
            name: (begin, end + len(behind) - begin) for name, (begin, _), (end, behind) in pairs
        }


def distributed_shards(
    tensors: Mapping[str, TensorInfo], shard_bytes: int
) -> list[DistributedShard]:
    """All output files, of at most ``shard_bytes`` of tensors each; see ``shards_of``."""
    return [
        DistributedShard(f"__0_{number}.distcp", shard)
        for number, shard in enumerate(divided(tensors, shard_bytes))
    ]


def write_list(shards: Sequence[Shard], folder: Path, names: Mapping[str, str]) -> None:
    """Say where every tensor lies.

    Args:
        shards: all files.
        folder: where they are.
        names: further names under which tensors are loaded, and those of the tensors.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    entries: dict[str, TensorStorageMetadata] = {}
    places: dict[str, _StorageInfo] = {}
    for shard in shards:
        assert isinstance(shard, DistributedShard)
        for name, archive in shard.archives().items():
            info = shard.tensors[name]
            size = torch.Size(info.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            properties = TensorProperties(getattr(torch, STORED_NAMES[info.dtype]))
            entries[name] = TensorStorageMetadata(properties, size, [whole])
            places[name] = _StorageInfo(shard.name, *archive)
    for name, stored in names.items():
        entries[name], places[name] = entries[stored], places[stored]
    listed = Metadata(
        {**entries},
        planner_data={name: (name,) for name in entries},
        storage_data={
            MetadataIndex(name, [0] * len(entries[name].size)): place
            for name, place in places.items()
        },
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    (folder / LIST).write_bytes(pickle.dumps(listed, protocol=4))


@lru_cache(maxsize=1024)
def _around(info: TensorInfo) -> tuple[bytes, bytes]:
    """What stands before and behind the numbers of a tensor."""
    import torch
    from torch.serialization import skip_data

    with temporary("archive") as folder:
        file = folder / "archive"
        with torch._C.DisableTorchFunction(), skip_data(materialize_fake_tensors=True):
            torch.save(room(info), file)
        length = file.stat().st_size
        saved = open_part(Folder(folder), file.name, "tensor", 0, length)
        begin = saved.places["tensor"].begin
        with file.open("rb") as stream:
            before = stream.read(begin)
            stream.seek(begin + info.bytes)
            return before, stream.read()
