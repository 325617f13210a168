"""Differential attention in all its variants: the mathematics, as functions of tensors.

One formula covers them (A₁ are the signal maps, A₂ the noise maps, H the integral):

    heads = (A₁ - λ A₂ + γ H) V

DIFF (arXiv 2410.05258), grouped DIFF (arXiv 2510.06949, eq. 7) and Shared DIFF have γ = 0; DINT
(arXiv 2501.17486) adds the integral; ordinary attention has neither noise maps nor an integral.
Only ``differential_maps`` holds a matrix of queries × keys, for users who want to see the maps and
for graphs, which cannot loop. Otherwise maps without an integral run in fused attention, those with
one in blocks of rows.

Shapes: signal, noise and key_heads are numbers of heads (query head i reads key head
⌊i · key_heads / heads⌋), width is that of a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

BLOCK_ROWS = 128
"""Queries whose rows of an attention map are held at a time."""

FUSED_MULTIPLE = 8
"""Fused kernels want head widths that are multiples of this."""

HIDDEN_KEY = -1e9
HIDDEN_KEY_FLOAT16 = -30000.0
"""What a padding token's key adds to a score, before scaling: far below any score, but finite, so
that a row that sees nothing but padding is no division by zero."""


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, or in float64 if it has that already."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def lambda_of_vectors(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, lambda_init: float
) -> Tensor:
    """λ of a layer (arXiv 2410.05258, eq. 2): exp(λq1·λk1) - exp(λq2·λk2) + λ_init.

    Args:
        lambda_q1: [head_dim], like the rest.
        lambda_k1: see above.
        lambda_q2: see above.
        lambda_k2: see above.
        lambda_init: of the layer.

    Returns:
        A scalar, in float32 or wider.
    """
    first = (wide(lambda_q1) * wide(lambda_k1)).sum().exp()
    return first - (wide(lambda_q2) * wide(lambda_k2)).sum().exp() + lambda_init


def fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    past: int,
    real: Tensor | None,
    visible: Tensor | None = None,
) -> Tensor:
    """Causal softmax(Q Kᵀ · scaling) V.

    Args:
        query: [batch, heads, rows, head_dim].
        key: [batch, key_heads, columns, head_dim], columns = past + rows.
        value: [batch, key_heads, columns, width].
        scaling: of the scores.
        past: columns that came before the first row.
        real: [batch, columns], false for padding; None if there is none.
        visible: [batch or 1, 1, rows, columns] in the place of past and real; None for these.

    Returns:
        [batch, heads, rows, width], in the dtype of the values.
    """
    rows, head_dim, width = query.shape[2], query.shape[3], value.shape[3]
    several = bool(rows > 1)  # a bool in graphs of dynamic shapes as well
    if real is not None and visible is None:
        # One more coordinate hides the padding. A mask would be rows × columns large, and would
        # keep the fastest kernels away.
        lowest = HIDDEN_KEY_FLOAT16 if key.dtype == torch.float16 else HIDDEN_KEY
        hidden = (~real).to(key.dtype)[:, None, :, None] * lowest
        key = torch.cat([key, hidden.expand(-1, key.shape[1], -1, -1)], dim=-1)
        query = functional.pad(query, (0, 1), value=1.0)
    if several:
        # With heads of different widths the kernels that need no rows × columns are out of reach.
        common = max(query.shape[3], width)
        common += -common % FUSED_MULTIPLE if common > head_dim else 0
        query = functional.pad(query, (0, common - query.shape[3]))
        key = functional.pad(key, (0, common - key.shape[3]))
        value = functional.pad(value, (0, common - width))
    attend = partial(
        functional.scaled_dot_product_attention,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if visible is not None:
        output = attend(query, key, value, attn_mask=visible)
    elif past == 0 or not several:
        output = attend(query, key, value, is_causal=several)
    else:
        blocks = []
        for first, last in _blocks(rows):
            end = past + last
            mask = _visible(past + first, end, None, query.device)
            part = query[:, :, first:last], key[:, :, :end], value[:, :, :end]
            blocks.append(attend(*part, attn_mask=mask))
        output = torch.cat(blocks, dim=2)
    return output[..., :width]


def causal_integral(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gamma: Tensor,
    scaling: float,
    past: int,
    real: Tensor | None,
    past_sums: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """(A₁ + γ softmax(G)) V with G[n] = mean of the rows of A₁ up to n (DINT, eq. 5 and 6).

    Rows and columns of padding take no part in the means.

    Args:
        query: of the signal heads, [batch, signal, rows, head_dim].
        key: [batch, key_heads, columns, head_dim], columns = past + rows.
        value: [batch, key_heads, columns, width].
        gamma: [batch or 1, signal or 1, rows or 1, 1], in float32 or wider.
        scaling: of the scores.
        past: columns that came before the first row.
        real: [batch, columns], false for padding; None if there is none.
        past_sums: sums over the rows that came before, [batch, signal, past]; None if past is 0.
            Gradients do not flow into them.

    Returns:
        The heads, [batch, signal, rows, width], and the column sums after the last row,
        [batch, signal, columns], in float32 or wider.
    """
    batch, signal, rows = query.shape[:3]
    if past_sums is None:
        past_sums = wide(query.new_zeros(batch, signal, past))
    sums = past_sums[..., :past]  # a static cache has room for more

    def block(
        query: Tensor, key: Tensor, value: Tensor, gamma: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Rows that are the last of these columns: their heads, and the column sums after them."""
        last = key.shape[2]
        first = last - query.shape[2]
        visible = _visible(first, last, real, query.device)
        maps = _map(query, key, scaling, visible, real)
        running = sums[..., None, :] + maps.cumsum(-2)
        if real is None:
            counts = torch.arange(first + 1, last + 1, device=query.device)[None]
        else:
            counts = real.cumsum(-1)[:, first:last].clamp_min(1)
        means = running / counts[:, None, :, None].to(maps.dtype)
        weights = maps + gamma * _masked_softmax(means, visible, real)
        return _grouped_matmul(weights.to(value.dtype), value), sums + maps.sum(-2)

    heads = []
    for first, last in _blocks(rows):
        end, weight = past + last, gamma if gamma.shape[2] == 1 else gamma[:, :, first:last]
        part = query[:, :, first:last], key[:, :, :end], value[:, :, :end], weight
        found, sums = _recomputed(block, *part, functional.pad(sums, (0, last - first)))
        heads.append(found)
    return torch.cat(heads, dim=2), sums.detach()


class Projected(NamedTuple):
    """Inputs of attention, after projection and rotation.

    Attributes:
        signal_query: [batch, signal, rows, head_dim].
        signal_key: [batch, key_heads, columns, head_dim].
        value: [batch, key_heads, columns, width].
        noise_query: [batch, noise, rows, head_dim]; None without noise heads.
        noise_key: like ``signal_key``.
        lambda_: see ``combine``.
        gamma: [batch or 1, signal or 1, rows or 1, 1], the weight of an integral.
    """

    signal_query: Tensor
    signal_key: Tensor
    value: Tensor
    noise_query: Tensor | None = None
    noise_key: Tensor | None = None
    lambda_: Tensor | None = None
    gamma: Tensor | None = None

    def changed(self, change: Callable[[Tensor], Tensor]) -> Projected:
        """Apply a function to every tensor."""
        return Projected(*(None if each is None else change(each) for each in self))  # type: ignore[arg-type]


def differential_heads(
    projected: Projected,
    scaling: float,
    integral: str,
    past: int,
    real: Tensor | None,
    past_sums: Tensor | None,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor | None]:
    """(A₁ - λ A₂ + γ H) V; no map is held.

    Args:
        projected: see there.
        scaling: of the scores.
        integral: ``none``, ``causal`` or ``column_mean``.
        past: see ``causal_integral``.
        real: see there.
        past_sums: see there.
        attend: computes attention without an integral from queries, keys and values.

    Returns:
        The heads, [batch, signal, rows, width], and the column sums of a causal integral.
    """
    query, key, value, noise_query, noise_key, lambda_, gamma = projected
    noise = added = sums = None
    if integral == "causal":
        assert gamma is not None
        signal, sums = causal_integral(query, key, value, gamma, scaling, past, real, past_sums)
    else:
        signal = attend(query, key, value)
    if integral == "column_mean":
        assert gamma is not None
        added = gamma * values_of(column_mean(query, key, scaling, real)[:, :, None], value)
    if noise_query is not None:
        assert noise_key is not None
        noise = attend(noise_query, noise_key, value)
    return combine(signal, noise, lambda_, added), sums


def differential_maps(
    projected: Projected, scaling: float, integral: str, visible: Tensor, past_sums: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A₁ - λ A₂ + γ H in full, with no loop.

    Args:
        projected: see there.
        scaling: of the scores.
        integral: ``none``, ``causal`` or ``column_mean``.
        visible: [batch or 1, 1, rows, columns], true for visible columns. Rows that see nothing
            take no part in means.
        past_sums: see ``causal_integral``; zero for columns that it lacks.

    Returns:
        The maps, [batch, signal, rows, columns], and the column sums after the last row, [batch,
        signal, columns], in float32 or wider.
    """
    blind: Tensor = visible  # marks that some rows may see nothing
    maps = _map(projected.signal_query, projected.signal_key, scaling, visible, blind)
    sums, gamma = maps.sum(-2), projected.gamma
    added = noise = None
    if integral == "causal":
        assert gamma is not None
        running = maps.cumsum(-2)
        if past_sums is not None:
            past_sums = functional.pad(past_sums, (0, maps.shape[-1] - past_sums.shape[-1]))
            sums, running = sums + past_sums, running + past_sums[..., None, :]
        means = running / visible.sum(-1, keepdim=True).clamp_min(1)
        added = gamma * _masked_softmax(means, visible, blind)
    elif integral == "column_mean":
        assert gamma is not None
        text = visible | visible.transpose(-1, -2)  # all tokens of a row's own text
        means = maps.sum(-2, keepdim=True) / text.sum(-1, keepdim=True).clamp_min(1)
        added = gamma * means * text
    if projected.noise_query is not None:
        assert projected.noise_key is not None
        noise = _map(projected.noise_query, projected.noise_key, scaling, visible, blind)
    return combine(maps, noise, projected.lambda_, added), sums


def values_of(maps: Tensor, value: Tensor) -> Tensor:
    """[batch, signal, rows, columns] times [batch, key_heads, columns, width], widened."""
    return _grouped_matmul(wide(maps), wide(value))


def column_sums(
    query: Tensor, key: Tensor, scaling: float, past: int, real: Tensor | None
) -> Tensor:
    """Column sums of a few rows of a signal map, [batch, signal, past + rows].

    Args:
        query: [batch, signal, rows, head_dim].
        key: [batch, key_heads, columns, head_dim]; the first past + rows are read.
        scaling: of the scores.
        past: columns that came before the first row.
        real: [batch, columns], false for padding; None if there is none.
    """
    last = past + query.shape[2]
    visible = _visible(past, last, real, query.device)
    return _map(query, key[:, :, :last], scaling, visible, real).sum(-2)


def column_mean(query: Tensor, key: Tensor, scaling: float, real: Tensor | None) -> Tensor:
    """The mean of all rows of A₁ (DINT as first published, eq. 5). Not causal.

    Args:
        query: of the signal heads, [batch, signal, rows, head_dim].
        key: [batch, key_heads, rows, head_dim].
        scaling: of the scores.
        real: [batch, rows], false for padding, which takes no part; None if there is none.

    Returns:
        [batch, signal, rows], in float32 or wider.
    """
    rows = query.shape[2]
    sums = wide(query.new_zeros(*query.shape[:2], rows))
    for first, last in _blocks(rows):
        block = _recomputed(column_sums, query[:, :, first:last], key, scaling, first, real)
        sums = sums + functional.pad(block, (0, rows - last))
    if real is None:
        return sums / rows
    return sums / wide(real.sum(-1))[:, None, None].clamp_min(1).to(sums.dtype)


def _recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a block of rows; the backward pass calls it again.

    So no map outlives its block. Of each block, the backward pass finds its arguments alone.
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _map(
    query: Tensor, key: Tensor, scaling: float, visible: Tensor, real: Tensor | None
) -> Tensor:
    """softmax(Q Kᵀ · scaling) over what is visible; in float32 or wider."""
    # Widened before the product, as fused kernels do: a score rounded to bfloat16 is far off.
    scores = _grouped_matmul(wide(query) * scaling, wide(key).transpose(-1, -2))
    return _masked_softmax(scores, visible, real)


def _masked_softmax(scores: Tensor, visible: Tensor, real: Tensor | None) -> Tensor:
    """Zero wherever nothing is visible, also in rows that see nothing; overwrites the scores."""
    hidden = ~visible
    # Added, since the gradient of a sum costs nothing; it leaves nothing of a hidden score.
    lowest = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(
        hidden, torch.finfo(scores.dtype).min
    )
    probabilities = scores.add_(lowest).softmax(-1)
    return probabilities if real is None else probabilities.masked_fill(hidden, 0)


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    """First row, and the one after the last, of every block."""
    for first in range(0, rows, BLOCK_ROWS):
        yield first, min(first + BLOCK_ROWS, rows)


def _visible(first: int, last: int, real: Tensor | None, device: torch.device) -> Tensor:
    """Which columns some tokens may see: none that come later, and no padding; padding sees none.

    Args:
        first: number of the first of these tokens.
        last: number of the token after them.
        real: [batch, all tokens], false for padding; None if there is none.
        device: of the result.

    Returns:
        [batch or 1, 1, last - first, last], true for visible.
    """
    columns = torch.arange(last, device=device)
    visible = (columns <= columns[first:, None])[None, None]
    if real is None:
        return visible
    return visible & real[:, None, None, :last] & real[:, None, first:last, None]


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[batch, heads, rows, n] @ [batch, key_heads, n, m], the right one shared by a group."""
    batch, heads, rows, inner = left.shape
    key_heads = right.shape[1]
    if torch.compiler.is_exporting():  # a folded shape is more than it can tell of all lengths
        return left @ right.repeat_interleave(heads // key_heads, dim=1)
    folded = left.reshape(batch, key_heads, heads // key_heads * rows, inner)
    return (folded @ right).view(batch, heads, rows, right.shape[3])


def combine(
    signal: Tensor, noise: Tensor | None, lambda_: Tensor | None, integral: Tensor | None
) -> Tensor:
    """Signal heads less λ times the noise head of their group, plus the integral.

    Args:
        signal: [batch, signal, rows, width].
        noise: [batch, noise, rows, width]; head i belongs to noise head ⌊i · noise / signal⌋.
        lambda_: a scalar, or [batch, signal, rows, 1].
        integral: what is to be added, broadcastable to the signal; None for nothing.

    Returns:
        [batch, signal, rows, width], in float32 or wider.
    """
    heads = wide(signal)
    if noise is not None:
        assert lambda_ is not None
        heads = heads - lambda_ * wide(noise).repeat_interleave(
            signal.shape[1] // noise.shape[1], dim=1
        )
    return heads if integral is None else heads + integral


def head_norm(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of every head on its own.

    Args:
        heads: [..., width], in float32 or wider.
        weight: [width], shared by the heads; None for a norm without.
        eps: added to the mean square.
    """
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * wide(weight)
