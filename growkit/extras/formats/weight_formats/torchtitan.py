"""Checkpoints of torchtitan: torch.distributed.checkpoint with the names of Meta's Llama.

https://github.com/pytorch/torchtitan
"""

from collections.abc import Mapping, Sequence

from growkit.base.tensors import Config
from growkit.extras.formats.distributed_file import LIST, MAX_BYTES
from growkit.extras.formats.layout import Held, LaidOut
from growkit.extras.formats.weight_formats.meta import FORMAT as META
from growkit.extras.formats.weight_formats.torch_distributed import Distributed
from growkit.model.checkpoint.folder import Folder

MARK = b"layers.0.attention.wq."
"""In the list of entries of every such model."""


class Torchtitan(LaidOut, Distributed):
    """See ``Format``; the config of transformers is next to the files."""

    title, name, models = "torchtitan", "torchtitan", META.models
    in_recipes, rank = "", 1  # its files look like those of torch.distributed.checkpoint

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        files = super().files(folder)
        return files if files and MARK in folder.bytes(LIST, MAX_BYTES) else {}

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        self.check_type(config)
        return META.layout(config)


FORMAT = Torchtitan()
