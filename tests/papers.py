"""Differential attention as the papers write it: explicit N × N matrices, one head at a time.

An independent judge of the model: it shares no code with it, and knows of it only the names of its
weights and of its switches. Padding is handled by leaving it out: the real tokens of a sequence are
all there is, at the positions that they have. What it costs in time and memory is of no concern.

The papers:

- DIFF: arXiv 2410.05258 (its equations as they are repeated in DINT's section 2.1)
- DINT: arXiv 2501.17486; its first version defines the column mean
- GDA: arXiv 2510.06949, grouped differential attention
- Shared DIFF: arXiv 2501.17900
- PolyNorm: arXiv 2411.03884
- DIFF V2: λ = σ(x W) per token and head, noise queries that read the keys of the signal
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]


def logits(
    state: State,
    config: Any,
    ids: Tensor,
    real: Tensor | None = None,
    position_ids: Tensor | None = None,
) -> Tensor:
    """Logits of the whole decoder, in float64; zero at padding.

    Args:
        state: the model's weights by their names.
        config: the model's, of which only what is stored in a config.json is read.
        ids: [batch, N].
        real: [batch, N], zero or false for padding; None if there is none.
        position_ids: [batch or 1, N]; None to count from zero, padding as well.

    Returns:
        [batch, N, vocabulary].
    """
    real = torch.ones_like(ids) if real is None else real
    positions = torch.arange(ids.shape[1])[None] if position_ids is None else position_ids
    batch = []
    for sequence, mask, position in zip(ids, real.bool(), positions.expand(ids.shape), strict=True):
        found, _ = decode(state, config, sequence[mask], position[mask])
        spread = torch.zeros(ids.shape[1], found.shape[1], dtype=torch.float64)
        batch.append(spread.index_put((mask.nonzero()[:, 0],), found))
    return torch.stack(batch)


def final_maps(state: State, config: Any, ids: Tensor) -> list[Tensor]:
    """A₁ - λ A₂ + γ H of one sequence: for every layer [signal heads, N, N]."""
    return decode(state, config, ids, torch.arange(len(ids)))[1]


def decode(
    state: State, config: Any, ids: Tensor, positions: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The decoder on one sequence without padding (DINT, eq. 10 and 11).

    Returns:
        Logits, [N, vocabulary], and the final maps of every layer, [signal heads, N, N].
    """
    maps = []

    def attention(weights: State, index: int, x: Tensor) -> Tensor:
        maps.append(torch.stack(final_attention(weights, config, index, x, positions)))
        return multi_head(weights, config, index, x, maps[-1])

    return decoder(state, config, ids, attention), maps


def decoder(
    state: State, config: Any, ids: Tensor, attention: Callable[[State, int, Tensor], Tensor]
) -> Tensor:
    """Logits of one sequence, [N] to [N, vocabulary], by an attention of (weights, layer, x)."""
    state = {name: weight.to(torch.float64) for name, weight in state.items()}
    eps = config.rms_norm_eps
    x = state["model.embed_tokens.weight"][ids]
    for index in range(config.num_hidden_layers):
        layer = _below(state, f"model.layers.{index}.")
        normed = rms_norm(x, layer["input_layernorm.weight"], eps)
        x = x + attention(_below(layer, "self_attn."), index, normed)
        normed = rms_norm(x, layer["post_attention_layernorm.weight"], eps)
        x = x + feed_forward(_below(layer, "mlp."), config, normed)
    x = rms_norm(x, state["model.norm.weight"], eps)
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return x @ state[head].T


def multi_head(state: State, config: Any, index: int, x: Tensor, maps: Tensor) -> Tensor:
    """Maps times values, normed, scaled, concatenated and projected.

    DINT, eq. 7 to 9, without a multiplier; DIFF, GDA eq. 2 and Shared DIFF § 2.4 scale the heads by
    1 - λ_init. The values of a group are common to its heads (GDA, eq. 7).
    """
    signal = len(maps)
    values = _heads(linear(state, "v_proj", x), config.value_head_dim)
    heads = []
    for i in range(signal):
        head = maps[i] @ values[i * len(values) // signal]
        if config.head_norm != "none":
            weight = state["head_norm.weight"] if config.head_norm == "affine" else None
            head = rms_norm(head, weight, config.head_norm_eps)
        if config.head_output_scale == "one_minus_lambda_init":
            head = (1 - config.lambda_init[index]) * head
        heads.append(head)
    return linear(state, "o_proj", torch.cat(heads, dim=1))


def final_attention(
    state: State, config: Any, index: int, x: Tensor, positions: Tensor
) -> list[Tensor]:
    """A₁ - λ A₂ + γ H for every signal head (DIFF; GDA, eq. 7; DINT, eq. 6)."""
    noise = config.num_noise_heads
    signal = config.num_attention_heads - noise
    own = noise > 0 and config.noise_keys == "own"
    groups = config.num_key_value_heads // (2 if own else 1)
    queries = projected_heads(state, "q_proj", config, x, signal, noise, noise)
    keys = projected_heads(state, "k_proj", config, x, groups, groups if own else 0, groups)
    theta = config.rope_parameters["rope_theta"]
    queries = [rotate(query, positions, theta) for query in queries]
    keys = [rotate(key, positions, theta) for key in keys]
    noise_keys = keys[groups:] if own else keys
    lambdas = lambda_per_head(state, config, index, x, signal)

    finals = []
    for i in range(signal):
        a1 = causal_softmax(queries[i] @ keys[i * groups // signal].T / config.head_dim**0.5)
        if not noise:  # ordinary attention
            finals.append(a1)
            continue
        j = i * noise // signal  # the group's noise head: GDA, eq. 5
        query = queries[signal + j]
        a2 = causal_softmax(query @ noise_keys[j * groups // noise].T / config.head_dim**0.5)
        final = a1 - lambdas[i] * a2
        if config.integral != "none":
            # "Unified Parameter Setting": γ and λ are the same value. Gated: g times that.
            gate = state["gamma_gate"] if config.gamma == "gated" else 1
            final = final + gate * lambdas[i] * INTEGRALS[config.integral](a1)
        finals.append(final)
    return finals


def causal_integral(a1: Tensor) -> Tensor:
    """softmax(G) with G[n] the mean of the rows of A₁ up to n (DINT, eq. 5 and 6)."""
    rows = len(a1)
    means = torch.ones(rows, rows, dtype=a1.dtype).tril() / torch.arange(1, rows + 1)[:, None]
    return causal_softmax(means @ a1)


def column_mean(a1: Tensor) -> Tensor:
    """The mean of all rows of A₁, repeated N times (DINT as first published, eq. 5 and 6)."""
    return a1.mean(0).repeat(len(a1), 1)


INTEGRALS = {"causal": causal_integral, "column_mean": column_mean}


def lambda_per_head(
    state: State, config: Any, index: int, x: Tensor, signal: int
) -> list[Tensor | float]:
    """λ of every signal head, a number or [N, 1] (DINT, eq. 3; DIFF V2)."""
    if not config.num_noise_heads:
        return [0.0] * signal
    if config.lambda_type == "projected":
        return list((1 / (1 + (-linear(state, "lambda_proj", x)).exp())).T[..., None])
    first = torch.exp(state["lambda_q1"] @ state["lambda_k1"])
    second = torch.exp(state["lambda_q2"] @ state["lambda_k2"])
    return [first - second + config.lambda_init[index]] * signal


def projected_heads(
    state: State, name: str, config: Any, x: Tensor, signal: int, noise: int, groups: int
) -> list[Tensor]:
    """Queries or keys, [N, head_dim] each, signal heads first.

    Shared DIFF: W₁ = W + W₁₁ W₁₂ᵀ and W₂ = W + W₂₁ W₂₂ᵀ (eq. 3 and 4).
    """
    width = config.head_dim
    if config.qk_projection == "full" or not noise:  # alone, there is nothing to share
        return list(_heads(linear(state, name, x), width))
    rank, scope = config.shared_rank, config.shared_scope
    bases = state[f"{name}.base.weight"].T.split(width, dim=1)  # d_model × d each
    left = state[f"{name}.down.weight"].T.split(rank, dim=1)  # d_model × r
    right = state[f"{name}.up.weight"].split(width)  # d × r, always one for each head
    assert len(bases) == (1 if scope == "all_heads" else groups)
    heads = []
    for h in range(signal + noise):
        # The base of a pair (§ 2.2), of a group, or of all heads (§ 2.4).
        group = h * len(bases) // signal if h < signal else (h - signal) * len(bases) // noise
        update = left[int(h >= signal) if scope == "layer" else h]
        head = x @ (bases[group] + update @ right[h].T)
        if config.attention_bias:
            head = head + state[f"{name}.up.bias"][h * width : (h + 1) * width]
        heads.append(head)
    return heads


def feed_forward(state: State, config: Any, x: Tensor) -> Tensor:
    """(swish(X W_G) ⊙ X W₁) W₂ (DINT, § 2.4), or with PolyNorm in the place of swish."""
    gate = linear(state, "gate_proj", x)
    if config.hidden_act == "poly_norm":
        powers = [rms_norm(gate**power, None, 1e-6) for power in (3, 2, 1)]
        terms = [a * power for a, power in zip(state["act_fn.weight"], powers, strict=True)]
        gate = sum(terms, state["act_fn.bias"])
    elif config.hidden_act == "gelu":  # Microsoft's modules in a skeleton that has it
        gate = gate * (1 + torch.erf(gate / 2**0.5)) / 2
    else:
        assert config.hidden_act == "silu"
        gate = gate / (1 + (-gate).exp())
    return linear(state, "down_proj", gate * linear(state, "up_proj", x))


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x over its root mean square, times a weight (Zhang and Sennrich, 2019)."""
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed if weight is None else weight * normed


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE, half-rotated: coordinates i and i + d/2 turn by position · theta^(-2i/d)."""
    half = x.shape[1] // 2
    exponents = torch.arange(half, dtype=torch.float64) / half
    angles = positions[:, None].to(torch.float64) * theta**-exponents
    first, second = x[:, :half], x[:, half:]
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=1)


def causal_softmax(scores: Tensor) -> Tensor:
    """Softmax of every row over its columns up to the diagonal."""
    future = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def linear(state: State, name: str, x: Tensor) -> Tensor:
    """X Wᵀ + b, where there is a b."""
    product = x @ state[f"{name}.weight"].T
    bias = state.get(f"{name}.bias")
    return product if bias is None else product + bias


def _heads(x: Tensor, width: int) -> tuple[Tensor, ...]:
    return x.split(width, dim=1)


def _below(state: State, prefix: str) -> State:
    return {
        name.removeprefix(prefix): weight
        for name, weight in state.items()
        if name.startswith(prefix)
    }
