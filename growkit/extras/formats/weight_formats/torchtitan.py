"""Checkpoints of torchtitan: torch.distributed.checkpoint with names of its own.

Releases before 0.3.0 have those of Meta's Llama (https://github.com/pytorch/torchtitan).
"""

import re
from collections.abc import Mapping, Sequence

from growkit.base.tensors import Config
from growkit.extras.formats.distributed_file import LIST, MAX_BYTES
from growkit.extras.formats.layout import Held, LaidOut
from growkit.extras.formats.weight_formats.meta import FORMAT as META
from growkit.extras.formats.weight_formats.meta import NAMES as OF_META
from growkit.extras.formats.weight_formats.torch_distributed import Distributed
from growkit.model.checkpoint.folder import Folder
from growkit.model.model import Model

MARK = re.compile(rb"layers\.0\.attention\.(qkv_linear\.)?wq\.")
"""In the list of entries of every such model."""

HEAD = "lm_head"
NAMES = {
    HEAD: HEAD,
    **{re.sub(r"(?=w[qkv]$)", "qkv_linear.", own): name for own, name in OF_META.items()},
    "layers.{layer}.attention.q_norm": "model.layers.{layer}.self_attn.q_norm",
    "layers.{layer}.attention.k_norm": "model.layers.{layer}.self_attn.k_norm",
}
PAIRS = {"llama": {"wq": "heads", "wk": "kv_heads"}, "qwen3": dict[str, str]()}
"""Matrices with rotary pairs as neighbours, each with its axis of heads, by type."""


class Torchtitan(LaidOut, Distributed):
    """See ``Format``; the config of transformers is next to the files."""

    title, name, models = "torchtitan", "torchtitan", PAIRS
    in_recipes, rank = "", 1  # its files look like those of torch.distributed.checkpoint

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        files = super().files(folder)
        return files if files and MARK.search(folder.bytes(LIST, MAX_BYTES)) else {}

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        self.check_type(config)
        pairs = PAIRS[config["model_type"]]
        tied = config.get("tie_word_embeddings")
        return [
            *([Held(f"{HEAD}.weight", ())] if tied else []),  # the same numbers as the embedding
            *(
                Held(f"{own}.weight", (f"{name}.weight",)).with_pairs(pairs.get(own[-2:], ""))
                for own, name in NAMES.items()
            ),
            *(META.layout(config) if pairs else ()),
        ]

    def aliases(self, model: Model) -> Mapping[str, str]:
        """See ``Distributed``."""
        tied = model.complete["tie_word_embeddings"]
        return {f"{HEAD}.weight": "tok_embeddings.weight"} if tied else {}


FORMAT = Torchtitan()
