"""The weights of a model in a folder of torch.distributed.checkpoint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from growkit.base.errors import InputError
from growkit.checkpoint.distributed_list import LIST, Listed, Part, read_list
from growkit.checkpoint.distributed_parts import Parts
from growkit.checkpoint.folder import Folder

OPTIMIZER = ("optim", "state.", "param_groups.")
"""How names of states, or of entries that lie flat, begin that are an optimizer's."""

WEIGHT = ".weight"
"""How names of tensors end, some at least, in the state of every model; not in that of an optimizer
or a schedule, nor do counts and random states that lie beside a model."""

OF_TORCHTITAN = "tok_embeddings.weight"
"""A tensor that Hugging Face files call otherwise."""


class DistributedFile(Parts):
    """All tensors of the model in a folder.

    Args:
        folder: that has a list of entries.

    Attributes:
        paths: of all files that are read.

    Raises:
        InputError: the folder is damaged, or holds no model or several.
    """

    def __init__(self, folder: Folder) -> None:
        entries = _of_the_model(folder, read_list(folder))
        super().__init__(folder, entries)
        names = {part.file for entry in entries.values() for part in entry.parts}
        self.paths = [self.path, *(folder.path / name for name in sorted(names))]


def _of_the_model(folder: Folder, entries: Mapping[str, Listed]) -> dict[str, Listed]:
    """The tensors of the model by their own names.

    A model that was saved as one state among several has its name before those of its tensors. Of
    these it is the one that holds weights by their names. Of entries that lie at the same place the
    others are further names of the first.
    """
    states: defaultdict[tuple[str, ...], dict[str, Listed]] = defaultdict(dict)
    seen: set[tuple[Part, ...]] = set()
    for entry in entries.values():
        *state, name = entry.path
        of_optimizer = any(each.startswith(OPTIMIZER) for each in state or [name])
        if entry.shape is None or of_optimizer or entry.parts in seen:
            continue
        seen.add(entry.parts)
        states[tuple(state)][name] = entry
        if name == OF_TORCHTITAN:
            raise InputError(
                f"{folder.path / LIST} has tensors under torchtitan's own names ({name}), where "
                "rows also lie in another order; save the model as Hugging Face files there "
                "(checkpoint.last_save_in_hf), and give that folder"
            )
    with_weights = {
        state: found
        for state, found in states.items()
        if any(name.endswith(WEIGHT) for name in found)
    }
    models = with_weights or states
    if len(models) == 1:
        return next(iter(models.values()))
    if not models:
        raise InputError(
            f"{folder.path / LIST} lists no tensors of a model; save its state with "
            "torch.distributed.checkpoint, beside its config.json"
        )
    names = ", ".join(".".join(state) or "tensors without a name before theirs" for state in models)
    raise InputError(
        f"{folder.path / LIST} lists tensors of several states ({names}), of which one was "
        "expected; save the state of the model by itself, beside its config.json"
    )
