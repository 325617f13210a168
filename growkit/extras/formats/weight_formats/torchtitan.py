"""Checkpoints of torchtitan: torch.distributed.checkpoint with names of its own.

Releases before 0.3.0 have those of Meta's Llama (https://github.com/pytorch/torchtitan).
"""

import re
from collections.abc import Mapping, Sequence

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import Config, TensorInfo, Weights, cut
from growkit.extras.formats.distributed_file import LIST
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
IN_EXPERTS = "layers.{layer}.moe.routed_experts.inner_experts."
EXPERTS = {
    f"{IN_EXPERTS}{own}": f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}.weight"
    for own, name in {"w1_EFD": "gate_proj", "w3_EFD": "up_proj", "w2_EDF": "down_proj"}.items()
} | {"layers.{layer}.moe.router.gate.weight": "model.layers.{layer}.mlp.gate.weight"}
ROUTER, BIAS = "router.gate.weight", "expert_bias_E"
"""A router, and what torchtitan adds to its scores to balance experts, which transformers lacks."""

PAIRS: dict[str, dict[str, str]] = {
    "llama": {"wq": "heads", "wk": "kv_heads"},
    "qwen3": {},
    "qwen3_moe": {},
}
"""Matrices with rotary pairs as neighbours, each with its axis of heads, by type."""


class Torchtitan(LaidOut, Distributed):
    """See ``Format``; the config of transformers is next to the files."""

    title, name, models = "torchtitan", "torchtitan", PAIRS
    in_recipes, rank = "", 1  # its files look like those of torch.distributed.checkpoint

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        files = super().files(folder)
        return files if files and MARK.search(folder.bytes(LIST)) else {}

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
            *(Held(own, (name,)) for own, name in EXPERTS.items()),
            Held(f"layers.{{layer}}.moe.{BIAS}", ()),  # zero
            *(META.layout(config) if pairs else ()),
        ]

    def to_transformers(self, stored: Weights, config: Config) -> Weights:
        """See ``Format``.

        Raises:
            InputError: see ``arrange``; or a bias of experts is not zero.
        """
        for name in stored.tensors:
            if name.endswith(f".{BIAS}") and stored.read(name).any():
                raise InputError(
                    f"{name} in {stored.where(name)} is not zero, and models of type "
                    f"{config.get('model_type')} have no bias that balances experts; train it "
                    "without load_balance_coeff, or to convert it nonetheless, set it to zero"
                )
        return super().to_transformers(stored, config)

    def from_transformers(self, model: Model, config: Config) -> Weights:
        """See ``Format``."""
        return WithBiases(super().from_transformers(model, config))

    def aliases(self, model: Model) -> Mapping[str, str]:
        """See ``Distributed``."""
        tied = model.complete["tie_word_embeddings"]
        return {f"{HEAD}.weight": "tok_embeddings.weight"} if tied else {}


class WithBiases(Weights):
    """Stored tensors, and a bias of zeros for the experts of each router, in float32."""

    def __init__(self, stored: Weights) -> None:
        self._stored = stored
        self._biases = {
            name.replace(ROUTER, BIAS): TensorInfo(info.shape[:1], "F32")
            for name, info in stored.tensors.items()
            if name.endswith(ROUTER)
        }
        self.tensors = {**stored.tensors, **self._biases}

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return self._stored.where(None if name in self._biases else name)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        if name in self._biases:
            return cut(torch.zeros(self._biases[name].shape), where)
        return self._stored.read(name, *where)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return 0 if name in self._biases else self._stored.cuts(name)


FORMAT = Torchtitan()
