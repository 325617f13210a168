"""Motif-3 as a decoder that reads its own folders: one sequence, head by head, in float64.

An independent judge: it shares no code with the package. It follows ``modeling_motif.py`` of
Motif-Technologies/Motif-3 as described by public ports of it: windows hold the token and as many
before it as the config says, and RoPE is scaled in layers without a window only.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.files import listed
from tests.papers import State, linear, rms_norm

TINY: dict[str, Any] = listed("motif3", "tiny")
"""A small config with all that Motif-3 has."""


def write_folder(
    folder: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], seed: int
) -> Path:
    """Write a random model with tensors of these shapes; no two of its numbers are alike."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        small = len(shape) > 1 and "act_fn" not in name and "bias" not in name
        tensors[name] = noise * shape[-1] ** -0.5 if small else noise
        if "norm.weight" in name or "expert_bias" in name:
            tensors[name] = 1 + 0.3 * noise
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def logits(folder: Path, ids: Tensor) -> Tensor:
    """Next-token logits of one sequence, [N] to [N, vocabulary], in float64."""
    return decode(*read(folder), ids)


def read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors in float64, and the config."""
    tensors = load_file(folder / "model.safetensors").items()
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {name: tensor.double() for name, tensor in tensors}, config


def decode(state: State, config: dict[str, Any], ids: Tensor) -> Tensor:
    """See ``logits``."""
    streams = [state["model.embed_tokens.weight"][ids]] * config["mhc_expansion_rate"]
    for index in range(config["num_hidden_layers"]):
        layer = _below(state, f"model.layers.{index}.")
        read, *weights = mixed(_below(layer, "mhc_attn."), streams)
        normed = rms_norm(read, layer["input_layernorm.weight"], config["rms_norm_eps"])
        output = attention(_below(layer, "self_attn."), config, index, normed)
        streams = written(streams, output, *weights)
        read, *weights = mixed(_below(layer, "mhc_ffn."), streams)
        normed = rms_norm(read, layer["post_attention_layernorm.weight"], config["rms_norm_eps"])
        if index < config["n_dense_first_layers"]:
            output = mlp(_below(layer, "mlp."), config, normed)
        else:
            output = experts(_below(layer, "moe."), config, normed)
        streams = written(streams, output, *weights)
    mean = sum(streams) / len(streams)
    normed = rms_norm(mean, state["model.norm.weight"], config["rms_norm_eps"])
    return normed @ state["lm_head.weight"].T


def mixed(state: State, streams: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """What a block reads, the weights of its output, [N, streams], and [N, streams, streams]."""
    count = len(streams)
    normed = rms_norm(torch.cat(streams, 1), state["rms_norm.weight"], 1e-6)
    pre, post, res = (
        state[f"alpha_{part}"] * linear(state, f"proj_{part}", normed)
        + state[f"bias_{part}"].flatten()
        for part in ("pre", "post", "res")
    )
    matrix = res.clamp(-20, 20).exp().view(-1, count, count)
    for _ in range(20):
        matrix = matrix / matrix.sum(2, keepdim=True)
        matrix = matrix / matrix.sum(1, keepdim=True)
    weights = pre.clamp(-10, 10).sigmoid()
    read = sum(weights[:, i, None] * stream for i, stream in enumerate(streams))
    return read, post.clamp(-10, 10).sigmoid(), matrix


def written(streams: list[Tensor], output: Tensor, write: Tensor, matrix: Tensor) -> list[Tensor]:
    """The streams after a block."""
    return [
        write[:, i, None] * output + sum(matrix[:, i, j, None] * s for j, s in enumerate(streams))
        for i in range(len(streams))
    ]


def attention(state: State, config: dict[str, Any], index: int, x: Tensor) -> Tensor:
    """Every signal head of a group minus σ(λ) of its noise head, times a gate."""
    width, rope, value = (config[k] for k in ("head_dim", "qk_rope_head_dim", "v_head_dim"))
    rank, eps, noise = config["kv_lora_rank"], config["rms_norm_eps"], config["num_noise_heads"]
    ratio = config["num_attention_heads"] // noise - 1
    window = config["sliding_window"] if index % config["sliding_window_period"] else None
    latent = rms_norm(linear(state, "wq_a", x), state["q_norm.weight"], eps)
    queries = linear(state, "wq_b", latent).split(width, 1)
    gates = linear(state, "wq_b_gate", latent).sigmoid().split(value, 1)
    lambdas = linear(state, "lambda_proj", x).sigmoid()
    down = linear(state, "wkv_a", x)
    rotary = rotated(down[:, rank:], config, window)
    up = linear(state, "wkv_b", rms_norm(down[:, :rank], state["kv_norm.weight"], eps))
    groups = up.split(width - rope + value, 1)
    scale = width**-0.5
    if window is None:
        scale *= (0.1 * math.log(config["rope_factor"]) + 1) ** 2

    def head(number: int) -> Tensor:
        group = groups[number * len(groups) // len(queries)]
        plain, turning = queries[number].split([width - rope, rope], 1)
        scores = plain @ group[:, : width - rope].T + rotated(turning, config, window) @ rotary.T
        seen = torch.ones_like(scores).tril()
        if window is not None:
            seen = seen.triu(-window)
        return (scale * scores).masked_fill(seen == 0, -math.inf).softmax(1) @ group[:, -value:]

    outputs = []
    for group in range(noise):
        first = group * (ratio + 1)
        of_noise = head(first + ratio)
        for j in range(ratio):
            signal = group * ratio + j
            difference = head(first + j) - lambdas[:, signal, None] * of_noise
            outputs.append(gates[signal] * difference)
    return linear(state, "wo", torch.cat(outputs, 1))


def rotated(x: Tensor, config: dict[str, Any], window: int | None) -> Tensor:
    """RoPE of coordinates i and i + half, with YaRN's frequencies where there is no window."""
    half = x.shape[1] // 2
    theta = config["rope_theta"] if window is None else config["swa_rope_theta"]
    frequencies = theta ** (-torch.arange(half).double() / half)
    if window is None:
        yarn = config["rope_scaling"]
        trained = yarn["original_max_position_embeddings"]

        def place(turns: float) -> float:
            return half * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

        low = max(math.floor(place(yarn["beta_fast"])), 0)
        high = min(math.ceil(place(yarn["beta_slow"])), 2 * half - 1)
        slow = ((torch.arange(half) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (1 - slow) + frequencies / yarn["factor"] * slow
    angles = torch.arange(len(x)).double()[:, None] * frequencies
    one, other = x.split(half, 1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], 1)


def poly_norm(weight: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """A polynomial of the gate with normed powers, the highest first (arXiv 2411.03884)."""
    powers = [rms_norm(gate**power, None, 1e-6) for power in (3, 2, 1)]
    return sum(w * of for w, of in zip(weight.sigmoid(), powers, strict=True)) + bias


def mlp(state: State, config: dict[str, Any], x: Tensor) -> Tensor:
    """A dense MLP."""
    gate, up = (clamped(linear(state, name, x), config) for name in ("gate_proj", "up_proj"))
    active = poly_norm(state["act_fn.weight"], state["act_fn.bias"], gate) * up
    return linear(state, "down_proj", config["polynorm_output_scale"] * active)


def clamped(x: Tensor, config: dict[str, Any]) -> Tensor:
    """Numbers up to a limit."""
    return x.clamp(-config["hidden_clamp"], config["hidden_clamp"])


def experts(state: State, config: dict[str, Any], x: Tensor) -> Tensor:
    """The chosen experts of every token, and the shared one."""
    outputs = []
    clamp, scale = config["polynorm_bias_clamp"], config["polynorm_output_scale"]
    for token in x:
        scores = (state["router.gate.weight"] @ token).sigmoid()
        chosen = (scores + state["expert_bias"]).topk(config["experts_top_k"]).indices.tolist()
        total = sum(scores[e] for e in chosen) if config["route_norm"] else 1.0
        output = torch.zeros_like(token)
        for e in chosen:
            gate, up = clamped(state["experts.gate_up_proj"][e] @ token, config).chunk(2)
            bias = state["experts.act_fn.bias"][e].clamp(-clamp, clamp)
            active = poly_norm(state["experts.act_fn.weight"][e], bias, gate[None])[0] * up
            share = config["route_scale"] * scores[e] / total * scale
            output = output + share * (state["experts.down_proj"][e] @ clamped(active, config))
        outputs.append(output)
    return torch.stack(outputs) + mlp(_below(state, "shared_experts."), config, x)


def _below(state: State, prefix: str) -> State:
    return {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
