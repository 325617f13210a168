"""Weights of torchtune with its own names, with the config of transformers next to them.

Its checkpointers for other formats write those of Meta or transformers. Rows of queries and keys
that rotate as a pair are neighbours in some models (https://github.com/pytorch/torchtune,
``convert_weights.py`` and ``_convert_weights.py`` of each model).
"""

from collections.abc import Mapping, Sequence

from growkit.base.tensors import Config
from growkit.extras.formats.layout import Held, LaidOut
from growkit.extras.formats.torch_archive import archive_shard
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import Output
from growkit.model.checkpoint.weight_file import (
    StoredWeights,
    TorchFile,
    open_saved,
    plain_tensors,
)
from growkit.model.model import Model

WEIGHTS = "model-00001-of-00001.bin"
KIND = TorchFile("weights of torchtune", "save it again with torchtune")

NAMES = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "sa_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    "attn.q_proj.weight": "self_attn.q_proj.weight",
    "attn.k_proj.weight": "self_attn.k_proj.weight",
    "attn.v_proj.weight": "self_attn.v_proj.weight",
    "attn.q_proj.bias": "self_attn.q_proj.bias",
    "attn.k_proj.bias": "self_attn.k_proj.bias",
    "attn.v_proj.bias": "self_attn.v_proj.bias",
    "attn.output_proj.weight": "self_attn.o_proj.weight",
    "attn.q_norm.scale": "self_attn.q_norm.weight",
    "attn.k_norm.scale": "self_attn.k_norm.weight",
    "mlp.w1.weight": "mlp.gate_proj.weight",
    "mlp.w2.weight": "mlp.down_proj.weight",
    "mlp.w3.weight": "mlp.up_proj.weight",
    "mlp.router.gate.weight": "mlp.gate.weight",
    "mlp.experts.gate_proj": "mlp.experts.{expert}.gate_proj.weight",
    "mlp.experts.down_proj": "mlp.experts.{expert}.down_proj.weight",
    "mlp.experts.up_proj": "mlp.experts.{expert}.up_proj.weight",
}
PAIRS = {"attn.q_proj.weight": "heads", "attn.k_proj.weight": "kv_heads"}
INTERLEAVED = {"gemma": PAIRS, "llama": PAIRS, "qwen2": {}, "qwen3": {}, "qwen3_moe": {}}
"""Matrices with rotary pairs as neighbours, each with its axis of heads, by type."""


class Torchtune(LaidOut):
    """See ``Format``."""

    title, name, models = "torchtune", "torchtune", INTERLEAVED

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        return {WEIGHTS: ()} if folder.find(WEIGHTS) and folder.require("config.json") else {}

    def open(self, folder: Folder, names: Sequence[str]) -> Sequence[StoredWeights]:
        """See ``Format``."""
        return [open_saved(folder, WEIGHTS, KIND)[1](plain_tensors)]

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        self.check_type(config)
        pairs = INTERLEAVED[config["model_type"]]
        return [
            *(Held(stored, (name,)) for stored, name in NAMES.items()),
            *(
                Held(f"layers.{{layer}}.{stored}", (f"model.layers.{{layer}}.{name}",)).with_pairs(
                    pairs.get(stored, "")
                )
                for stored, name in LAYER.items()
            ),
        ]

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``; one file."""
        tensors = self.from_transformers(model, config)
        return Output(tensors, [archive_shard(WEIGHTS, tensors.tensors)], {})


FORMAT = Torchtune()
