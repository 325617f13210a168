"""Folders of torch.distributed.checkpoint, with the config of transformers next to the files."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.extras.formats.distributed_file import (
    LIST,
    DistributedFile,
    Listed,
    Part,
    distributed_shards,
    list_of,
    read_list,
)
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import Format, Output
from growkit.model.model import Model
from growkit.planning.own_class import substitute

OPTIMIZER = ("optim", "state.", "param_groups.")
"""Beginnings of the names of an optimizer's state, or of its flat entries."""

WEIGHT = ".weight"
"""End of some names in the state of every model, but of none in optimizers or schedules."""


class Distributed(Format):
    """See ``Format``."""

    title, in_recipes = "torch.distributed.checkpoint", "dcp"
    rank = 3  # other formats of such files come first

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``; the file that lists all others."""
        return {LIST: ()} if folder.find(LIST) and folder.require("config.json") else {}

    def open(self, folder: Folder, names: Sequence[str]) -> Sequence[DistributedFile]:
        """See ``open_model``."""
        return [open_model(folder)]

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``."""
        tensors = self.from_transformers(model, config)
        shards = distributed_shards(tensors.tensors, shard_bytes)
        return Output(tensors, shards, {LIST: list_of(shards, self.aliases(model))})

    def aliases(self, model: Model) -> Mapping[str, str]:
        """The stored names of tensors by further names under which a program loads them.

        Those of the class in transformers: of parameters and buffers, tied ones included, that are
        equal to a stored tensor but for the name; none if it has no class for the model.

        Raises:
            InputError: the model does not fit the class.
        """
        from growkit.engine.class_weights import planned_parameters  # imports torch

        config = model.family.named(model.config)
        if substitute(config):
            return {}
        of_class, names = planned_parameters(model, config)
        return {name: plain for name, of in names.items() if (plain := of_class.stored_as(of))}


def open_model(folder: Folder) -> DistributedFile:
    """Open the tensors of the model in a folder, without the prefix of the model's state.

    If the model is one state of several, it is the one whose names look like weights. Of entries
    with the same parts, only the first is opened.

    Raises:
        InputError: the folder is damaged, or holds no model or several.
    """
    states: defaultdict[tuple[str, ...], dict[str, Listed]] = defaultdict(dict)
    seen: set[tuple[Part, ...]] = set()
    for entry in read_list(folder).values():
        *state, name = entry.path
        of_optimizer = any(part.startswith(OPTIMIZER) for part in state or [name])
        if entry.shape is None or of_optimizer or entry.parts in seen:
            continue
        seen.add(entry.parts)
        states[tuple(state)][name] = entry
    models = {
        state: entries
        for state, entries in states.items()
        if any(name.endswith(WEIGHT) for name in entries)
    } or states
    if len(models) == 1:
        return DistributedFile(folder, next(iter(models.values())))
    if not models:
        raise InputError(
            f"{folder.path / LIST} lists no tensors of a model; save its state with "
            "torch.distributed.checkpoint, next to its config.json"
        )
    names = ", ".join(".".join(state) or "tensors without a prefix" for state in models)
    raise InputError(
        f"{folder.path / LIST} lists tensors of several states ({names}), and one was expected; "
        "save the state of the model by itself, next to its config.json"
    )


FORMAT = Distributed()
