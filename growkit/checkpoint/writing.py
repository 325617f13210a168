"""Writing a Hugging Face folder as a stream.

The header of a safetensors file only needs names, shapes and dtypes, all known from the plan. So
it is written first, the tensors follow one block after the other, and no file is ever in memory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event, Lock

from growkit.base.errors import InputError
from growkit.checkpoint.memory import keep_freed
from growkit.checkpoint.tensors import (
    FLOAT_BYTES,
    TensorInfo,
    Weights,
    total_bytes,
    total_parameters,
)

WORKERS = 2
"""Tensors made side by side: one computes while another is on its way to the disk."""

KEPT = 48 << 20
"""Bytes that are kept for the next blocks."""

SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_bytes(text: str, what: str = "shard size") -> int:
    """``"500MB"`` -> 500000000.

    Args:
        text: a number and a unit.
        what: it is of.

    Raises:
        InputError: the text is not a positive number with a unit.
    """
    match = re.fullmatch(
        r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(KB|MB|GB|TB)", str(text).strip().upper()
    )
    if not match or float(match[1]) == 0:
        raise InputError(f"{what} {text!r} is not understood; write it like 500MB or 5GB")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


@dataclass(frozen=True)
class Shard:
    """One output file.

    Attributes:
        name: of the file.
        tensors: the header of every tensor, in the order in which they lie in the file.
    """

    name: str
    tensors: Mapping[str, TensorInfo]

    @cached_property
    def frame(self) -> Mapping[int, bytes]:
        """What stands in the file beside the tensors, by its offset."""
        return {0: header_of(self.tensors)}

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Where every tensor begins in the file, in bytes."""
        found, offset = {}, len(self.frame[0])
        for name, info in self.tensors.items():
            found[name] = offset
            offset += info.bytes
        return found

    @property
    def bytes(self) -> int:
        """Size of the tensors."""
        return total_bytes(self.tensors)


def shards_of(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[Shard]:
    """All output files, of at most ``shard_bytes`` of tensors each.

    A tensor larger than that gets a shard of its own.
    """
    shards = divided(tensors, shard_bytes)
    names = _file_names(len(shards))
    return [Shard(name, shard) for name, shard in zip(names, shards, strict=True)]


def write_shards(
    weights: Weights,
    folder: Path,
    shards: Iterable[Shard],
    advance: Callable[[int], None],
    finished: Callable[[Shard], None] = lambda shard: None,
) -> None:
    """Write shards, one after the other.

    Every tensor has its place before any is computed, so several are made side by side, each block
    going to disk as soon as it exists. The next shard is begun when no tensor of the one before is
    left to be begun.

    Args:
        weights: has the tensors; each is computed exactly once.
        folder: an existing folder.
        shards: asked for the next one when that can be begun.
        advance: called with the number of bytes written, after each block.
        finished: called with each shard of which every tensor is written, by the thread that
            has written the last.
    """
    left: dict[Path, tuple[Shard, set[str]]] = {}

    def places() -> Iterator[tuple[str, Path, int]]:
        for shard in shards:
            file = folder / shard.name
            with file.open("wb") as stream:
                for offset, text in shard.frame.items():
                    stream.seek(offset)
                    stream.write(text)
            left[file] = shard, {*shard.tensors}
            # The largest first: none is left to one worker alone at the end.
            order = sorted(shard.tensors, key=lambda name: -shard.tensors[name].bytes)
            yield from ((tensor, file, shard.offsets[tensor]) for tensor in order)

    lock = Lock()

    def written(tensor: str, file: Path) -> None:
        shard, names = left[file]
        with lock:
            names.remove(tensor)
            last = not names
        if last:
            finished(shard)

    _fill(weights, places(), advance, written)


def write_index(shards: Sequence[Shard], folder: Path) -> None:
    """Say which shard holds which tensor; nothing needs to be said of a single one."""
    if len(shards) == 1:
        return
    every = {name: info for shard in shards for name, info in shard.tensors.items()}
    index = {
        "metadata": {"total_parameters": total_parameters(every), "total_size": total_bytes(every)},
        "weight_map": {tensor: shard.name for shard in shards for tensor in shard.tensors},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def fill(
    weights: Weights, places: Mapping[str, tuple[Path, int]], advance: Callable[[int], None]
) -> None:
    """Write tensors to where they belong, several side by side, each block as soon as it exists.

    Args:
        weights: has the tensors; each is computed exactly once.
        places: of every tensor the file, which exists, and the offset of its first byte there.
        advance: called with the number of bytes written, after each block.
    """
    # The largest first: none is left to one worker alone at the end.
    order = sorted(places, key=lambda tensor: -weights.tensors[tensor].bytes)
    _fill(weights, ((tensor, *places[tensor]) for tensor in order), advance)


def _fill(
    weights: Weights,
    places: Iterator[tuple[str, Path, int]],
    advance: Callable[[int], None],
    written: Callable[[str, Path], None] = lambda tensor, file: None,
) -> None:
    """See ``fill``; ``written`` is called with every tensor that is."""
    import torch

    stop, lock = Event(), Lock()

    def work() -> None:
        while not stop.is_set():
            with lock:  # one asks for the next place at a time
                place = next(places, None)
            if place is None:
                return
            tensor, file, offset = place
            _write_tensor(weights, tensor, file, offset, advance, stop)
            if not stop.is_set():
                written(tensor, file)

    threads = torch.get_num_threads()
    try:
        with ThreadPoolExecutor(WORKERS, initializer=_one_thread) as pool:
            jobs = [pool.submit(work) for _ in range(WORKERS)]
            try:
                wait(jobs, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()
    finally:
        torch.set_num_threads(threads)  # a worker's choice became that of every later thread
    for job in jobs:
        job.result()


def divided(tensors: Mapping[str, TensorInfo], shard_bytes: int) -> list[dict[str, TensorInfo]]:
    """The tensors of each shard, in the order in which they lie in the file; see ``shards_of``."""
    shards: list[dict[str, TensorInfo]] = [{}]
    used = 0
    for name, info in tensors.items():
        if shards[-1] and used + info.bytes > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = info
        used += info.bytes
    # The widest dtypes first: then every tensor begins at a multiple of its element size.
    return [
        dict(sorted(shard.items(), key=lambda item: -FLOAT_BYTES[item[1].dtype]))
        for shard in shards
    ]


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _one_thread() -> None:
    """One core per tensor: the tensors run side by side instead."""
    import torch

    torch.set_num_threads(1)
    keep_freed(KEPT)


def _write_tensor(
    weights: Weights,
    name: str,
    file: Path,
    offset: int,
    advance: Callable[[int], None],
    stop: Event,
) -> None:
    import torch

    if stop.is_set():
        return
    begin = offset
    with file.open("r+b", buffering=0) as stream:
        for block in weights.blocks(name):
            data = memoryview(block.contiguous().flatten().view(torch.uint8).numpy().data)
            while data:  # a write may be partial
                if stop.is_set():
                    return
                count = os.pwrite(stream.fileno(), data, offset)
                data = data[count:]
                offset += count
                advance(count)
    assert offset - begin == weights.tensors[name].bytes, name


def header_of(tensors: Mapping[str, TensorInfo]) -> bytes:
    """The beginning of a file that holds tensors in this order: length, JSON, padding.

    https://github.com/huggingface/safetensors#format
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, info in tensors.items():
        entries[name] = {
            "dtype": info.dtype,
            "shape": info.shape,
            "data_offsets": [offset, offset + info.bytes],
        }
        offset += info.bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
