"""Growing while torch.distributed.checkpoint loads, which requests parts of tensors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.futures import Future

from growkit.base.errors import InputError
from growkit.extras.formats.distributed_file import metadata_of
from growkit.extras.loading.grown_target import Grown
from growkit.planning.own_class import substitute
from growkit.planning.recipe import Recipe


class GrownStorageReader(HuggingFaceStorageReader):
    """Reads the target of a recipe as if it were written; every process computes its own parts.

    Tensors have their names in the files, as in torch's reader, and also the names of the
    parameters of the transformers class. If the recipe has an optimizer, its state comes too:
    ``optimizer.state.NAME.exp_avg``, and ``optimizer.param_groups.NAME.lr`` (flat) as well as
    ``optimizer.param_groups.0.lr``.

    Args:
        recipe: see ``growkit.run``.
        source: replaces the recipe's source; see ``growkit.load``.
        model: prefix of the model's tensor names in the loaded state.
        optimizer: prefix of the optimizer's names in the loaded state.

    Attributes:
        grown: the target of the recipe.

    Raises:
        InputError: see ``Grown``.
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
        of_class = {} if substitute(self.grown.target.config) else self.grown.by_class
        self._entries = {under + name: entry for name, entry in of_class.items()}
        self._entries |= {under + name: entry for name, entry in self.grown.entries.items()}
        self._entries |= {f"{state}state.{n}": entry for n, entry in self.grown.moments().items()}
        self._groups = self.grown.optimizer.groups if self.grown.optimizer else ()
        self._values: dict[str, Any] = {}
        for number, group in enumerate(self._groups):
            options = {**group.options, "params": list(group.parameters)}
            for owner in (number, *group.parameters):  # as torch names them, and flattened
                named = options if owner == number else group.options
                self._values |= {f"{state}param_groups.{owner}.{k}": v for k, v in named.items()}

    def param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Groups for the optimizer of a grown model: the source's, scaled by the law of updates.

        Args:
            model: the grown model, plain or sharded by FSDP2.
        """
        named = dict(model.named_parameters())
        return [
            {"params": [named[name] for name in group.parameters], **group.options}
            for group in self._groups
        ]

    def read_metadata(self) -> Metadata:
        """The shapes of all entries; see ``StorageReader``."""
        listed = {name: metadata_of(None, ()) for name in self._values}
        for name, entry in self._entries.items():
            listed[name] = metadata_of(entry.info.torch_dtype, entry.info.shape)
        return Metadata(listed, storage_data={}, storage_meta=StorageMeta(load_id=self.load_id))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """What all processes ask for; see ``StorageReader``.

        Raises:
            InputError: a shard has several pieces, such as rows of gate and of up in one matrix.
                torch asks for one piece of the same size, which another process's overlaps.
        """
        asked: dict[str, set[tuple[tuple[int, int], ...]]] = {}
        for item in (item for plan in plans for item in plan.items):
            if item.type is LoadItemType.TENSOR:
                box = tuple(zip(item.storage_offsets, item.lengths, strict=True))
                asked.setdefault(item.storage_index.fqn, set()).add(box)
        for name, boxes in asked.items():
            for dim, parts in enumerate(map(set, zip(*boxes, strict=True))):
                end, full_range = 0, (0, self._entries[name].info.shape[dim])
                for start, length in sorted(parts - {full_range}):
                    if start < end:
                        raise InputError(
                            f"a process's shard of {name} has several pieces, and "
                            "torch.distributed.checkpoint loads other rows for them; load the "
                            "model with growkit.load"
                        )
                    end = start + length
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Compute the requested entries; see ``StorageReader``."""
        # Sorted by name: a tensor that is computed as a whole is computed once for all its parts.
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
                where = [slice(start, start + length) for start, length in pairs]
                self._entries[name].fill(target, where)
                planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
