"""Folders as transformers writes them: safetensors or torch archives, one file or shards."""

import re
from collections.abc import Iterator, Mapping, Sequence

from growkit.base.errors import InputError
from growkit.base.names import listed
from growkit.base.tensors import Config
from growkit.model.checkpoint.folder import SINGLE, Folder
from growkit.model.checkpoint.format import Format, Output
from growkit.model.checkpoint.weight_file import StoredWeights, open_weights
from growkit.model.checkpoint.writing import index_of, shards_of
from growkit.model.model import Model


class Transformers(Format):
    """See ``Format``; a single file is preferred to an index, as in transformers.

    Attributes:
        program: the program that the headers of its files name.
    """

    title, in_recipes = "transformers", "safetensors"
    rank = 0
    read_by_transformers = True
    program = "pt"

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        for single, index in SINGLE.items():
            if folder.find(single):
                return {single: ()}
            if folder.find(index) and folder.require("config.json"):  # whose lack comes first
                ending = single.rpartition(".")[2]
                return _shards(folder, index, ending)
        return {}

    def open(self, folder: Folder, names: Sequence[str]) -> Sequence[StoredWeights]:
        """See ``Format``."""
        return [open_weights(folder, name) for name in names]

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``."""
        tensors = self.from_transformers(model, config)
        shards = shards_of(tensors.tensors, shard_bytes, self.program)
        return Output(tensors, shards, index_of(shards))

    def notes(self, folder: Folder, names: Sequence[str]) -> Iterator[str]:
        """See ``Format``."""
        for single, index in SINGLE.items():
            stem, _, ending = single.rpartition(".")
            alike = {*folder.names(f"{stem}*.{ending}", index)}
            if alike.isdisjoint(names):
                continue
            unread = sorted(alike.difference(names, () if single in names else [index]))
            if unread == [index] and {*_shards(folder, index, ending)} == {single}:
                continue  # it lists what is read
            if unread:
                yield (
                    f"transformers reads the weights of {folder} from {min(names)}"
                    f"{'' if single in names else ' and the other files in ' + index}, and not "
                    f"from {listed(unread)}; move away what is left over from another model"
                )


def _shards(folder: Folder, index: str, ending: str) -> dict[str, list[str]]:
    """The tensors of every shard in an index; ``ending`` is the expected file extension.

    Raises:
        InputError: the index is damaged, or a shard is missing.
    """
    where, weight_map = folder.path / index, folder.json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{where} has no weight_map; copy the index again")
    shards: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(rf"[^/\\\0]+\.{ending}", name):
            raise InputError(
                f"{where} lists tensor {tensor} in {name!r}; the name of a "
                f".{ending} file next to it was expected, copy the index again"
            )
        shards.setdefault(name, []).append(tensor)
    for name in sorted(shards):
        if not folder.find(name):
            raise InputError(
                f"shard {folder.path / name}, which {index} lists, is missing; "
                "copy it into the folder"
            )
    return dict(sorted(shards.items()))


FORMAT = Transformers()
