"""The public layouts of differential attention, each as a decoder that reads its own folders.

Independent judges: they share no code with the package, and read the tensors of a folder where
their layout has them, in float64, head by head, with explicit N × N maps (``tests/papers.py``). A
weight that is not the layout's is an error, so a folder cannot hold what its layout does not have.

- Microsoft DIFF: ``multihead_flashdiff_1.py`` and ``multihead_flashdiff_2.py`` of microsoft/unilm
- Microsoft DIFF V2: ``multihead_flashdiffv2.py``, there as well
- Motif: Motif-2.6B and Motif-2-12.7B, as vLLM and other public ports have them

Microsoft's modules stand in a Llama skeleton.
"""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.papers import State, causal_softmax, decoder, linear, rms_norm, rotate

Config = dict[str, Any]
MICROSOFT, MICROSOFT_V2, MOTIF = "microsoft_diff", "microsoft_diff_v2", "Motif"
MICROSOFT_HEAD_NORM_EPS = 1e-5


def logits(folder: Path, ids: Tensor) -> Tensor:
    """Next-token logits of one sequence, [N] to [N, vocabulary], in float64."""
    config: Config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    state = {}
    for file in folder.glob("*.safetensors"):
        state |= load_file(file)
    assert {name: tuple(each.shape) for name, each in state.items()} == shapes(config)
    kind = config["model_type"].lower()
    skeleton = {
        "rms_norm_eps": 1e-6,
        "hidden_act": "poly_norm" if kind == MOTIF.lower() else "silu",
        "tie_word_embeddings": False,
    }
    return decoder(
        state,
        SimpleNamespace(**(skeleton | config)),
        ids,
        lambda weights, layer, x: ATTENTION[kind](weights, config, layer, x),
    )


def differential(state: State, config: Config, layer: int, x: Tensor) -> Tensor:
    """DIFF, grouped in Motif: queries [s, …, s, n] for each noise head, keys [s, n, s, n, …].

    Microsoft's groups have one signal head, and its λ_init is the layer's; Motif's is that of the
    layer before.
    """
    microsoft = config["model_type"] == MICROSOFT
    noise, group, kv, width = (microsoft_sizes if microsoft else motif_sizes)(config)
    query = turned(linear(state, "q_proj", x), config, width).view(len(x), noise, group + 1, width)
    key = turned(linear(state, "k_proj", x), config, width).view(len(x), kv, 2, width)
    value = linear(state, "v_proj", x).view(len(x), kv, 2 * width)
    init = lambda_init(layer if microsoft else layer - 1)
    q1, k1, q2, k2 = (state["lambda_" + name] for name in ("q1", "k1", "q2", "k2"))
    lambda_ = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + init
    outputs = []
    for n in range(noise):
        j = n // (noise // kv)
        noise_map = attention_map(query[:, n, group], key[:, j, 1])
        for s in range(group):
            signal_map = attention_map(query[:, n, s], key[:, j, 0])
            outputs.append((signal_map - lambda_ * noise_map) @ value[:, j])
    eps = MICROSOFT_HEAD_NORM_EPS if microsoft else config.get("attn_rms_norm_eps", 1e-5)
    normed = (1 - init) * rms_norm(torch.stack(outputs, 1), state["subln.weight"], eps)
    return linear(state, "out_proj" if microsoft else "o_proj", normed.flatten(1))


def microsoft_v2(state: State, config: Config, layer: int, x: Tensor) -> Tensor:
    """V2: one ordinary attention with twice as many queries, then s - σ(λ) n for each pair."""
    heads, kv, width = microsoft_v2_sizes(config)
    query = turned(linear(state, "q_proj", x), config, width)
    key = turned(linear(state, "k_proj", x), config, width)
    value = linear(state, "v_proj", x).view(len(x), kv, width)
    attended = []
    for a in range(2 * heads):
        j = a // (2 * heads // kv)
        attended.append(attention_map(query[:, a], key[:, j]) @ value[:, j])
    output = torch.stack(attended, 1)
    lambda_ = linear(state, "lambda_proj", x).sigmoid()[..., None]
    return linear(state, "o_proj", (output[:, 0::2] - lambda_ * output[:, 1::2]).flatten(1))


ATTENTION = {MICROSOFT: differential, MICROSOFT_V2: microsoft_v2, MOTIF.lower(): differential}


def microsoft_sizes(config: Config) -> tuple[int, int, int, int]:
    """Pairs of queries, signal heads of each, pairs of keys, and the width of one half."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads // 2
    return heads, 1, config.get("num_key_value_heads") or heads, width


def microsoft_v2_sizes(config: Config) -> tuple[int, int, int]:
    """Heads with an output, keys, and their width."""
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    return heads, config.get("num_key_value_heads") or heads, width


def motif_sizes(config: Config) -> tuple[int, int, int, int]:
    """Noise heads, signal heads of each, pairs of keys, and the width of a head."""
    heads = config["num_attention_heads"]
    noise = config.get("num_noise_heads") or heads // 2
    pairs = (config.get("num_key_value_heads") or heads) // 2
    width = config.get("head_dim") or config["hidden_size"] // heads
    return noise, heads // noise - 1, pairs, width


def lambda_init(depth: int) -> float:
    """As in arXiv 2410.05258, for layers counted from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * depth)


def attention_map(query: Tensor, key: Tensor) -> Tensor:
    """Causal softmax of one head, [N, width] to [N, N]."""
    return causal_softmax(query @ key.T / query.shape[1] ** 0.5)


def turned(x: Tensor, config: Config, width: int) -> Tensor:
    """Heads after RoPE, [N, heads, width], of coordinates 2i and 2i + 1, or i and i + width / 2."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    assert rope.get("rope_type", "default") in ("default", "linear")
    positions = torch.arange(len(x)).double() / rope.get("factor", 1.0)
    heads = []
    for head in x.split(width, 1):
        if config["model_type"].lower() != MOTIF.lower():
            head = torch.cat([head[:, 0::2], head[:, 1::2]], 1)  # alike in queries and keys
        heads.append(rotate(head, positions, theta))
    return torch.stack(heads, 1)


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight in a folder."""
    hidden, ffn, vocabulary = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    kind = config["model_type"].lower()
    biased = kind == MOTIF.lower() and bool(config.get("use_bias"))
    if kind == MICROSOFT_V2:
        heads, kv, width = microsoft_v2_sizes(config)
        rows = (2 * heads * width, kv * width, kv * width, heads * width)
    else:
        noise, group, kv, width = (microsoft_sizes if kind == MICROSOFT else motif_sizes)(config)
        rows = (noise * (group + 1) * width, *[2 * kv * width] * 2, 2 * noise * group * width)
    output = "out_proj" if kind == MICROSOFT else "o_proj"
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (rows[0], hidden),
        "self_attn.k_proj.weight": (rows[1], hidden),
        "self_attn.v_proj.weight": (rows[2], hidden),
        f"self_attn.{output}.weight": (hidden, rows[3]),
        "mlp.gate_proj.weight": (ffn, hidden),
        "mlp.up_proj.weight": (ffn, hidden),
        "mlp.down_proj.weight": (hidden, ffn),
    }
    if biased:
        layer |= {
            name.replace(".weight", ".bias"): shape[:1]
            for name, shape in layer.items()
            if "_proj" in name
        }
    if kind == MICROSOFT_V2:
        layer["self_attn.lambda_proj.weight"] = (heads, hidden)
    else:
        layer |= {f"self_attn.lambda_{name}": (width,) for name in ("q1", "k1", "q2", "k2")}
        layer["self_attn.subln.weight"] = (2 * width,)
    if kind == MOTIF.lower() and config.get("hidden_act", "poly_norm") == "poly_norm":
        layer |= {"mlp.act_fn.weight": (3,), "mlp.act_fn.bias": (1,)}
    every = {
        f"model.layers.{index}.{name}": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    every["model.embed_tokens.weight"] = (vocabulary, hidden)
    every["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        every["lm_head.weight"] = (vocabulary, hidden)
    return every


def write_folder(
    folder: Path, config: Config, seed: int, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a random model: no bias is zero and no norm is one, so faults show.

    Args:
        folder: to make.
        config: its ``config.json``.
        seed: of the weights.
        dtype: of the weights. Every other model has its λ vectors in float32, as Microsoft's have.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if "norm" in name or "subln" in name:
            noise = 1 + 0.3 * noise
        else:
            noise = noise / shape[-1] ** 0.5 if len(shape) > 1 else 0.3 * noise
        wide = "lambda_" in name and len(shape) == 1 and seed % 2 == 0
        tensors[name] = noise.to(torch.float32 if wide else dtype)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
