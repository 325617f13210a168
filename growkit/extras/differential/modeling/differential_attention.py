"""Differential attention in all its variants: the mathematics, as functions of tensors.

One formula covers them (A₁ are the signal maps, A₂ the noise maps, H the integral):

    heads = (A₁ - λ A₂ + γ H) V

DIFF (arXiv 2410.05258), grouped DIFF (arXiv 2510.06949, eq. 7) and Shared DIFF have γ = 0; DINT
(arXiv 2501.17486) adds the integral; softmax attention has neither noise maps nor an integral.
Only ``differential_maps`` holds a matrix of queries × keys, for users who want to see the maps and
for graphs, which cannot loop. Everything else runs in fused attention, or with an exact integral in
blocks of rows. ``integral_series`` needs no block of a map either.

Shapes: signal, noise and key_heads are numbers of heads (query head i reads key head
⌊i · key_heads / heads⌋), width is that of a value head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from .seen_tokens import hide_padding

BLOCK_ROWS = 128
"""Number of rows of an attention map (queries) in memory at a time."""

HEAVY_COLUMNS = 16
"""Number of columns of each key head that a series can take exactly."""

HEAVY_MEAN = 0.03
"""Mean weight in one head above which it does."""

SAMPLED_ROWS = 8
"""Number of rows from which the means of an interval of rows are estimated."""

INTERVAL_POWER = 1.04
"""An interval ends at this power of its first row: at 319, 401, …, 3637, 5048. Errors shrink as
texts grow, so that intervals may grow by more than a constant factor."""

EXACT_ROWS = 256
"""Number of tokens at the beginning of a text whose rows are always exact."""

INTERVALS_AT_ONCE = 4
"""Number of intervals whose sampled rows are in memory at a time, on a CPU."""

SERIES_ROWS = 1024
"""Number of rows of a series in memory at a time, on a CPU."""

MORE_ON_ACCELERATOR = 4
"""How many times as many of both on an accelerator, where launching a kernel takes as long as
computing many rows."""

SHORTEST_SERIES = 512
"""Number of rows from which on ``auto`` takes the series."""

IN_KERNELS = ("fused", "tiles")
"""Integrals, none and the causal one, as ``triton_kernels`` computes them for a whole text."""

FUSED_MULTIPLE = 8
"""Fused kernels require head widths that are multiples of this, except on a CPU."""

FUSED_WIDTH = 256
"""Greatest head width of fused kernels, except on a CPU. Without them, maps take memory."""


def wide(tensor: Tensor) -> Tensor:
    """Cast to float32; float64 stays float64."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def lambda_of_vectors(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, lambda_init: float
) -> Tensor:
    """λ of a layer (arXiv 2410.05258, eq. 2): exp(λq1·λk1) - exp(λq2·λk2) + λ_init.

    Args:
        lambda_q1: [head_dim], as are the other three vectors.
        lambda_k1: see ``lambda_q1``.
        lambda_q2: see ``lambda_q1``.
        lambda_k2: see ``lambda_q1``.
        lambda_init: constant of the layer.

    Returns:
        A scalar, in float32 or wider.
    """
    first = (wide(lambda_q1) * wide(lambda_k1)).sum().exp()
    return first - (wide(lambda_q2) * wide(lambda_k2)).sum().exp() + lambda_init


def runs_kernels(tensor: Tensor) -> bool:
    """Whether Triton's kernels, ``triton_kernels``, run for a tensor, next to attention of torch's.

    That takes cuDNN's kernels or the efficient ones; where others are chosen, all of torch's run.
    """
    if tensor.device.type != "cuda" or tensor.dtype == torch.float64:
        return False
    if not torch.compiler.is_compiling():  # graphs cannot ask
        cuda, halves = torch.backends.cuda, tensor.dtype != torch.float32
        if not (cuda.mem_efficient_sdp_enabled() or (halves and cuda.cudnn_sdp_enabled())):
            return False
    return not torch.compiler.is_exporting() and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


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
        scaling: factor of the scores.
        past: number of columns before the first row.
        real: [batch, columns], false for padding; None if there is none.
        visible: [batch or 1, 1, rows, columns], true for visible columns, instead of causality and
            ``real``; None for these.

    Returns:
        [batch, heads, rows, width], in the dtype of the values.
    """
    rows, width = query.shape[2], value.shape[3]
    several = bool(rows > 1)  # a plain bool in graphs of dynamic shapes, too
    if several and past == 0 and visible is None and width % 8 == 0 and runs_kernels(query):
        from .triton_kernels import attention

        return attention(*hide_padding(query, key, real), value, scaling)
    if real is not None and visible is None:
        query, key = hide_padding(query, key, real)
    if several:
        # Kernels that avoid a rows × columns matrix need heads of one width.
        query, key, value = _of_one_width(query, key, value)
    attend = partial(
        functional.scaled_dot_product_attention,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if not several:
        with _kernels_of_a_row(query.device):
            output = attend(query, key, value, attn_mask=visible)
    elif visible is not None:
        output = attend(query, key, value, attn_mask=visible)
    elif past == 0:
        output = attend(query, key, value, is_causal=True)
    else:
        blocks = []
        for first, last in _blocks(rows):
            end = past + last
            mask = _causal_mask(past + first, end, None, query.device)
            part = query[:, :, first:last], key[:, :, :end], value[:, :, :end]
            blocks.append(attend(*part, attn_mask=mask))
        output = torch.cat(blocks, dim=2)
    return output[..., :width]


def _kernels_of_a_row(device: torch.device) -> AbstractContextManager[None]:
    """All kernels that are chosen, but cuDNN's: planning the next length takes it 28 ms a token."""
    cuda = torch.backends.cuda
    if device.type != "cuda" or torch.compiler.is_compiling() or not cuda.cudnn_sdp_enabled():
        return nullcontext()
    others = {
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    chosen = [kernel for kernel, enabled in others.items() if enabled]
    return sdpa_kernel(chosen) if chosen else nullcontext()


def _attention_and_log_sums(
    query: Tensor, key: Tensor, value: Tensor, scaling: float
) -> tuple[Tensor, Tensor]:
    """``fused_attention`` of a whole text on a CPU, and what its softmax divides by.

    Returns:
        [batch, heads, rows, width], and the logarithm of the sum of each row's exponentials,
        [batch, heads, rows, 1], in float32 or wider, through which no gradients flow.
    """
    width = value.shape[3]
    # What scaled_dot_product_attention calls, which does not return the second.
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, log_sums = attend(*_of_one_width(query, key, value), is_causal=True, scale=scaling)
    return output[..., :width], log_sums[..., None]


def _of_one_width(*heads: Tensor) -> Iterator[Tensor]:
    """Queries, keys and values with as many coordinates each, as fused kernels need them."""
    common = max(head.shape[3] for head in heads)
    if heads[0].device.type != "cpu":
        common += -common % FUSED_MULTIPLE
    for head in heads:  # padding by nothing would copy
        missing = common - head.shape[3]
        yield functional.pad(head, (0, missing)) if missing else head


class Sums(NamedTuple):
    """What the rows of the signal maps so far add up to, in float32 or wider.

    Attributes:
        columns: the sum of each column, [batch, signal, columns].
        rest: after a series, whose sums are those of heavy columns alone: what all other columns
            have added to Σ A₁ V and to Σ A₁, [batch, signal, width + 1]; None for nothing.
    """

    columns: Tensor
    rest: Tensor | None = None


class SignalHeads(NamedTuple):
    """Rows of the signal heads, with all columns up to the last of them.

    Attributes:
        query: [batch, signal, rows, head_dim].
        key: [batch, key_heads, columns, head_dim], columns = past + rows.
        value: [batch, key_heads, columns, width].
        gamma: weight of the integral, [batch or 1, signal or 1, rows or 1, 1], in float32 or wider.
        scaling: factor of the scores.
        past: number of columns before the first row.
        real: [batch, at least columns], false for padding; None if there is none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gamma: Tensor
    scaling: float
    past: int = 0
    real: Tensor | None = None

    def rows(self, first: int, last: int) -> SignalHeads:
        """Some rows: from the first to before the last."""
        end, gamma = self.past + last, self.gamma
        tensors = self.query[:, :, first:last], self.key[:, :, :end], self.value[:, :, :end]
        gamma = gamma if gamma.shape[2] == 1 else gamma[:, :, first:last]
        return SignalHeads(*tensors, gamma, self.scaling, self.past + first, self.real)

    def visible(self) -> Tensor:
        """[batch or 1, 1, rows, columns], true for visible columns."""
        return _causal_mask(self.past, self.key.shape[2], self.real, self.query.device)

    def counts(self) -> Tensor:
        """Number of visible columns, [batch or 1, rows]; it may be 0 in rows of padding."""
        first, last = self.past, self.key.shape[2]
        if self.real is None:
            return torch.arange(first + 1, last + 1, device=self.query.device)[None]
        return self.real.cumsum(-1)[:, first:last]


def causal_integral(heads: SignalHeads, past_sums: Sums | None) -> tuple[Tensor, Sums]:
    """(A₁ + γ softmax(G)) V with G[n] = mean of the rows of A₁ up to n (DINT, eq. 5 and 6).

    The means leave out rows and columns of padding.

    Args:
        heads: some rows.
        past_sums: sums over earlier rows; None if past is 0. Gradients do not flow into them.

    Returns:
        The heads, [batch, signal, rows, width], and the sums after the last row.
    """
    (batch, signal, rows), past = heads.query.shape[:3], heads.past
    if past_sums is None:
        past_sums = Sums(wide(heads.query.new_zeros(batch, signal, past)))
    sums, rest = past_sums.columns[..., :past], past_sums.rest  # a static cache has more columns

    def block(part: SignalHeads, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Compute some rows, and the column sums after them."""
        visible, blind = part.visible(), part.real is not None
        maps = _map(part.query, part.key, part.scaling, visible, blind)
        running = sums[..., None, :] + maps.cumsum(-2)
        counts = part.counts().clamp_min(1)[:, None, :, None].to(maps.dtype)
        weights, added = _integral(running / counts, visible, blind, counts, rest)
        output = _grouped_matmul((maps + part.gamma * weights).to(part.value.dtype), part.value)
        if added is not None:
            output = (wide(output) + part.gamma * added).to(part.value.dtype)
        return output, sums + maps.sum(-2)

    outputs = []
    for first, last in _blocks(rows):
        part = heads.rows(first, last)
        output, sums = _checkpointed(block, part, functional.pad(sums, (0, last - first)))
        outputs.append(output)
    return torch.cat(outputs, dim=2), Sums(sums.detach(), rest)


def _integral(
    means: Tensor, visible: Tensor, blind: bool, counts: Tensor, rest: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """softmax(G), and what a rest of earlier rows adds to softmax(G) V.

    Columns of the rest have small means, so that their exponentials are 1 + G.

    Args:
        means: G without the rest, [batch, signal, rows, columns].
        visible: [batch or 1, 1, rows, columns], true for visible columns.
        blind: whether some rows may see nothing.
        counts: number of visible columns, broadcastable to [batch, 1, rows, 1].
        rest: see ``Sums``.
    """
    if rest is None:
        return _masked_softmax(means, visible, blind), None
    exponentials, mean_rest = means.exp() * visible, rest[:, :, None] / counts
    total = exponentials.sum(-1, keepdim=True) + mean_rest[..., -1:]
    return exponentials / total, mean_rest[..., :-1] / total


def integral_series(
    heads: SignalHeads, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Sums]:
    """``causal_integral`` of a whole text, in linear time beyond that of fused attention.

    Rows of G sum to one, and exp(G) = 1 + G + r with r = exp(G) - 1 - G ≤ (e - 2) G². So row n is

        softmax(G) V = (Σ V[j] + (1/n) Σ (A₁V)[m] + Σ r[j] V[j]) / (n + 1 + Σ r[j])

    with sums over j, m ≤ n. The first rows, whose n is small, are exact. After them, r is computed
    for ``heavy_columns``, such as sinks, and left out for all others: r is below 0.72, over n.

    A₁ of heavy columns needs what softmax divided by. Fused attention adds up the weights of all
    heavy columns, as one more value of each column, and a softmax over their scores alone divides
    this sum among them. Without gradients a CPU returns the divisors themselves, which is faster.

    Args:
        heads: all rows of a text.
        attend: see ``differential_heads``.

    Returns:
        See ``causal_integral``.
    """
    counts, rows, exact, real = heads.counts(), heads.value.shape[2], EXACT_ROWS, heads.real
    if real is not None:
        exact = int((counts <= EXACT_ROWS).any(0).sum())
        heads = heads._replace(value=heads.value * real[:, None, :, None].to(heads.value.dtype))
    query, key, value, gamma, scaling, *_ = heads
    head, sums = causal_integral(heads.rows(0, exact), None)
    columns, starts = heavy_columns(query, key, scaling, counts, real, sums.columns)
    by_log_sums = real is None and query.device.type == "cpu" and not torch.is_grad_enabled()
    if by_log_sums:
        output, weights = _attention_and_log_sums(query, key, value, scaling)
    else:
        output, weights = _attention_and_weights(heads, columns, attend)

    # From here on, signal heads are [key_heads, group].
    query, output, weights = (
        tensor.unflatten(1, (key.shape[1], -1)) for tensor in (query, output, weights)
    )
    gamma = gamma[:, None] if gamma.shape[1] == 1 else gamma.unflatten(1, (key.shape[1], -1))
    key, value = key[:, :, None], value[:, :, None]
    places = columns[:, :, None, None]
    indices = places.clamp_max(rows - 1).mT
    keys, values = (wide(tensor.take_along_dim(indices, 3)) for tensor in (key, value))
    heavy = _Heavy(places, starts[:, :, None, None], keys.mT * scaling, values, by_log_sums)

    row, count = torch.arange(rows, device=query.device)[:, None], wide(counts)[..., None]
    count = count[:, None, None]
    mass = heavy.masses(query[..., :exact, :], weights[..., :exact, :], row[:exact])
    mass = mass.sum(3, keepdim=True)
    parts = [wide(tensor[..., :exact, :]).sum(3, keepdim=True) for tensor in (output, value)]
    before, outputs = torch.cat(torch.broadcast_tensors(*parts), 3), [head]
    step = _at_once(SERIES_ROWS, query.device)
    for start in range(exact, rows, step):
        part = slice(start, start + step)
        weight = gamma if gamma.shape[3] == 1 else gamma[..., part, :]
        slices = (tensor[..., part, :] for tensor in (query, value, output, weights))
        part_heads, mass, before = _checkpointed(
            heavy.block, *slices, weight, row[part], count[..., part, :], mass, before
        )
        outputs.append(part_heads.flatten(1, 2))
    return torch.cat(outputs, dim=2), _sums(before, mass, values, columns, counts)


def _attention_and_weights(
    heads: SignalHeads, columns: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """``attend``, and the sum of the weights of heavy columns in each row of its maps.

    Args:
        heads: all rows of a text.
        columns: heavy columns, [batch, key_heads, heavy].
        attend: see ``differential_heads``.

    Returns:
        [batch, signal, rows, width] and [batch, signal, rows, 1].
    """
    query, key, value, *_, real = heads
    rows, width = value.shape[2:]
    heavy = value.new_zeros(*columns.shape[:2], rows + 1).scatter_(2, columns, 1)
    heavy = heavy[..., :rows, None]
    if query.device.type != "cpu" and width >= FUSED_WIDTH:
        output, weights = attend(query, key, value), attend(query, key, heavy)
    else:
        output = attend(query, key, torch.cat([value, heavy], -1))
        output, weights = output.split([width, 1], -1)
    if real is not None:  # rows of padding are no rows of the mean
        rows_of_text = real[:, None, :, None].to(output.dtype)
        output, weights = output * rows_of_text, weights * rows_of_text
    return output, weights


class _Heavy(NamedTuple):
    """Heavy columns of a series. Signal heads are [key_heads, group].

    Attributes:
        places: [batch, key_heads, 1, 1, heavy].
        starts: rows from which on their exponentials are exact, likewise.
        keys: times the factor of the scores, [batch, key_heads, 1, head_dim, heavy].
        values: [batch, key_heads, 1, heavy, width].
        by_log_sums: whether the weights of rows are ``log_sums`` of ``_attention_and_log_sums``,
            and not those of ``_attention_and_weights``.
    """

    places: Tensor
    starts: Tensor
    keys: Tensor
    values: Tensor
    by_log_sums: bool

    def masses(self, query: Tensor, weights: Tensor, row: Tensor) -> Tensor:
        """Weights of heavy columns in A₁, [batch, key_heads, group, rows, heavy]."""
        scores = wide(query) @ self.keys
        scores.masked_fill_(row < self.places, torch.finfo(scores.dtype).min)
        return (scores - weights).exp() if self.by_log_sums else scores.softmax(-1) * weights

    def block(
        self,
        query: Tensor,
        value: Tensor,
        output: Tensor,
        weights: Tensor,
        gamma: Tensor,
        row: Tensor,
        count: Tensor,
        mass: Tensor,
        before: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute heads for some rows, and from the sums before these the sums after them.

        The sums are those of heavy columns, [batch, key_heads, group, 1, heavy], and Σ A₁ V and
        Σ V, [batch, key_heads, group, 2, width].
        """
        masses = mass + self.masses(query, weights, row).cumsum(3)
        means = masses / count
        beyond = (torch.expm1(means) - means) * (row >= self.starts)
        weight = gamma / (count + 1 + beyond.sum(-1, keepdim=True))
        ones = torch.ones_like(beyond[..., :1])
        factors = torch.cat([beyond, ones / count, ones], -1)
        values = self.values.expand(-1, -1, before.shape[2], -1, -1)
        integral = factors @ torch.cat([values, before], 3)
        output, value = wide(output), wide(value)
        outputs, sums = output.cumsum(3), value.cumsum(3)
        integral = integral.addcdiv_(outputs, count).add_(sums)
        ends = torch.broadcast_tensors(outputs[..., -1:, :], sums[..., -1:, :])
        after = before + torch.cat(ends, 3)
        return torch.addcmul(output, weight, integral).to(value.dtype), masses[..., -1:, :], after


@torch.no_grad()
def heavy_columns(
    query: Tensor,
    key: Tensor,
    scaling: float,
    counts: Tensor,
    real: Tensor | None,
    sums: Tensor,
) -> tuple[Tensor, Tensor]:
    """Columns whose exponentials a series takes exactly, and the rows from which on.

    They are those that are heavy after the first rows, or become heavy later, by means estimated
    from a few rows of each interval. Intervals end before the rows that use their columns, so that
    no row depends on later ones.

    Args:
        query: see ``SignalHeads``, also for the following.
        key: with as many columns as there are rows.
        scaling: factor of the scores.
        counts: number of columns so far, [batch or 1, rows].
        real: false for padding.
        sums: column sums of the first rows, [batch, signal, first rows].

    Returns:
        Both are [batch, key_heads, heavy], and the number of rows where fewer columns are heavy.
    """
    key_heads, rows, device = key.shape[1], key.shape[2], key.device
    ends = [sums.shape[2]]
    while (end := int(ends[-1] ** INTERVAL_POWER)) < rows:
        ends.append(end)
    last = ends[-1]
    bounds = torch.tensor(ends, device=device)[:, None]
    # Multiples of the golden ratio are spread evenly, but not at a period that a text could have.
    places = torch.arange(1, SAMPLED_ROWS + 1, device=device) * 0.618034 % 1
    sampled = bounds[:-1] + (places * bounds.diff(dim=0)).long()
    every = [functional.pad(sums, (0, last - ends[0]))[:, :, None]]
    step = _at_once(INTERVALS_AT_ONCE, device)
    for first in range(0, len(sampled), step):
        part = slice(first, first + step)
        row, end = sampled[part].flatten(), ends[1:][part][-1]
        visible = (torch.arange(end, device=device) <= row[:, None])[None, None]
        if real is not None:
            visible = visible & real[:, None, None, :end] & real[:, None, row, None]
        maps = _map(query[:, :, row], key[:, :, :end], scaling, visible, real is not None)
        added = maps.unflatten(2, (-1, SAMPLED_ROWS)).mean(3) * bounds.diff(dim=0)[part]
        every.append(functional.pad(added, (0, last - end)))
    means = torch.cat(every, 2).cumsum(2) / counts[:, None, bounds - 1].squeeze(-1)[..., None]
    means = means.unflatten(1, (key_heads, -1)).amax(2)
    # What is found earlier has larger scores; then, what is heavier.
    scores = ((means > HEAVY_MEAN) * (rows - bounds + means / 2)).amax(2)
    scores, columns = scores.topk(min(HEAVY_COLUMNS, last))
    return columns.masked_fill(scores == 0, rows), rows - scores.long()


def _at_once(on_cpu: int, device: torch.device) -> int:
    return on_cpu if device.type == "cpu" else on_cpu * MORE_ON_ACCELERATOR


def _sums(before: Tensor, mass: Tensor, values: Tensor, columns: Tensor, counts: Tensor) -> Sums:
    """Sums after a series.

    Args:
        before: Σ A₁ V and Σ V, [batch, key_heads, group, 2, width].
        mass: column sums of heavy columns, [batch, key_heads, group, 1, heavy].
        values: values of heavy columns, [batch, key_heads, 1, heavy, width].
        columns: heavy columns, [batch, key_heads, heavy].
        counts: number of columns so far, [batch or 1, rows].
    """
    rest = (before[..., :1, :] - mass @ values).detach().flatten(1, 2)[:, :, 0]
    mass = mass.detach().flatten(1, 2)[:, :, 0]
    rows = counts.shape[1]
    of_heads = columns.repeat_interleave(mass.shape[1] // columns.shape[1], dim=1)
    sums = mass.new_zeros(*mass.shape[:2], rows + 1).scatter(-1, of_heads, mass)[..., :rows]
    others = counts[:, None, -1:].to(mass.dtype) - mass.sum(-1, keepdim=True)
    return Sums(sums, torch.cat([rest, others], -1))


class Heads(NamedTuple):
    """Heads before ``combine``, whose arguments these are; the signal may hold the integral."""

    signal: Tensor
    noise: Tensor | None = None
    lambda_: Tensor | None = None
    integral: Tensor | None = None
    gamma: Tensor | None = None


class Projected(NamedTuple):
    """Queries, keys, values and weights of maps, after projection and rotation.

    Attributes:
        query: of the signal heads, then of the noise heads, [batch, signal + noise, rows,
            head_dim].
        key: those of the signal heads, then those of the noise heads, if these have keys of their
            own, [batch, key_heads or 2 · key_heads, columns, head_dim].
        value: [batch, key_heads, columns, width].
        signal: number of signal heads.
        lambda_: see ``combine``; None without noise heads.
        gamma: weight of an integral, [batch or 1, signal or 1, rows or 1, 1].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    signal: int
    lambda_: Tensor | None = None
    gamma: Tensor | None = None

    def parts(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
        """Queries and keys of the signal heads, and those of the noise heads."""
        noise, key_heads = self.query.shape[1] - self.signal, self.value.shape[1]
        # Gradients of a split are joined at once; those of slices would be filled up with zeros.
        queries = self.query.split([self.signal, noise], 1)
        keys = self.key.split(key_heads, 1)
        return (queries[0], keys[0]), (queries[1], keys[-1]) if noise else None

    def map(self, change: Callable[[Tensor], Tensor]) -> Projected:
        """Apply a function to every tensor."""
        changed = (change(value) if isinstance(value, Tensor) else value for value in self)
        return Projected(*changed)  # type: ignore[arg-type]


def differential_heads(
    projected: Projected,
    scaling: float,
    integral: str,
    past: int,
    real: Tensor | None,
    past_sums: Sums | None,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> tuple[Heads, Sums | None]:
    """What (A₁ - λ A₂ + γ H) V is made of, without holding a map in full.

    Args:
        projected: inputs.
        scaling: factor of the scores.
        integral: ``none``, ``causal``, ``series`` (the causal one, of a whole text) or
            ``column_mean``; or of a whole text in kernels, ``fused`` (none) or ``tiles`` (causal).
        past: see ``SignalHeads``.
        real: see ``SignalHeads``.
        past_sums: see ``causal_integral``.
        attend: computes softmax attention from queries, keys and values.

    Returns:
        The parts of the heads, and the sums of a causal integral.
    """
    (query, key), noise_parts = projected.parts()
    value, lambda_, gamma = projected.value, projected.lambda_, projected.gamma
    added = sums = None
    if integral in IN_KERNELS:
        from .triton_kernels import HeadInputs, attention_of_heads

        assert past_sums is None
        inputs = HeadInputs(*projected[:4], scaling, real)
        attended = attention_of_heads(inputs, integral=integral == "tiles")
        added = attended.integral
        sums = None if attended.sums is None else Sums(attended.sums.detach())
        return Heads(attended.signal, attended.noise, lambda_, added, gamma), sums
    if integral == "none":
        signal = attend(query, key, value)
    else:
        assert gamma is not None
        # Graphs would unroll its loops, and again for every length.
        run = _looped if torch.compiler.is_compiling() else _loop
        before: Any = past_sums or (None, None)
        of_signal = SignalHeads(query, key, value, gamma, scaling, past, real)
        heads, columns, rest = run(*of_signal, *before, integral)
        if integral == "column_mean":
            signal = attend(query, key, value)
            added = values_of(heads[:, :, None], value).expand_as(signal)
        else:
            signal, sums = heads, Sums(columns, rest if rest.numel() else None)
    noise = None if noise_parts is None else attend(*noise_parts, value)
    return Heads(signal, noise, lambda_, added, gamma), sums


def _loop(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Heads and sums of a causal integral or of its series, or a column mean and nothing else.

    The inputs are those of ``_LOOP``: signal heads, the sums over earlier rows, and the integral.
    """
    *arguments, columns, rest, integral = inputs
    of_signal = SignalHeads(*arguments)
    (query, key, *_, scaling, past, real), nothing = of_signal, of_signal.query.new_empty(0)
    if integral == "column_mean":
        return column_mean(query, key, scaling, real), nothing, nothing.clone()
    if integral == "series":
        attend = partial(fused_attention, scaling=scaling, past=past, real=real)
        heads, sums = integral_series(of_signal, attend)
    else:
        heads, sums = causal_integral(of_signal, None if columns is None else Sums(columns, rest))
    return heads, sums.columns, nothing if sums.rest is None else sums.rest.clone()


_SPACE = re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", __name__, flags=re.ASCII)
"""Of operations, which copies of this file do not share; a folder's name may have any letters."""


_LOOP = (
    "Tensor query, Tensor key, Tensor value, Tensor gamma, float scaling, SymInt past, "
    "Tensor? real, Tensor? columns, Tensor? rest, str integral"
)
"""The arguments of ``_loop``, in the notation of torch."""


@torch.library.custom_op(
    f"{_SPACE}::looped", mutates_args=(), schema=f"({_LOOP}) -> (Tensor, Tensor, Tensor)"
)
def _looped(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``_loop`` as an operation of graphs, which computes it again for gradients."""
    with torch.no_grad():
        return _loop(*inputs)


@_looped.register_fake
def _(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    query, _, value, _, _, past, _, _, rest, integral = inputs
    (batch, signal, rows), width = query.shape[:3], value.shape[3]
    nothing, numbers = query.new_empty(0), wide(query.new_empty(0))
    if integral == "column_mean":
        return numbers.new_empty(batch, signal, rows), nothing, nothing.clone()
    has_rest = integral == "series" or rest is not None
    return (
        value.new_empty(batch, signal, rows, width),
        numbers.new_empty(batch, signal, past + rows),
        numbers.new_empty(batch, signal, width + 1) if has_rest else nothing,
    )


@torch.library.custom_op(
    f"{_SPACE}::looped_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, {_LOOP}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _looped_backward(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    """Gradients of queries, keys, values and γ; operations run below autograd otherwise."""
    key_of_autograd = torch._C.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key_of_autograd, False):
        tensors = [tensor.detach().requires_grad_() for tensor in inputs[:4]]
        heads = _loop(*tensors, *inputs[4:])[0]
        gradients = torch.autograd.grad(heads, tensors, gradient, materialize_grads=True)
    return tuple(tensor.contiguous() for tensor in gradients)


@_looped_backward.register_fake
def _(gradient: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in inputs[:4])


def _keep_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.scaling, ctx.past, real, columns, rest, ctx.integral = inputs
    ctx.save_for_backward(*tensors, real, columns, rest)


def _gradients_of_loop(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    *tensors, real, columns, rest = ctx.saved_tensors
    others = ctx.scaling, ctx.past, real, columns, rest, ctx.integral
    return *_looped_backward(gradient, *tensors, *others), *(None,) * 6


_looped.register_autograd(_gradients_of_loop, setup_context=_keep_inputs)


def differential_maps(
    projected: Projected, scaling: float, integral: str, visible: Tensor, past_sums: Sums | None
) -> tuple[Tensor, Tensor | None, Sums]:
    """A₁ - λ A₂ + γ H in full, without a loop.

    Args:
        projected: inputs.
        scaling: factor of the scores.
        integral: ``none``, ``causal`` or ``column_mean``.
        visible: [batch or 1, 1, rows, columns], true for visible columns. The means leave out rows
            that see nothing.
        past_sums: see ``causal_integral``; padded with zeros to all columns.

    Returns:
        The maps, [batch, signal, rows, columns]; what a rest of earlier rows adds to the heads,
        [batch, signal, rows, width], or None; and the sums after the last row.
    """
    signal_parts, noise_parts = projected.parts()
    maps = _map(*signal_parts, scaling, visible, blind=True)
    sums, rest, gamma = maps.sum(-2), None, projected.gamma
    added = beyond = noise = None
    if integral == "causal":
        assert gamma is not None
        running = maps.cumsum(-2)
        if past_sums is not None:
            before, rest = past_sums
            before = functional.pad(before, (0, maps.shape[-1] - before.shape[-1]))
            sums, running = sums + before, running + before[..., None, :]
        counts = visible.sum(-1, keepdim=True).clamp_min(1)
        weights, beyond = _integral(running / counts, visible, True, counts, rest)
        added, beyond = weights, None if beyond is None else gamma * beyond
    elif integral == "column_mean":
        assert gamma is not None
        text = visible | visible.transpose(-1, -2)  # all tokens of the row's own text
        means = maps.sum(-2, keepdim=True) / text.sum(-1, keepdim=True).clamp_min(1)
        added = means * text
    if noise_parts is not None:
        noise = _map(*noise_parts, scaling, visible, blind=True)
    return combine(maps, noise, projected.lambda_, added, gamma), beyond, Sums(sums, rest)


def values_of(maps: Tensor, value: Tensor) -> Tensor:
    """[batch, signal, rows, columns] @ [batch, key_heads, columns, width], in float32 or wider."""
    return _grouped_matmul(wide(maps), wide(value))


def outputs_of(columns: Tensor, value: Tensor) -> Tensor:
    """Σ of some columns times V, and Σ of them, [batch, signal, width + 1].

    Args:
        columns: a number for each column, [batch, signal, columns].
        value: [batch, key_heads, columns, width].
    """
    output = values_of(columns[:, :, None], value)[:, :, 0]
    return torch.cat([output, columns.sum(-1, keepdim=True)], -1)


def column_sums(
    query: Tensor, key: Tensor, scaling: float, past: int, real: Tensor | None
) -> Tensor:
    """Column sums of a few rows of a signal map, [batch, signal, past + rows].

    Args:
        query: [batch, signal, rows, head_dim].
        key: [batch, key_heads, columns, head_dim]; the first past + rows are read.
        scaling: factor of the scores.
        past: number of columns before the first row.
        real: [batch, columns], false for padding; None if there is none.
    """
    last = past + query.shape[2]
    visible = _causal_mask(past, last, real, query.device)
    return _map(query, key[:, :, :last], scaling, visible, real is not None).sum(-2)


def column_mean(query: Tensor, key: Tensor, scaling: float, real: Tensor | None) -> Tensor:
    """Mean of all rows of A₁ (DINT as first published, eq. 5). Not causal.

    Args:
        query: of the signal heads, [batch, signal, rows, head_dim].
        key: [batch, key_heads, rows, head_dim].
        scaling: factor of the scores.
        real: [batch, rows], false for padding, which is left out; None if there is none.

    Returns:
        [batch, signal, rows], in float32 or wider.
    """
    rows = query.shape[2]
    sums = wide(query.new_zeros(*query.shape[:2], rows))
    for first, last in _blocks(rows):
        block = _checkpointed(column_sums, query[:, :, first:last], key, scaling, first, real)
        sums = sums + functional.pad(block, (0, rows - last))
    if real is None:
        return sums / rows
    return sums / wide(real.sum(-1))[:, None, None].clamp_min(1).to(sums.dtype)


def _checkpointed(function: Callable[..., Any], *arguments: Any) -> Any:
    """Compute a block of rows, and compute it again in the backward pass.

    No map outlives its block: only the arguments are kept for the backward pass.
    """
    if not torch.is_grad_enabled():
        return function(*arguments)
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def _map(query: Tensor, key: Tensor, scaling: float, visible: Tensor, blind: bool) -> Tensor:
    """softmax(Q Kᵀ · scaling) over visible columns, in float32 or wider."""
    # Widened before the product, as in fused kernels: a score rounded to bfloat16 is far off.
    scores = _grouped_matmul(wide(query) * scaling, wide(key).transpose(-1, -2))
    return _masked_softmax(scores, visible, blind)


def _masked_softmax(scores: Tensor, visible: Tensor, blind: bool) -> Tensor:
    """Softmax over visible columns, 0 elsewhere; overwrites the scores.

    Args:
        scores: [batch, heads, rows, columns].
        visible: [batch or 1, 1, rows, columns], true for visible columns.
        blind: whether some rows may see nothing; they are 0 then.
    """
    hidden = ~visible
    # Added, not filled in, since the gradient of a sum is free; the sum rounds to this addend.
    lowest = torch.zeros_like(hidden, dtype=scores.dtype).masked_fill_(
        hidden, torch.finfo(scores.dtype).min
    )
    probabilities = scores.add_(lowest).softmax(-1)
    return probabilities.masked_fill(hidden, 0) if blind else probabilities


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    """Start and end (exclusive) of every block of rows."""
    for first in range(0, rows, BLOCK_ROWS):
        yield first, min(first + BLOCK_ROWS, rows)


def _causal_mask(first: int, last: int, real: Tensor | None, device: torch.device) -> Tensor:
    """Causal mask of a block of tokens; padding neither sees nor is seen.

    Args:
        first: index of the first token of the block.
        last: index of the token after the block.
        real: [batch, all tokens], false for padding; None if there is none.
        device: device of the mask.

    Returns:
        [batch or 1, 1, last - first, last], true for visible columns.
    """
    columns = torch.arange(last, device=device)
    visible = (columns <= columns[first:, None])[None, None]
    if real is None:
        return visible
    return visible & real[:, None, None, :last] & real[:, None, first:last, None]


def _grouped_matmul(left: Tensor, right: Tensor) -> Tensor:
    """[batch, heads, rows, n] @ [batch, key_heads, n, m]; a group of heads shares a right side."""
    batch, heads, rows, inner = left.shape
    key_heads = right.shape[1]
    if torch.compiler.is_exporting():  # which cannot prove the folded shape for all lengths
        return left @ right.repeat_interleave(heads // key_heads, dim=1)
    folded = left.reshape(batch, key_heads, heads // key_heads * rows, inner)
    return (folded @ right).view(batch, heads, rows, right.shape[3])


def combine(
    signal: Tensor,
    noise: Tensor | None,
    lambda_: Tensor | None,
    integral: Tensor | None,
    gamma: Tensor | None,
) -> Tensor:
    """Signal heads minus λ times the noise head of their group, plus γ times the integral.

    Args:
        signal: [batch, signal, rows, width].
        noise: [batch, noise, rows, width]; head i belongs to noise head ⌊i · noise / signal⌋.
        lambda_: a scalar, or [batch, signal, rows, 1]; None without noise.
        integral: broadcastable to the signal; None for nothing.
        gamma: like ``lambda_``; not read without an integral.

    Returns:
        [batch, signal, rows, width], in float32 or wider.
    """
    heads = wide(signal)
    if noise is not None:
        assert lambda_ is not None
        heads = heads - lambda_ * wide(noise).repeat_interleave(
            signal.shape[1] // noise.shape[1], dim=1
        )
    if integral is None:
        return heads
    assert gamma is not None
    return heads + gamma * wide(integral)


def head_norm(heads: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm of each head by itself.

    Args:
        heads: [..., width], in float32 or wider.
        weight: [width], shared by the heads; None for no weight.
        eps: added to the mean square.
    """
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    return normed if weight is None else normed * wide(weight)
