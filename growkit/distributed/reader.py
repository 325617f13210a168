"""Reading a grown model with torch.distributed.checkpoint, which asks for parts of tensors."""

from __future__ import annotations

import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from growkit.distributed.entries import Entries, Entry
from growkit.distributed.grown import Grown
from growkit.engine.oracle import lacks_class
from growkit.recipe.recipe import Recipe


class GrownStorageReader(HuggingFaceStorageReader):
    """Reads what a recipe makes, as if it had been written; every process makes its own parts.

    Tensors are known by their names in the files, as in the reader of torch, and by those that the
    class of transformers has for its parameters. If the recipe takes an optimizer along, its flat
    state is there as well: ``optimizer.state.NAME.exp_avg``, ``optimizer.param_groups.NAME.lr``.

    Args:
        recipe: see ``growkit.run``.
        source: replaces the recipe's source; see ``growkit.load``.
        model: what the names of the model's tensors are under in the state that is loaded.
        optimizer: what those of the optimizer are under.

    Attributes:
        grown: what is read.

    Raises:
        InputError: see ``growkit.distributed.grown.Grown``.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path,
        *,
        source: str | Path | None = None,
        model: str = "",
        optimizer: str = "optimizer",
    ) -> None:
        self.grown = Grown(recipe, source)
        super().__init__(self.grown.source.where())
        under, state = (f"{name}." if name else "" for name in (model, optimizer))
        every: dict[str, Entry] = {}
        if not lacks_class(self.grown.target.config):
            every |= {under + name: entry for name, entry in self.grown.by_class.items()}
        every |= {under + name: entry for name, entry in self.grown.entries.items()}
        for name, entry in self.grown.moments().items():
            every[f"{state}state.{name}"] = entry
        self._entries = Entries(every)
        self._values = {f"{state}{name}": value for name, value in _options(self.grown).items()}

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups for the optimizer of a grown model: the source's, scaled by the law of updates.

        Args:
            model: the grown model, as it is or spread by FSDP2.
        """
        named = dict(model.named_parameters())
        return [
            {"params": [named[name] for name in group.parameters], **group.options}
            for group in (self.grown.optimizer.groups if self.grown.optimizer else ())
        ]

    def read_metadata(self) -> Metadata:
        """The shapes of what is made; see ``StorageReader``."""
        listed: dict[str, Any] = {name: BytesStorageMetadata() for name in self._values}
        for name, entry in self._entries.items():
            size = torch.Size(entry.info.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            listed[name] = TensorStorageMetadata(TensorProperties(entry.dtype), size, [whole])
        return Metadata(listed, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Make what is asked for; see ``StorageReader``."""
        asked: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            asked[item.storage_index.fqn].append(item)
        for name, items in asked.items():
            for item in items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _saved(self._values[name]))
                else:
                    self._make(name, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _make(self, name: str, item: ReadItem, planner: LoadPlanner) -> None:
        pairs = zip(item.storage_offsets, item.lengths, strict=True)
        where = [slice(begin, begin + length) for begin, length in pairs]
        target = planner.resolve_tensor(item).detach()
        self._entries.fill(target, name, where)
        planner.commit_tensor(item, target)


def _options(grown: Grown) -> dict[str, Any]:
    """What parameter groups say, by the names that torch gives them when it flattens them."""
    return {
        f"param_groups.{name}.{key}": value
        for group in (grown.optimizer.groups if grown.optimizer else ())
        for name in group.parameters
        for key, value in group.options.items()
    }


def _saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
