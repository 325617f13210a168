"""Reading a grown model with torch.distributed.checkpoint, which asks for parts of tensors."""

from __future__ import annotations

import io
from collections.abc import Sequence
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
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from growkit.distributed.grown import Grown
from growkit.engine.oracle import lacks_class
from growkit.optimizer.groups import ParamGroup
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
        of_class = {} if lacks_class(self.grown.target.config) else self.grown.by_class
        self._entries = {under + name: entry for name, entry in of_class.items()}
        self._entries |= {under + name: entry for name, entry in self.grown.entries.items()}
        self._entries |= {f"{state}state.{n}": entry for n, entry in self.grown.moments().items()}
        self._values = {  # under the names that torch gives options when it flattens groups
            f"{state}param_groups.{name}.{key}": value
            for group in self._groups
            for name in group.parameters
            for key, value in group.options.items()
        }

    @property
    def _groups(self) -> Sequence[ParamGroup]:
        return self.grown.optimizer.groups if self.grown.optimizer else ()

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups for the optimizer of a grown model: the source's, scaled by the law of updates.

        Args:
            model: the grown model, as it is or spread by FSDP2.
        """
        named = dict(model.named_parameters())
        return [
            {"params": [named[name] for name in group.parameters], **group.options}
            for group in self._groups
        ]

    def read_metadata(self) -> Metadata:
        """The shapes of what is made; see ``StorageReader``."""
        listed: dict[str, Any] = {name: BytesStorageMetadata() for name in self._values}
        for name, entry in self._entries.items():
            size = torch.Size(entry.info.shape)
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            listed[name] = TensorStorageMetadata(
                TensorProperties(entry.info.torch_dtype), size, [whole]
            )
        return Metadata(listed, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Make what is asked for; see ``StorageReader``."""
        # What can only be computed as a whole is computed once for all of its parts.
        for item in sorted(plan.items, key=lambda item: item.storage_index.fqn):
            name = item.storage_index.fqn
            if item.type is LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(self._values[name], stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
            else:
                pairs = zip(item.storage_offsets, item.lengths, strict=True)
                target = planner.resolve_tensor(item).detach()
                where = [slice(begin, begin + length) for begin, length in pairs]
                self._entries[name].fill(target, where)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
