"""Checkpoints of Megatron-Core in its format ``torch_dist``, with the config of transformers.

Queries, keys and values of a layer are in one matrix, group by group, gate and up in another; each
holds the weight of the norm before it. Layers that are alike are stacked, and so are experts. The
embedding may have rows beyond the vocabulary (https://github.com/NVIDIA/Megatron-LM,
https://github.com/NVIDIA-NeMo/Megatron-Bridge).
"""

from collections.abc import Mapping, Sequence

from growkit.base.axes import ORDERS
from growkit.base.tensors import Config
from growkit.extras.formats.distributed_file import LIST, MAX_BYTES
from growkit.extras.formats.layout import Held, LaidOut
from growkit.extras.formats.weight_formats.torch_distributed import Distributed
from growkit.model.checkpoint.folder import Folder

MARK = b"self_attention.linear_qkv"
"""In the list of entries of every such model."""

LAYER = "model.layers.{layer}."
OWN = "decoder.layers.{layer}."
ALIKE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
ROWS = ("heads.head_dim", "kv_heads.head_dim", "kv_heads.head_dim")
GROUPS = ORDERS["with_keys_and_values"]("heads", "kv_heads", "head_dim")
ROUTERS = {"mixtral": "block_sparse_moe.gate"}
EXPERTS = {"mixtral": ("block_sparse_moe.experts.{expert}.", "w1", "w3", "w2")}
"""Names by type; those of all other types are those of Qwen3-MoE."""


class Megatron(LaidOut, Distributed):
    """See ``Format``."""

    title, name = "Megatron-Core", "megatron"
    models = ("llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    in_recipes, rank = "", 1  # its files look like those of torch.distributed.checkpoint

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        files = super().files(folder)
        return files if files and MARK in folder.bytes(LIST, MAX_BYTES) else {}

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        model_type = str(config.get("model_type"))
        experts, gate, up, down = EXPERTS.get(
            model_type, ("mlp.experts.{expert}.", "gate_proj", "up_proj", "down_proj")
        )
        layer = [Held(OWN + own, (LAYER + name,)) for own, name in ALIKE.items()]
        router = ROUTERS.get(model_type, "mlp.gate")
        layer.append(Held(f"{OWN}mlp.router.weight", (f"{LAYER}{router}.weight",)))
        for end in ("weight", "bias"):
            inside = tuple(f"{LAYER}self_attn.{kind}_proj.{end}" for kind in "qkv")
            layer.append(Held(f"{OWN}self_attention.linear_qkv.{end}", inside, ROWS, GROUPS))
        both = tuple(f"{LAYER}mlp.{name}_proj.weight" for name in ("gate", "up"))
        layer.append(Held(f"{OWN}mlp.linear_fc1.weight", both))
        both = tuple(f"{LAYER}{experts}{name}.weight" for name in (gate, up))
        for own in ("experts.", "local_experts.{expert}."):
            layer.append(Held(f"{OWN}mlp.experts.{own}linear_fc1.weight", both))
            layer.append(
                Held(
                    f"{OWN}mlp.experts.{own}linear_fc2.weight", (f"{LAYER}{experts}{down}.weight",)
                )
            )
        outer = {"embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}
        return [
            *layer,
            *(
                Held(held.stored.replace("{layer}.", ""), held.names, held.rows, held.order)
                for held in layer
            ),
            *(
                Held(f"{own}.weight", (f"{name}.weight",), ("vocab",), padded=True)
                for own, name in outer.items()
            ),
            Held("decoder.final_layernorm.weight", ("model.norm.weight",)),
        ]


FORMAT = Megatron()
