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

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    second = (wide(lambda_q2) * wide(lambda_k2)).sum().exp()
    return first - second + lambda_init


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
    grouped = query.shape[1] != key.shape[1]

    def attend(query: Tensor, columns: int, mask: Tensor | None, causal: bool) -> Tensor:
        return functional.scaled_dot_product_attention(
            query,
            key[:, :, :columns],
            value[:, :, :columns],
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=grouped,
        )

    if visible is not None:
        output = attend(query, key.shape[2], visible, causal=False)
    elif past == 0 or not several:
        output = attend(query, past + rows, None, causal=several)
    else:
        output = torch.cat(
            [
                attend(query[:, :, first:last], past + last, visible, causal=False)
                for first, last in _blocks(rows)
                for visible in [_visible(past + first, past + last, None, query.device)]
            ],
            dim=2,
        )
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
    batch, signal = query.shape[:2]
    if past_sums is None:
        past_sums = wide(query.new_zeros(batch, signal, past))
    output, sums = _CausalIntegral.apply(query, key, value, gamma, past_sums, scaling, past, real)
    return output, sums


def differential_maps(
    signal_query: Tensor,
    signal_key: Tensor,
    noise_query: Tensor | None,
    noise_key: Tensor | None,
    lambda_: Tensor | None,
    gamma: Tensor | None,
    scaling: float,
    visible: Tensor,
    integral: str,
    past_sums: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """A₁ - λ A₂ + γ H in full, with no loop.

    Args:
        signal_query: [batch, signal, rows, head_dim].
        signal_key: [batch, key_heads, columns, head_dim].
        noise_query: [batch, noise, rows, head_dim]; None without noise heads.
        noise_key: like ``signal_key``.
        lambda_: see ``combine``.
        gamma: [batch or 1, signal or 1, rows or 1, 1]; None without an integral.
        scaling: of the scores.
        visible: [batch or 1, 1, rows, columns], true for what a row sees. Rows that see nothing
            take no part in means.
        integral: ``none``, ``causal`` or ``column_mean``.
        past_sums: see ``causal_integral``; zero for columns that it lacks.

    Returns:
        The maps, [batch, signal, rows, columns], and what they leave of column sums after the last
        row, [batch, signal, columns], in float32 or wider.
    """
    blind: Tensor = visible  # marks that some rows may see nothing
    maps = _map(signal_query, signal_key, scaling, visible, blind)
    sums = maps.sum(-2)
    if past_sums is not None:
        columns = maps.shape[-1]
        past_sums = functional.pad(past_sums, (0, columns - past_sums.shape[-1]))
        sums = sums + past_sums
    added = None
    if integral == "causal":
        assert gamma is not None
        running = maps.cumsum(-2)
        if past_sums is not None:
            running = running + past_sums[..., None, :]
        means = running / visible.sum(-1, keepdim=True).clamp_min(1)
        added = gamma * _masked_softmax(means, visible, blind)
    elif integral == "column_mean":
        assert gamma is not None
        text = visible | visible.transpose(-1, -2)  # all tokens of a row's own text
        means = maps.sum(-2, keepdim=True) / text.sum(-1, keepdim=True).clamp_min(1)
        added = gamma * means * text
    noise = None
    if noise_query is not None:
        assert noise_key is not None
        noise = _map(noise_query, noise_key, scaling, visible, blind)
    return combine(maps, noise, lambda_, added), sums


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
        # Recomputed in the backward pass, so that no map outlives its block.
        block = checkpoint(
            column_sums, query[:, :, first:last], key, scaling, first, real, use_reentrant=False
        )
        sums = sums + functional.pad(block, (0, rows - last))
    if real is None:
        return sums / rows
    return sums / wide(real.sum(-1))[:, None, None].clamp_min(1).to(sums.dtype)


class _CausalIntegral(torch.autograd.Function):
    """Blocks of rows that hand on the column sums; see ``causal_integral``.

    The backward pass walks the blocks in the other direction. What a block started from is what it
    ended with, less its own rows, so that memory is O(rows of a block × columns) there as well.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gamma: Tensor,
        past_sums: Tensor,
        scaling: float,
        past: int,
        real: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        rows = query.shape[2]
        sums = functional.pad(past_sums, (0, rows))  # [batch, signal, columns]
        output = []
        for first, last in _blocks(rows):
            columns = past + last
            maps, integral, ended = _integral_rows(
                query[:, :, first:last],
                key[:, :, :columns],
                sums[..., :columns],
                scaling,
                first,
                past,
                real,
            )
            weights = maps + _rows_of(gamma, first, last) * integral
            output.append(_grouped_matmul(weights.to(value.dtype), value[:, :, :columns]))
            sums = functional.pad(ended, (0, rows - last))
        ctx.save_for_backward(query, key, value, gamma, sums, real)
        ctx.scaling, ctx.past = scaling, past
        ctx.mark_non_differentiable(sums)
        return torch.cat(output, dim=2), sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, gamma, sums, real = ctx.saved_tensors
        d_output = gradients[0]
        d_query = torch.empty_like(query)
        d_key, d_value, d_gamma = (wide(torch.zeros_like(t)) for t in (key, value, gamma))
        d_sums = torch.zeros_like(sums)  # from all rows below the block
        for first, last in reversed(list(_blocks(query.shape[2]))):
            columns = ctx.past + last
            q, d_out = query[:, :, first:last], d_output[:, :, first:last]
            k, v = key[:, :, :columns], value[:, :, :columns]
            maps, integral, started = _integral_rows(
                q, k, sums[..., :columns], ctx.scaling, first, ctx.past, real, ended=True
            )
            g = _rows_of(gamma, first, last)
            weights = maps + g * integral
            d_value[:, :, :columns] += _grouped_transposed_matmul(weights.to(v.dtype), d_out, v)
            d_weights = wide(_grouped_matmul(d_out, v.transpose(-1, -2)))
            d_g = (d_weights * integral).sum(-1, keepdim=True).sum_to_size(g.shape)
            _rows_of(d_gamma, first, last).add_(d_g)

            counts = _counts(ctx.past + first, ctx.past + last, real, maps)
            d_running = _softmax_backward(integral, g * d_weights) / counts
            below = d_sums[..., None, :columns]
            d_after = below + d_running.flip(-2).cumsum(-2).flip(-2)
            d_scores = _softmax_backward(maps, d_weights + d_after)
            d_scores = (d_scores * ctx.scaling).to(k.dtype)
            d_query[:, :, first:last] = _grouped_matmul(d_scores, k)
            d_key[:, :, :columns] += _grouped_transposed_matmul(d_scores, q, k)
            d_sums = functional.pad(
                d_sums[..., :columns] + d_running.sum(-2), (0, d_sums.shape[-1] - columns)
            )
            sums = started
        d_key, d_value, d_gamma = (
            gradient.to(tensor.dtype)
            for gradient, tensor in ((d_key, key), (d_value, value), (d_gamma, gamma))
        )
        return d_query, d_key, d_value, d_gamma, None, None, None, None


def _integral_rows(
    query: Tensor,
    key: Tensor,
    sums: Tensor,
    scaling: float,
    first: int,
    past: int,
    real: Tensor | None,
    ended: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Some rows of the signal map and of the integral.

    Args:
        query: [batch, signal, rows of the block, head_dim].
        key: [batch, key_heads, columns, head_dim].
        sums: column sums before the block, or after it, [batch, signal, columns].
        scaling: of the scores.
        first: number of the first row.
        past: columns that came before row 0.
        real: [batch, all columns] or None.
        ended: whether the sums are those after the block.

    Returns:
        The map and the integral, both [batch, signal, rows of the block, columns], and the column
        sums after the block; or those before it, if the ones after it were given.
    """
    last = first + query.shape[2]
    visible = _visible(past + first, past + last, real, query.device)
    maps = _map(query, key, scaling, visible, real)
    other = sums - maps.sum(-2) if ended else sums + maps.sum(-2)
    running = (other if ended else sums)[..., None, :] + maps.cumsum(-2)
    means = running / _counts(past + first, past + last, real, maps)
    return maps, _masked_softmax(means, visible, real), other


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
    probabilities = scores.masked_fill_(hidden, torch.finfo(scores.dtype).min).softmax(-1)
    return probabilities if real is None else probabilities.masked_fill(hidden, 0)


def _softmax_backward(probabilities: Tensor, gradient: Tensor) -> Tensor:
    return probabilities * (gradient - (probabilities * gradient).sum(-1, keepdim=True))


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


def _counts(first: int, last: int, real: Tensor | None, like: Tensor) -> Tensor:
    """How many tokens there are up to each of some, [batch or 1, 1, last - first, 1]."""
    if real is None:
        counts = torch.arange(first + 1, last + 1, device=like.device)[None]
    else:
        counts = real.cumsum(-1)[:, first:last].clamp_min(1)
    return counts[:, None, :, None].to(like.dtype)


def _rows_of(gamma: Tensor, first: int, last: int) -> Tensor:
    """The rows of a tensor that may be the same for all rows."""
    return gamma if gamma.shape[2] == 1 else gamma[:, :, first:last]


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[batch, heads, rows, n] @ [batch, key_heads, n, m], the right one shared by a group."""
    batch, heads, rows, inner = left.shape
    key_heads = right.shape[1]
    if torch.compiler.is_exporting():  # a folded shape is more than it can tell of all lengths
        return left @ right.repeat_interleave(heads // key_heads, dim=1)
    folded = left.reshape(batch, key_heads, heads // key_heads * rows, inner)
    return (folded @ right).view(batch, heads, rows, right.shape[3])


def _grouped_transposed_matmul(left: Tensor, right: Tensor, like: Tensor) -> Tensor:
    """Sums of leftᵀ @ right over groups: [batch, heads, rows, n or m] to [batch, key_heads, n, m].

    Returns:
        In float32 or wider.
    """
    batch, key_heads = like.shape[:2]
    folded = left.reshape(batch, key_heads, -1, left.shape[-1])
    return wide(folded.transpose(-1, -2) @ right.reshape(batch, key_heads, -1, right.shape[-1]))


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
