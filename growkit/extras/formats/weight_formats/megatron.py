"""Checkpoints of Megatron-Core in its format ``torch_dist``, with the config of transformers.

Queries, keys and values of a layer are in one matrix, group by group, gate and up in another; each
holds the weight of the norm before it. Layers that are alike are stacked, and so are experts. The
embedding may have rows beyond the vocabulary (https://github.com/NVIDIA/Megatron-LM,
https://github.com/NVIDIA-NeMo/Megatron-Bridge). Modules have states besides their weights, which
hold something in FP8 alone, and a checkpoint is not loaded without them.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, product

from growkit.base.axes import ORDERS
from growkit.base.tensors import Config, TensorInfo
from growkit.base.torch_internals import storage_info
from growkit.extras.formats.distributed_file import (
    LIST,
    VALUES,
    distributed_shards,
    list_of,
)
from growkit.extras.formats.layout import Held, LaidOut
from growkit.extras.formats.torch_archive import archive_of
from growkit.extras.formats.weight_formats.torch_distributed import Distributed
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import Output
from growkit.model.model import Model

QKV = "linear_qkv"
MARK = f"self_attention.{QKV}".encode()
"""In the list of entries of every such model."""

LAYER = "model.layers.{layer}."
OWN = "decoder.layers.{layer}."
ROUTER = "mlp.router.weight"
BEFORE_MLP, BEFORE_EXPERTS = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
ALIKE = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    BEFORE_MLP: "post_attention_layernorm.weight",
    BEFORE_EXPERTS: "post_attention_layernorm.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
ON_BOTH_SIDES = {
    "self_attention.linear_proj.post_layernorm.weight": "post_attention_layernorm.weight",
    BEFORE_MLP: "pre_feedforward_layernorm.weight",
    BEFORE_EXPERTS: "pre_feedforward_layernorm.weight",
    "mlp.linear_fc2.post_layernorm.weight": "post_feedforward_layernorm.weight",
}
"""Norms of layers that have one before and one after each sublayer."""
NORMS = {"gemma2": ON_BOTH_SIDES, "gemma3_text": ON_BOTH_SIDES}
ROWS = ("heads.head_dim", "kv_heads.head_dim", "kv_heads.head_dim")
GROUPS = ORDERS["with_keys_and_values"]("heads", "kv_heads", "head_dim")
IN_LAYER = re.compile(r"decoder\.layers\.(?P<layer>\d+)\.(?P<name>.+)")

COMMON, ABOUT = "common.pt", "metadata.json"
KIND = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
"""Contents of ``metadata.json``, without which Megatron-Core loads no checkpoint."""

ROUTERS = {"mixtral": "block_sparse_moe.gate"}
EXPERTS = {"mixtral": ("block_sparse_moe.experts.{expert}.", "w1", "w3", "w2")}
"""Names by type; those of all other types are those of Qwen3-MoE."""


class Megatron(LaidOut, Distributed):
    """See ``Format``."""

    title, name = "Megatron-Core", "megatron"
    models = (
        *("gemma", "gemma2", "gemma3_text", "llama", "mistral"),
        *("mixtral", "qwen2", "qwen3", "qwen3_moe"),
    )
    in_recipes, rank = "", 1  # its files look like those of torch.distributed.checkpoint
    beside = (VALUES, COMMON, ABOUT)

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        files = super().files(folder)
        return files if files and MARK in folder.bytes(LIST) else {}

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``; layers that are alike are listed as parts of one tensor."""
        tensors = self.from_transformers(model, config)
        names = {name: name for name in tensors.tensors}
        for router in filter(re.compile(rf".+\.{ROUTER}").fullmatch, tensors.tensors):
            layer = router.removesuffix(ROUTER)
            names[layer + BEFORE_EXPERTS] = layer + BEFORE_MLP  # with Transformer Engine
        infos = {name: tensors.tensors[own] for name, own in names.items()}
        stacks = _stacks(infos)
        for name in chain(*stacks.values()):
            infos[name] = replace(infos[name], shape=(1, *infos[name].shape))
        shards = distributed_shards({name: infos[name] for name in tensors.tensors}, shard_bytes)
        shapes = {name: info.shape for name, info in infos.items()}
        for name, parts in stacks.items():
            shapes[name] = len(parts), *max([shapes.pop(part) for part in parts])[1:]
        state = archive_of([None])
        states = dict.fromkeys(_states(shapes), storage_info(VALUES, 0, len(state)))
        files = {
            LIST: list_of(shards, names, stacks, states),
            VALUES: state,
            COMMON: archive_of({}),
            ABOUT: json.dumps(KIND).encode(),
        }
        return Output(tensors, shards, files)

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        model_type = str(config.get("model_type"))
        experts, gate, up, down = EXPERTS.get(
            model_type, ("mlp.experts.{expert}.", "gate_proj", "up_proj", "down_proj")
        )
        alike = ALIKE | NORMS.get(model_type, {})
        layer = [Held(OWN + own, (LAYER + name,)) for own, name in alike.items()]
        router = ROUTERS.get(model_type, "mlp.gate")
        layer.append(Held(OWN + ROUTER, (f"{LAYER}{router}.weight",)))
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


def _stacks(tensors: Mapping[str, TensorInfo]) -> dict[str, list[str]]:
    """The tensors of all layers in one, by its name; none if layers differ."""
    layers: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for name in tensors:
        if match := IN_LAYER.fullmatch(name):
            layers[f"decoder.layers.{match['name']}"][int(match["layer"])] = name
    stacks = {name: [those[layer] for layer in sorted(those)] for name, those in layers.items()}
    every = {tuple(sorted(those)) for those in layers.values()}
    alike = all(len({tensors[name] for name in names}) == 1 for names in stacks.values())
    return stacks if len(every) == 1 and alike else {}


def _states(shapes: Mapping[str, Sequence[int]]) -> Iterator[str]:
    """The names of the further states of all modules, one for each layer and expert.

    Args:
        shapes: the shapes of all tensors, by name.
    """
    for name, shape in shapes.items():
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not module.startswith("decoder."):
            continue
        counts = shape[: -1 if module.endswith("norm") else -2]
        for at in product(*map(range, counts)):
            place = "_".join(".".join(map(str, of)) for of in (at or (0,), counts or (1,)))
            yield f"{module}._extra_state/shard_{place}"
            if module.endswith(QKV):
                yield f"{module.removesuffix(QKV)}core_attention._extra_state/shard_{place}"


FORMAT = Megatron()
