"""Differential attention on GPUs: kernels in Triton around torch's fused attention.

Other files import this one only where it can run. The kernels do what
``differential_attention`` describes, and what they round to is stated there; sums and products are
in float32. Rows, columns and shapes are named as there.

The integral needs no map either. With G[n] the mean of rows 1 to n of A₁, and r = exp(G) - 1 - G,
row n is

    softmax(G) V = (Σ V[j] + (1/n) Σ (A₁V)[m] + Σ r[j] V[j]) / (n + 1 + Σ r[j]),  j, m ≤ n

The first two sums are running sums of rows. A map is cut into tiles of ``TILE`` × ``TILE``. From
the logarithms that fused attention returns, one kernel adds up the columns of A₁ block by block,
which bounds G in every tile. Σ r ≤ (e - 2) Σ G² in a row of a tile; tiles in which this is at most
a 64th of the dtype's spacing count as 0, all others are computed.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .seen_tokens import hide_padding

try:  # outside of it, transformers would require Triton of everyone who has this file
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the kernels need Triton, and are imported only where it is") from error

TILE = 64
"""Rows and columns of a tile."""

TOLERANCE = 1 / 64
"""Sum of r in a row of a tile, in units of the dtype's spacing, up to which r counts as 0."""

CHUNK = 128
"""Coordinates of a value head that a program takes at a time."""


def _strides(tensor: Tensor) -> tuple[int, int, int]:
    assert tensor.stride(3) == 1
    batch, head, row, _ = tensor.stride()
    return batch, head, row


def _dense(tensor: Tensor) -> Tensor:
    """The tensor, with the coordinates of a head next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _joined(signal: Tensor, noise: Tensor) -> Tensor | None:
    """Heads of both, [batch, signal + noise, rows, width]; None if they lie elsewhere in memory."""
    batch, heads, rows, width = signal.shape
    follows = (
        signal.stride() == noise.stride()
        and signal.untyped_storage().data_ptr() == noise.untyped_storage().data_ptr()
        and noise.storage_offset() == signal.storage_offset() + heads * signal.stride(1)
    )
    if not follows:
        return None
    shape = batch, heads + noise.shape[1], rows, width
    return signal.as_strided(shape, signal.stride(), signal.storage_offset())


class _Context:
    """Of a function without gradients, which keeps nothing."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Nothing, as the following."""

    mark_non_differentiable = set_materialize_grads = save_for_backward


def _run(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """Call a function; without gradients at once, which takes less time."""
    if torch.is_grad_enabled():
        return function.apply(*inputs)
    return function.forward(_Context(), *inputs)


@triton.jit
def _load(place, n, w, stride, seen, WIDTH: tl.constexpr):
    """Rows n of a head, [rows, coordinates w]; 0 in rows that are not seen, and past the width."""
    inside = seen[:, None] & (w < WIDTH)[None, :]
    return tl.load(place + n[:, None].to(tl.int64) * stride + w[None, :], inside, 0.0)


@triton.jit
def _store(place, n, w, stride, seen, x, WIDTH: tl.constexpr):
    """Write rows n of a head; see ``_load``."""
    inside = seen[:, None] & (w < WIDTH)[None, :]
    to = place + n[:, None].to(tl.int64) * stride + w[None, :]
    tl.store(to, x.to(place.dtype.element_ty), inside)


@triton.jit
def _add(place, n, w, seen, x, WIDTH: tl.constexpr):
    """Add to rows n of a head, which follow each other; see ``_load``."""
    inside = seen[:, None] & (w < WIDTH)[None, :]
    to = place + n[:, None].to(tl.int64) * WIDTH + w[None, :]
    tl.atomic_add(to, x, inside, sem="relaxed")


# --- Rotation -------------------------------------------------------------------------------------


@triton.jit
def _rotate_rows(place, stride, to, to_stride, n, d, c, s, seen, HALF: tl.constexpr):
    """Rotate rows of a head, whose halves are the coordinates of the rotations."""
    first = _load(place, n, d, stride, seen, HALF).to(tl.float32)
    second = _load(place + HALF, n, d, stride, seen, HALF).to(tl.float32)
    _store(to, n, d, to_stride, seen, first * c - second * s, HALF)
    _store(to + HALF, n, d, to_stride, seen, second * c + first * s, HALF)


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, out, key_out, rows, heads, key_heads,
    q_b, q_h, q_n, k_b, k_h, k_n, cos_b, cos_n, sin_b, sin_n,
    SIGN: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    every, seen = heads + key_heads, n < rows
    b, h = (tl.program_id(1) // every).to(tl.int64), tl.program_id(1) % every
    c = _load(cos + b * cos_b, n, d, cos_n, seen, HALF).to(tl.float32)
    s = _load(sin + b * sin_b, n, d, sin_n, seen, HALF).to(tl.float32) * SIGN
    if h < heads:
        place, to = query + b * q_b + h * q_h, out + (b * rows * heads + h) * (2 * HALF)
        _rotate_rows(place, q_n, to, heads * (2 * HALF), n, d, c, s, seen, HALF)
    else:
        h -= heads
        place, to = key + b * k_b + h * k_h, key_out + (b * rows * key_heads + h) * (2 * HALF)
        _rotate_rows(place, k_n, to, key_heads * (2 * HALF), n, d, c, s, seen, HALF)


def _rotate(
    query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, sign: float
) -> tuple[Tensor, Tensor]:
    query, key, cos, sin = (_dense(tensor) for tensor in (query, key, cos, sin))
    batch, heads, rows, width = query.shape
    out = query.new_empty(batch, rows, heads, width)
    key_out = query.new_empty(batch, rows, key.shape[1], width)
    of_angles = [s for e in (cos, sin) for s in (e.stride(0) * (len(e) > 1), e.stride(1))]
    block = min(32, triton.next_power_of_2(rows))
    _rotate_kernel[triton.cdiv(rows, block), batch * (heads + key.shape[1])](
        query, key, cos, sin, out, key_out, rows, heads, key.shape[1],
        *_strides(query), *_strides(key), *of_angles,
        SIGN=sign, HALF=width // 2, PADDED=triton.next_power_of_2(width // 2), ROWS=block,
    )  # fmt: skip
    return out.transpose(1, 2), key_out.transpose(1, 2)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotate(query, key, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(*gradients, *ctx.saved_tensors, -1.0), None, None


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotary embedding of queries and keys, whose halves are the coordinates of the rotations.

    Args:
        query: [batch, heads, rows, head_dim].
        key: [batch, key_heads, rows, head_dim].
        cos: [batch or 1, rows, head_dim]; both halves are the same. No gradients flow into it.
        sin: like ``cos``.
    """
    rotated: tuple[Tensor, Tensor] = _run(_Rotation, query, key, cos, sin)
    return rotated


# --- λ --------------------------------------------------------------------------------------------


@triton.jit
def _lambda_kernel(q1, k1, q2, k2, out, initial, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    inside = d < WIDTH
    first = tl.load(q1 + d, inside, 0.0).to(tl.float32) * tl.load(k1 + d, inside, 0.0)
    second = tl.load(q2 + d, inside, 0.0).to(tl.float32) * tl.load(k2 + d, inside, 0.0)
    tl.store(out, tl.exp(tl.sum(first, 0)) - tl.exp(tl.sum(second, 0)) + initial)


@triton.jit
def _store_gradients(query, key, by, out, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Gradients of two vectors of λ, of whose exponential ``by`` is the gradient."""
    d = tl.arange(0, PADDED)
    inside = d < WIDTH
    q = tl.load(query + d, inside, 0.0).to(tl.float32)
    k = tl.load(key + d, inside, 0.0).to(tl.float32)
    factor = by * tl.exp(tl.sum(q * k, 0))
    tl.store(out + d, (factor * k).to(out.dtype.element_ty), inside)
    tl.store(out + WIDTH + d, (factor * q).to(out.dtype.element_ty), inside)


@triton.jit
def _lambda_backward_kernel(
    q1, k1, q2, k2, gradient, out, WIDTH: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    by = tl.load(gradient).to(tl.float32)
    _store_gradients(q1, k1, by, out, WIDTH, PADDED)
    _store_gradients(q2, k2, -by, out + 2 * WIDTH, WIDTH, PADDED)


class _Lambda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *vectors, initial = inputs
        ctx.save_for_backward(*vectors)
        out: Tensor = vectors[0].new_empty(1, 1, 1, 1, dtype=torch.float32)
        width = len(vectors[0])
        _lambda_kernel[(1,)](
            *vectors, out, initial, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=1
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        vectors = ctx.saved_tensors
        width = len(vectors[0])
        out = vectors[0].new_empty(4, width)
        _lambda_backward_kernel[(1,)](
            *vectors, gradients[0], out, WIDTH=width, PADDED=triton.next_power_of_2(width),
            num_warps=1,
        )  # fmt: skip
        return *out.unbind(), None


def lambda_in_kernel(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, initial: float
) -> Tensor:
    """λ of a layer, as in ``differential_attention``, [1, 1, 1, 1]."""
    out: Tensor = _run(_Lambda, lambda_q1, lambda_k1, lambda_q2, lambda_k2, initial)
    return out


# --- Difference, norm and scale -------------------------------------------------------------------


@triton.jit
def _combine_kernel(
    signal, noise, integral, lambda_, gamma, weight, out, rows, heads, eps, scale,
    s_b, s_h, s_n, n_b, n_h, n_n, i_b, i_h, i_n, l_b, l_h, l_n, g_b, g_h, g_n,
    NOISE: tl.constexpr, INTEGRAL: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    w, seen = tl.arange(0, PADDED), n < rows
    x = _load(signal + b * s_b + h * s_h, n, w, s_n, seen, WIDTH).to(tl.float32)
    if NOISE:
        by = tl.load(lambda_ + b * l_b + h * l_h + n * l_n, seen, 0.0).to(tl.float32)
        other = _load(noise + b * n_b + (h // GROUP) * n_h, n, w, n_n, seen, WIDTH)
        x -= by[:, None] * other.to(tl.float32)
    if INTEGRAL:
        by = tl.load(gamma + b * g_b + h * g_h + n * g_n, seen, 0.0).to(tl.float32)
        added = _load(integral + b * i_b + h * i_h, n, w, i_n, seen, WIDTH)
        x += by[:, None] * added.to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    if WEIGHT:
        x *= tl.load(weight + w, w < WIDTH, 0.0).to(tl.float32)[None, :]
    _store(out + h * WIDTH, b * rows + n, w, heads * WIDTH, seen, x * scale, WIDTH)


@triton.jit
def _combine_backward_kernel(
    signal, noise, integral, lambda_, gamma, weight, gradient,
    d_signal, d_noise, d_integral, d_lambda, d_gamma, d_weight, rows, heads, eps, scale,
    s_b, s_h, s_n, n_b, n_h, n_n, i_b, i_h, i_n, l_b, l_h, l_n, g_b, g_h, g_n,
    ds_b, ds_h, ds_n, dn_b, dn_h, dn_n, di_b, di_h, di_n,
    NOISE: tl.constexpr, INTEGRAL: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = (tl.program_id(1) // (heads // GROUP)).to(tl.int64)
    k = tl.program_id(1) % (heads // GROUP)
    w, seen = tl.arange(0, PADDED), n < rows
    other = tl.zeros([ROWS, PADDED], tl.float32)
    d_other = tl.zeros([ROWS, PADDED], tl.float32)
    of_weight = tl.zeros([PADDED], tl.float32)
    factor = tl.full([PADDED], 1.0, tl.float32)
    if NOISE:
        other = _load(noise + b * n_b + k * n_h, n, w, n_n, seen, WIDTH).to(tl.float32)
    if WEIGHT:
        factor = tl.load(weight + w, w < WIDTH, 0.0).to(tl.float32)
    for member in range(GROUP):
        h = k * GROUP + member
        x = _load(signal + b * s_b + h * s_h, n, w, s_n, seen, WIDTH).to(tl.float32)
        by_noise = tl.zeros([ROWS], tl.float32)
        by_integral = tl.zeros([ROWS], tl.float32)
        added = tl.zeros([ROWS, PADDED], tl.float32)
        if NOISE:
            by_noise = tl.load(lambda_ + b * l_b + h * l_h + n * l_n, seen, 0.0).to(tl.float32)
            x -= by_noise[:, None] * other
        if INTEGRAL:
            by_integral = tl.load(gamma + b * g_b + h * g_h + n * g_n, seen, 0.0).to(tl.float32)
            added = _load(integral + b * i_b + h * i_h, n, w, i_n, seen, WIDTH).to(tl.float32)
            x += by_integral[:, None] * added
        dy = _load(gradient + h * WIDTH, b * rows + n, w, heads * WIDTH, seen, WIDTH)
        dy = dy.to(tl.float32) * scale
        if NORM:
            root = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
            normed = x * root
            of_weight += tl.sum(dy * normed, 0)
            dy *= factor[None, :]
            dy = root * (dy - normed * (tl.sum(dy * normed, 1) / WIDTH)[:, None])
        _store(d_signal + b * ds_b + h * ds_h, n, w, ds_n, seen, dy, WIDTH)
        row = (b * heads + h) * rows + n
        if NOISE:
            d_other -= by_noise[:, None] * dy
            tl.store(d_lambda + row, -tl.sum(dy * other, 1), seen)
        if INTEGRAL:
            tl.store(d_gamma + row, tl.sum(dy * added, 1), seen)
            dy *= by_integral[:, None]
            _store(d_integral + b * di_b + h * di_h, n, w, di_n, seen, dy, WIDTH)
    if NOISE:
        _store(d_noise + b * dn_b + k * dn_h, n, w, dn_n, seen, d_other, WIDTH)
    if WEIGHT:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(d_weight + program * WIDTH + w, of_weight, w < WIDTH)


class _Combination(torch.autograd.Function):
    """See ``combine_in_kernel``; what is missing is the signal, and not read."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        signal, noise, lambda_, integral, gamma, weight, (eps, norm, scale), dtype = inputs
        batch, heads, rows, width = signal.shape
        parts = [
            _dense(signal if tensor is None else tensor) for tensor in (signal, noise, integral)
        ]
        weights = [signal.new_ones(1, 1, 1, 1) if by is None else by for by in (lambda_, gamma)]
        of_rows = [by.expand(batch, heads, rows, 1).stride()[:3] for by in weights]
        ctx.block = max(1, min(16, 8192 // triton.next_power_of_2(width)))
        ctx.options = {
            "NOISE": noise is not None,
            "INTEGRAL": integral is not None,
            "NORM": norm,
            "WEIGHT": weight is not None,
            "GROUP": heads // (heads if noise is None else noise.shape[1]),
            "WIDTH": width,
            "PADDED": triton.next_power_of_2(width),
            "ROWS": ctx.block,
        }
        ctx.numbers, ctx.shapes = (rows, heads, eps, scale), [by.shape for by in weights]
        ctx.strides = [s for part in parts for s in _strides(part)] + [
            s for o in of_rows for s in o
        ]
        weight = signal if weight is None else weight
        ctx.save_for_backward(*parts, *weights, weight)
        out: Tensor = signal.new_empty(batch, rows, heads * width, dtype=dtype)
        _combine_kernel[triton.cdiv(rows, ctx.block), batch * heads](
            *parts, *weights, weight, out, *ctx.numbers, *ctx.strides, **ctx.options
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *parts, lambda_, gamma, weight = ctx.saved_tensors
        signal, (rows, heads) = parts[0], ctx.numbers[:2]
        batch, options = len(signal), ctx.options
        outputs = [_dense(torch.empty_like(part)) for part in parts]
        both = _joined(*parts[:2]) if options["NOISE"] else None
        if both is not None:
            outputs[:2] = torch.empty_like(both).split([heads, parts[1].shape[1]], 1)
        grid = triton.cdiv(rows, ctx.block), batch * heads // options["GROUP"]
        of_rows = signal.new_empty(2, batch, heads, rows, 1, dtype=torch.float32)
        of_weight = signal.new_empty(*grid, options["WIDTH"], dtype=torch.float32)
        _combine_backward_kernel[grid](
            *parts, lambda_, gamma, weight, gradients[0].contiguous(),
            *outputs, *of_rows, of_weight, *ctx.numbers, *ctx.strides,
            *(s for gradient in outputs for s in _strides(gradient)), **options,
        )  # fmt: skip

        def of(row: int, weight: Tensor) -> Tensor:
            summed: Tensor = of_rows[row].sum_to_size(ctx.shapes[row])
            return summed.to(weight.dtype)

        return (
            outputs[0],
            *((outputs[1], of(0, lambda_)) if options["NOISE"] else (None, None)),
            *((outputs[2], of(1, gamma)) if options["INTEGRAL"] else (None, None)),
            of_weight.flatten(0, 1).sum(0).to(weight.dtype) if options["WEIGHT"] else None,
            *(None,) * 2,
        )


class HeadNorm(NamedTuple):
    """What is done to heads after their difference.

    Attributes:
        weight: of the norm, [width]; None for none.
        eps: added to the mean square.
        norm: whether the heads are divided by the root of their mean square.
        scale: factor of the heads.
    """

    weight: Tensor | None
    eps: float
    norm: bool
    scale: float


def combine_in_kernel(heads: Sequence[Tensor | None], norm: HeadNorm, dtype: torch.dtype) -> Tensor:
    """norm(signal - λ noise + γ integral) · weight · scale, head by head, in one pass.

    Args:
        heads: see ``differential_attention.Heads``.
        norm: norm and scale.
        dtype: of the result.

    Returns:
        [batch, rows, signal · width].
    """
    out: Tensor = _run(_Combination, *heads, norm.weight, norm[1:], dtype)
    return out


# --- Integral -------------------------------------------------------------------------------------


@triton.jit
def _tile(
    query, key, real, log_sums, n, j, rows, scale, q_n, k_n,
    PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Queries [rows, d], keys [columns, d] and A₁ [rows, columns] of a tile, 0 where hidden."""
    d = tl.arange(0, PADDED)
    q, k = _load(query, n, d, q_n, n < rows, WIDTH), _load(key, j, d, k_n, j < rows, WIDTH)
    log_sum = tl.load(log_sums + n, n < rows, 0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - log_sum[:, None]
    visible = (n[:, None] >= j[None, :]) & (n < rows)[:, None]
    if PADDING:
        visible &= tl.load(real + n, n < rows, 0)[:, None] != 0
        visible &= tl.load(real + j, j < rows, 0)[None, :] != 0
    return q, k, tl.where(visible, tl.exp(scores), 0.0), visible


@triton.jit
def _excess(g, visible):
    """exp(G) - 1 - G and its derivative, exp(G) - 1, 0 where hidden."""
    near = g * g * (0.5 + g * (0.16666666666666666 + g * 0.041666666666666664))
    r = tl.where(visible, tl.where(g < 0.02, near, tl.exp(g) - 1 - g), 0.0)
    return r, tl.where(visible, r + g, 0.0)


@triton.jit
def _count(counts, n, rows, PADDING: tl.constexpr):
    """Number of columns that rows see, at least 1."""
    count = (n + 1) * 1.0
    if PADDING:
        count = tl.load(counts + n, n < rows, 1.0)
    return count


@triton.jit
def _add_columns(
    query, k, real, log_sums, counts, before, bounds, running, latest, of_column, j, rows, place,
    column, block, blocks, scale, tolerance, q_n,
    DIAGONAL: tl.constexpr, PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Sums of columns after a tile, and the last block of rows that counts so far."""
    n = block * TILE + tl.arange(0, TILE)
    q = _load(query, n, tl.arange(0, PADDED), q_n, n < rows, WIDTH)
    log_sum = tl.load(log_sums + n, n < rows, float("inf"))
    if PADDING:
        of_row = tl.load(real + n, n < rows, 0) != 0
        log_sum = tl.where(of_row, log_sum, float("inf"))
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    p = tl.exp2(scores * (scale * 1.4426950408889634) - (log_sum * 1.4426950408889634)[None, :])
    if DIAGONAL:
        p = tl.where(n[None, :] >= j[:, None], p, 0.0)
    after = running + tl.where(of_column, tl.sum(p, 1), 0.0)
    mean = after / _count(counts, block * TILE, rows, PADDING)
    bound = 0.7182818284590452 * tl.sum(mean * mean)
    tl.store(bounds + (place + block) * blocks + column, bound)
    if bound > tolerance:
        tl.store(before + (place + block) * blocks * TILE + j, running)
        latest = block
    return after, latest


@triton.jit
def _columns_kernel(
    query, key, value, output, real, counts, log_sums, before, bounds, last, sums, block_sums,
    rows, heads, scale, tolerance, q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    GROUP: tl.constexpr, PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Columns of a tile, from the diagonal down: their sums before every block of rows.

    On the way, values and A₁V of the tile's rows are summed up.
    """
    column, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    b, h = head // heads, head % heads
    j = column * TILE + tl.arange(0, TILE)
    of_rows = j < rows
    if PADDING:
        of_rows &= tl.load(real + b * rows + j, j < rows, 0) != 0
    for first in range(0, VALUE_WIDTH, CHUNK):
        w = first + tl.arange(0, CHUNK)
        place = b * (heads + heads // GROUP) + h
        x = _load(output + b * o_b + h * o_h, j, w, o_n, of_rows, VALUE_WIDTH).to(tl.float32)
        to = block_sums + (place * blocks + column) * VALUE_WIDTH + w
        tl.store(to, tl.sum(x, 0), w < VALUE_WIDTH)
        if h % GROUP == 0:
            of_key = h // GROUP
            place += heads + of_key - h
            v = _load(value + b * v_b + of_key * v_h, j, w, v_n, of_rows, VALUE_WIDTH)
            to = block_sums + (place * blocks + column) * VALUE_WIDTH + w
            tl.store(to, tl.sum(v.to(tl.float32), 0), w < VALUE_WIDTH)
    query += b * q_b + h * q_h
    key += b * k_b + (h // GROUP) * k_h
    k = _load(key, j, tl.arange(0, PADDED), k_n, j < rows, WIDTH)
    running = tl.zeros([TILE], tl.float32)
    latest = column - 1
    for block in range(column, column + 1):  # the tile of the diagonal, then those below it
        running, latest = _add_columns(
            query, k, real + b * rows, log_sums + head * rows, counts + b * rows, before, bounds,
            running, latest, of_rows, j, rows, head * blocks, column, block, blocks, scale,
            tolerance, q_n, True, PADDING, WIDTH, PADDED, TILE,
        )  # fmt: skip
    for block in range(column + 1, blocks):
        running, latest = _add_columns(
            query, k, real + b * rows, log_sums + head * rows, counts + b * rows, before, bounds,
            running, latest, of_rows, j, rows, head * blocks, column, block, blocks, scale,
            tolerance, q_n, False, PADDING, WIDTH, PADDED, TILE,
        )  # fmt: skip
    tl.store(last + head * blocks + column, latest)
    tl.store(sums + head * rows + j, running, j < rows)


@triton.jit
def _running_kernel(
    x, blocks, WIDTH: tl.constexpr, CHUNK: tl.constexpr, AT_ONCE: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """Replace each row by the sum of all rows before it, or after it."""
    head, w = tl.program_id(0).to(tl.int64), tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    carried = tl.zeros([CHUNK], tl.float32)
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        inside = (block < blocks)[:, None] & (w < WIDTH)[None, :]
        if REVERSE:
            block = blocks - 1 - block
        place = x + (head * blocks + block[:, None]) * WIDTH + w[None, :]
        part = tl.load(place, inside, 0.0)
        tl.store(place, carried[None, :] + tl.cumsum(part, 0) - part, inside)
        carried += tl.sum(part, 0)


@triton.jit
def _integral_kernel(
    query, key, value, output, real, counts, log_sums, before, bounds, block_sums,
    out, totals, errors, rows, heads, scale, tolerance,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, i_b, i_h, i_n,
    GROUP: tl.constexpr, PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A block of rows of the integral."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    b, h = head // heads, head % heads
    of_key = h // GROUP
    n = block * TILE + tl.arange(0, TILE)
    w = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    query += b * q_b + h * q_h
    key += b * k_b + of_key * k_h
    value += b * v_b + of_key * v_h
    output += b * o_b + h * o_h
    real += b * rows
    log_sums += head * rows
    counts += b * rows
    count = _count(counts, n, rows, PADDING)
    beyond = tl.zeros([TILE, CHUNK], tl.float32)
    total = count + 1
    error = 0.0
    place = head * blocks + block
    for first in range(0, block + 1, AT_ONCE):
        columns = first + tl.arange(0, AT_ONCE)
        of_columns = tl.load(bounds + place * blocks + columns, columns <= block, 0.0)
        error += tl.sum(tl.where(of_columns > tolerance, 0.0, of_columns))
        if tl.max(of_columns) > tolerance:
            for column in range(first, min(first + AT_ONCE, block + 1)):
                if tl.load(bounds + place * blocks + column) > tolerance:
                    j = column * TILE + tl.arange(0, TILE)
                    _, _, p, visible = _tile(
                        query, key, real, log_sums, n, j, rows, scale, q_n, k_n,
                        PADDING, WIDTH, PADDED,
                    )  # fmt: skip
                    running = tl.load(before + place * blocks * TILE + j)
                    r, _ = _excess((running[None, :] + tl.cumsum(p, 0)) / count[:, None], visible)
                    v = _load(value, j, w, v_n, j < rows, VALUE_WIDTH)
                    beyond += tl.dot(r.to(v.dtype), v, input_precision="ieee")
                    total += tl.sum(r, 1)
    seen = n < rows
    if PADDING:
        seen &= tl.load(real + n, n < rows, 0) != 0
    v = _load(value, n, w, v_n, seen, VALUE_WIDTH).to(tl.float32)
    o = _load(output, n, w, o_n, seen, VALUE_WIDTH).to(tl.float32)
    kind = w < VALUE_WIDTH
    from_block = b * (heads + heads // GROUP) * blocks + block
    of_keys = from_block + (heads + of_key) * blocks
    v_before = tl.load(block_sums + of_keys * VALUE_WIDTH + w, kind, 0.0)
    o_before = tl.load(block_sums + (from_block + h * blocks) * VALUE_WIDTH + w, kind, 0.0)
    summed = v_before[None, :] + tl.cumsum(v, 0)
    summed += (o_before[None, :] + tl.cumsum(o, 0)) / count[:, None]
    summed = tl.where(seen[:, None], (summed + beyond) / total[:, None], 0.0)
    _store(out + b * i_b + h * i_h, n, w, i_n, n < rows, summed, VALUE_WIDTH)
    if tl.program_id(2) == 0:
        tl.store(totals + head * rows + n, total, n < rows)
        tl.store(errors + place, error / _count(counts, block * TILE, rows, PADDING))


@triton.jit
def _factor(totals, real, n, rows, PADDING: tl.constexpr):
    """What the integral of rows was multiplied by; 0 for padding."""
    factor = tl.where(n < rows, 1 / tl.load(totals + n, n < rows, 1.0), 0.0)
    if PADDING:
        factor = tl.where(tl.load(real + n, n < rows, 0) != 0, factor, 0.0)
    return factor


@triton.jit
def _block_gradients_kernel(
    d_integral, integral, totals, real, counts, after, products, rows, heads,
    d_b, d_h, d_n, i_b, i_h, i_n,
    PADDING: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What a block of rows adds to gradients of running sums, and products with the integral."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    n = block * TILE + tl.arange(0, TILE)
    factor = _factor(totals + head * rows, real + b * rows, n, rows, PADDING)
    mean = factor / _count(counts + b * rows, n, rows, PADDING)
    product = tl.zeros([TILE], tl.float32)
    means = after + tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * WIDTH
    for first in range(0, WIDTH, CHUNK):
        w = first + tl.arange(0, CHUNK)
        d = _load(d_integral + b * d_b + h * d_h, n, w, d_n, n < rows, WIDTH).to(tl.float32)
        of_row = _load(integral + b * i_b + h * i_h, n, w, i_n, n < rows, WIDTH)
        product += tl.sum(d * of_row.to(tl.float32), 1)
        place = (head * tl.num_programs(0) + block) * WIDTH + w
        tl.store(after + place, tl.sum(d * factor[:, None], 0), w < WIDTH)
        tl.store(means + place, tl.sum(d * mean[:, None], 0), w < WIDTH)
    tl.store(products + head * rows + n, product, n < rows)


@triton.jit
def _shift_kernel(
    output, gradient, extra, out, rows, heads, signal, o_b, o_h, o_n, g_b, g_h, g_n, s_b, s_h, s_n,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add to each row the multiple of its gradient that makes their product larger by ``extra``.

    Rows of noise heads, which follow those of signal heads, stay as they are.
    """
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head, w = tl.program_id(1).to(tl.int64), tl.arange(0, PADDED)
    b, h, seen = head // heads, head % heads, n < rows
    o = _load(output + b * o_b + h * o_h, n, w, o_n, seen, WIDTH).to(tl.float32)
    if h < signal:
        g = _load(gradient + b * g_b + h * g_h, n, w, g_n, seen, WIDTH).to(tl.float32)
        square = tl.sum(g * g, 1)
        more = tl.load(extra + (b * signal + h) * rows + n, seen, 0.0)
        o += (more / tl.where(square > 0, square, 1.0))[:, None] * g
    _store(out + b * s_b + h * s_h, n, w, s_n, seen, o, WIDTH)


@triton.jit
def _suffix_kernel(
    d_integral, d_signal, d_noise, totals, real, counts, after, out, d_value, rows, heads, signal,
    i_b, i_h, i_n, o_b, o_h, o_n, n_b, n_h, n_n, s_b, s_h, s_n,
    PADDING: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of A₁V, to which the running sums of all later rows add, and of values.

    Those of noise heads, which follow the signal heads, are copied.
    """
    block = tl.program_id(0)
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    n = block * TILE + tl.arange(0, TILE)
    w, seen = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK), n < rows
    out += b * s_b + h * s_h
    if h >= signal:
        x = _load(d_noise + b * n_b + (h - signal) * n_h, n, w, n_n, seen, WIDTH)
        _store(out, n, w, s_n, seen, x, WIDTH)
    else:
        head = b * signal + h
        d = _load(d_integral + b * i_b + h * i_h, n, w, i_n, seen, WIDTH).to(tl.float32)
        factor = _factor(totals + head * rows, real + b * rows, n, rows, PADDING)
        mean = factor / _count(counts + b * rows, n, rows, PADDING)
        place = (head * tl.num_programs(0) + block) * WIDTH + w
        means = after + (tl.num_programs(1) // heads).to(tl.int64) * signal * (
            tl.num_programs(0) * WIDTH
        )
        later = tl.load(after + place, w < WIDTH, 0.0)
        later_means = tl.load(means + place, w < WIDTH, 0.0)
        of_value = later[None, :] + tl.cumsum(d * factor[:, None], 0, reverse=True)
        of_output = later_means[None, :] + tl.cumsum(d * mean[:, None], 0, reverse=True)
        of_value = tl.where((factor != 0)[:, None], of_value, 0.0)
        of_output = tl.where((factor != 0)[:, None], of_output, 0.0)
        _store(d_value, head * rows + n, w, WIDTH, seen, of_value, WIDTH)
        o = _load(d_signal + b * o_b + h * o_h, n, w, o_n, seen, WIDTH).to(tl.float32)
        _store(out, n, w, s_n, seen, o + of_output, WIDTH)


@triton.jit
def _slopes(
    value, d_integral, d_value, count, factor, products, running, p, visible, n, j, rows, v_n, i_n,
    ADD: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of G in a tile over the number of columns; r times gradients is added to values."""
    r, slope = _excess((running[None, :] + tl.cumsum(p, 0)) / count[:, None], visible)
    d_r = tl.zeros([TILE, TILE], tl.float32) - tl.load(products + n, n < rows, 0.0)[:, None]
    for first in range(0, WIDTH, CHUNK):
        w = first + tl.arange(0, CHUNK)
        up = _load(d_integral, n, w, i_n, n < rows, WIDTH)
        v = _load(value, j, w, v_n, j < rows, WIDTH)
        d_r += tl.dot(up, tl.trans(v), input_precision="ieee")
        if ADD:
            by = (r * factor[:, None]).to(v.dtype)
            added = tl.dot(tl.trans(by), up, input_precision="ieee")
            _add(d_value, j, w, j < rows, added, WIDTH)
    return slope * d_r * (factor / count)[:, None]


@triton.jit
def _add_gradients(
    of_rows, of_query, d_key, slope, q, k, j, d, rows, scale, WIDTH: tl.constexpr
):  # fmt: skip
    """Add what a tile gives to the gradients of its keys, and return those of rows and queries.

    The slope is the gradient of A₁ times A₁.
    """
    d_scores = (slope * scale).to(q.dtype)
    of_query += tl.dot(d_scores, k, input_precision="ieee")
    added = tl.dot(tl.trans(d_scores), q, input_precision="ieee")
    _add(d_key, j, d, j < rows, added, WIDTH)
    return of_rows + tl.sum(slope, 1), of_query


@triton.jit
def _tiles_backward_kernel(
    query, key, value, d_integral, totals, real, counts, log_sums, products, before, bounds, last,
    later, d_query, d_key, d_value, extra, rows, heads, scale, tolerance,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, i_b, i_h, i_n,
    FIRST: tl.constexpr, GROUP: tl.constexpr, PADDING: tl.constexpr, WIDTH: tl.constexpr,
    PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A block of rows: first what its G adds to earlier rows, then what later rows add to its A₁.

    Gradients of G flow into A₁ of all earlier rows, so that between both, ``later`` is summed up.
    """
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    b, h = head // heads, head % heads
    n, d = block * TILE + tl.arange(0, TILE), tl.arange(0, PADDED)
    query += b * q_b + h * q_h
    key += b * k_b + (h // GROUP) * k_h
    value += b * v_b + (h // GROUP) * v_h
    d_integral += b * i_b + h * i_h
    d_value += head * rows * VALUE_WIDTH
    real += b * rows
    log_sums += head * rows
    products += head * rows
    count = _count(counts + b * rows, n, rows, PADDING)
    factor = _factor(totals + head * rows, real, n, rows, PADDING)
    place = head * blocks + block
    of_query = tl.zeros([TILE, PADDED], tl.float32)
    of_rows = tl.zeros([TILE], tl.float32)
    for first in range(0, block + 1, AT_ONCE):
        columns = first + tl.arange(0, AT_ONCE)
        if FIRST:
            of_columns = (
                tl.load(bounds + place * blocks + columns, columns <= block, 0.0) > tolerance
            )
        else:
            of_columns = tl.load(last + head * blocks + columns, columns <= block, -1) >= block
        if tl.max(of_columns.to(tl.int32)) > 0:
            for column in range(first, min(first + AT_ONCE, block + 1)):
                counted = tl.load(bounds + place * blocks + column) > tolerance
                visited = counted
                if not FIRST:
                    visited = tl.load(last + head * blocks + column) >= block
                if visited:
                    j = column * TILE + tl.arange(0, TILE)
                    q, k, p, visible = _tile(
                        query, key, real, log_sums, n, j, rows, scale, q_n, k_n,
                        PADDING, WIDTH, PADDED,
                    )  # fmt: skip
                    sums = place * blocks * TILE + j
                    if FIRST:
                        d_g = _slopes(
                            value, d_integral, d_value, count, factor, products,
                            tl.load(before + sums), p, visible, n, j, rows, v_n, i_n,
                            True, VALUE_WIDTH, CHUNK, TILE,
                        )  # fmt: skip
                        tl.store(later + sums, tl.sum(d_g, 0))
                    else:
                        d_p = tl.zeros([TILE, TILE], tl.float32) + tl.load(later + sums)[None, :]
                        if counted:
                            d_g = _slopes(
                                value, d_integral, d_value, count, factor, products,
                                tl.load(before + sums), p, visible, n, j, rows, v_n, i_n,
                                False, VALUE_WIDTH, CHUNK, TILE,
                            )  # fmt: skip
                            d_p += tl.cumsum(d_g, 0, reverse=True)
                        of_rows, of_query = _add_gradients(
                            of_rows, of_query, d_key + head * rows * WIDTH, d_p * p, q, k, j, d,
                            rows, scale, WIDTH,
                        )  # fmt: skip
    if not FIRST:
        tl.store(extra + head * rows + n, of_rows, n < rows)
        _store(d_query, head * rows + n, d, WIDTH, n < rows, of_query, WIDTH)


@triton.jit
def _later_kernel(
    later, bounds, last, tolerance, blocks, TILE: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """Replace what each block of rows adds to columns by what all later blocks add."""
    column, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    j = column * TILE + tl.arange(0, TILE)
    latest = tl.load(last + head * blocks + column)
    carried = tl.zeros([TILE], tl.float32)
    for step in range(0, latest - column + 1, AT_ONCE):
        block = latest - step - tl.arange(0, AT_ONCE)
        inside = block >= column
        place = head * blocks + block
        counted = tl.load(bounds + place * blocks + column, inside, 0.0) > tolerance
        to = later + place[:, None] * blocks * TILE + j[None, :]
        part = tl.load(to, counted[:, None] & inside[:, None], 0.0)
        tl.store(to, carried[None, :] + tl.cumsum(part, 0) - part, inside[:, None])
        carried += tl.sum(part, 0)


class Attended(NamedTuple):
    """Attention of all heads, and the integral of the signal heads.

    Attributes:
        signal: A₁ V, [batch, signal, rows, width], in the dtype of the values.
        noise: A₂ V, [batch, noise, rows, width]; None without noise heads.
        integral: softmax(G) V, like the signal; None without an integral, as are the following.
        sums: the sum of each column of A₁, [batch, signal, rows], in float32.
        errors: bound of what is left out of a row's weights, [batch, signal, blocks].
    """

    signal: Tensor
    noise: Tensor | None = None
    integral: Tensor | None = None
    sums: Tensor | None = None
    errors: Tensor | None = None


class Integral(NamedTuple):
    """An integral, and what its gradients need.

    Attributes:
        integral: softmax(G) V, [batch, signal, rows, width].
        sums: see ``Attended``.
        errors: see ``Attended``.
        totals: of the exponentials of G, [batch, signal, rows], in float32 like the following.
        before: sums of columns before each block of rows, [batch, signal, blocks, columns]; only
            those of tiles that count were written.
        bounds: of the sum of r in a row of each tile, [batch, signal, blocks, blocks].
        last: the last block of rows that counts, by block of columns, [batch, signal, blocks].
    """

    integral: Tensor
    sums: Tensor
    errors: Tensor
    totals: Tensor
    before: Tensor
    bounds: Tensor
    last: Tensor


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """Causal softmax(Q Kᵀ · scaling) V in torch's fused kernels.

    Args:
        query: [batch, heads, rows, head_dim].
        key: [batch, key_heads, rows, head_dim].
        value: [batch, key_heads, rows, width].
        scaling: factor of the scores.

    Returns:
        [batch, heads, rows, width], and the logarithms of the sums of exponentials, [batch, heads,
        rows], in float32.
    """
    rows, limit = query.shape[2], _widest(query, value, WIDEST_FORWARD)
    if limit:
        parts = [
            torch.ops.aten._scaled_dot_product_cudnn_attention(
                query, key, values, None, True, 0.0, True, scale=scaling
            )
            for values in value.split(limit, -1)
        ]
        output = parts[0][0] if len(parts) == 1 else torch.cat([part[0] for part in parts], -1)
    else:
        parts = [
            torch.ops.aten._scaled_dot_product_efficient_attention(
                *_for_efficient(query, key, value), None, True, 0.0, True, scale=scaling
            )
        ]
        output = parts[0][0]
    return output, parts[0][1].reshape(*query.shape[:2], -1)[..., :rows].contiguous()


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of ``attend``, from that of its output."""
    rows, limit = query.shape[2], _widest(query, value, WIDEST_BACKWARD)
    nothing = torch.zeros((), dtype=torch.int64, device=query.device)  # no dropout, no seeds
    if limit:
        parts = [
            torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(of_output, query, key, of_value, out, log_sums[..., None], nothing, nothing),
                *(None, None, None, rows, rows, 0.0, True),
                scale=scaling,
            )
            for of_output, of_value, out in zip(
                *(tensor.split(limit, -1) for tensor in (gradient, value, output)), strict=True
            )
        ]
        d_query, d_key, d_value = parts[0]
        for part in parts[1:]:
            d_query, d_key = d_query.add_(part[0]), d_key.add_(part[1])
        if len(parts) > 1:
            d_value = torch.cat([part[2] for part in parts], -1)
        return d_query, d_key, d_value
    padded = -rows % 32  # what the kernel expects
    log_sums = torch.nn.functional.pad(log_sums, (0, padded))
    d_query, d_key, d_value, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        *(gradient, *_for_efficient(query, key, value), None, output, log_sums),
        *(nothing, nothing, 0.0, (True, True, True, False), True),
        scale=scaling,
    )
    groups = key.shape[1]
    d_key, d_value = (grad.unflatten(1, (groups, -1)).sum(2) for grad in (d_key, d_value))
    return d_query[..., : query.shape[3]], d_key[..., : key.shape[3]], d_value


WIDEST_FORWARD = 256
WIDEST_BACKWARD = 128
"""Coordinates of a value head that cuDNN takes at a time, forward and backward."""


def _widest(query: Tensor, value: Tensor, limit: int) -> int:
    """Coordinates of a value head at a time in cuDNN's kernels; 0 where they do not run."""
    halves = query.dtype in (torch.bfloat16, torch.float16) and torch.version.hip is None
    width = query.shape[3]
    if not halves or width > 128 or width % 8 or value.shape[3] % 8:
        return 0
    if not torch.compiler.is_compiling() and not torch.backends.cuda.cudnn_sdp_enabled():
        return 0
    return limit if _is_hopper(query.device) else min(limit, 128)


@cache
def _is_hopper(device: torch.device) -> bool:
    """Whether cuDNN takes wide values at once."""
    return torch.cuda.get_device_capability(device)[0] >= 9


def _for_efficient(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """Queries, keys and values as the kernel for all other dtypes and shapes takes them."""
    group = query.shape[1] // key.shape[1]
    pad = torch.nn.functional.pad
    query, key, value = (pad(tensor, (0, -tensor.shape[3] % 8)) for tensor in (query, key, value))
    return [query, *(tensor.repeat_interleave(group, 1) for tensor in (key, value))]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        inputs = [_dense(tensor) for tensor in (query, key, value)]
        output, log_sums = attend(*inputs, scaling)
        ctx.save_for_backward(*inputs, output, log_sums)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return *attend_backward(_dense(gradients[0]), *ctx.saved_tensors, ctx.scaling), None


def attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention without an integral; see ``attend``."""
    attended: Tensor = _run(_Attention, query, key, value, scaling)
    return attended


class HeadInputs(NamedTuple):
    """What the heads of a text are computed from.

    Attributes:
        query: see ``differential_attention.Projected``, also for the following.
        key: with as many columns as there are rows.
        value: likewise.
        signal: number of signal heads.
        scaling: factor of the scores.
        real: [batch, rows], false for padding, whose rows are 0; None if there is none.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    signal: int
    scaling: float
    real: Tensor | None

    @property
    def noise(self) -> int:
        """Number of noise heads."""
        return self.query.shape[1] - self.signal

    def dense(self) -> "HeadInputs":
        """The same, with the coordinates of a head next to each other."""
        return HeadInputs(*(_dense(tensor) for tensor in self[:3]), *self[3:])

    def of_signal(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the signal heads."""
        return self.query[:, : self.signal], self.key[:, : self.value.shape[1]], self.value

    def calls(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """What attention is called with: at once for all heads, or first for the signal heads."""
        query, key = hide_padding(self.query, self.key, self.real)
        signal, value, key_heads = self.signal, self.value, self.value.shape[1]
        if not self.noise:
            return [(query, key, value)]
        if signal == self.noise:
            keys = key if key.shape[1] > key_heads else torch.cat([key, key], 1)
            return [(query, keys, torch.cat([value, value], 1))]
        return [
            (query[:, :signal], key[:, :key_heads], value),
            (query[:, signal:], key[:, -key_heads:], value),
        ]

    def shapes(self) -> dict[str, Any]:
        """What kernels of tiles are compiled for."""
        width = self.query.shape[3]
        return {
            "GROUP": self.signal // self.value.shape[1],
            "PADDING": self.real is not None,
            "WIDTH": width,
            "PADDED": max(16, triton.next_power_of_2(width)),
            "VALUE_WIDTH": self.value.shape[3],
            "TILE": TILE,
        }

    def rows(self, unread: Tensor) -> tuple[Tensor, Tensor]:
        """Rows that are no padding, and how many of these there are up to each; or ``unread``."""
        if self.real is None:
            return unread, unread
        return self.real.contiguous(), self.real.cumsum(-1).clamp_min_(1).float()

    @property
    def tolerance(self) -> float:
        """See ``TOLERANCE``."""
        return TOLERANCE * torch.finfo(self.query.dtype).eps


def _chunk(width: int) -> int:
    return int(min(CHUNK, max(16, triton.next_power_of_2(width))))


def _sum_up(blocks: Tensor, *, reverse: bool = False) -> None:
    """Replace sums of blocks by those of all blocks before them, or after them.

    Args:
        blocks: [heads, blocks, width], in float32.
        reverse: whether they are the blocks after a block.
    """
    heads, count, width = blocks.shape
    chunk = min(32, _chunk(width))
    _running_kernel[heads, triton.cdiv(width, chunk)](
        blocks, count, WIDTH=width, CHUNK=chunk, AT_ONCE=32, REVERSE=reverse
    )


class _Outputs(NamedTuple):
    """What attention returns for each of ``HeadInputs.calls``, and the integral."""

    outputs: list[Tensor]
    log_sums: list[Tensor]
    integral: Integral | None


def _forward(inputs: HeadInputs, *, integral: bool) -> _Outputs:
    """Attention, and the integral of the signal heads."""
    attended = [attend(*call, inputs.scaling) for call in inputs.calls()]
    outputs, log_sums = [output for output, _ in attended], [log_sum for _, log_sum in attended]
    if not integral:
        return _Outputs(outputs, log_sums, None)
    outputs[0] = outputs[0].transpose(1, 2).contiguous().transpose(1, 2)
    return _Outputs(outputs, log_sums, _integral_of(inputs, outputs[0], log_sums[0]))


def _integral_of(inputs: HeadInputs, output: Tensor, log_sums: Tensor) -> Integral:
    """The integral of the signal heads, which are the first of the output's heads."""
    (query, key, value), signal = inputs.of_signal(), inputs.signal
    batch, _, rows, width = output.shape
    blocks, chunk = triton.cdiv(rows, TILE), _chunk(width)
    log_sums = log_sums[:, :signal].contiguous()
    before = log_sums.new_empty(batch, signal, blocks, blocks * TILE)
    bounds = log_sums.new_empty(batch, signal, blocks, blocks)
    last = log_sums.new_empty(batch, signal, blocks, dtype=torch.int32)
    errors = log_sums.new_empty(batch, signal, blocks)
    sums, totals = torch.empty_like(log_sums), torch.empty_like(log_sums)
    block_sums = log_sums.new_empty(batch * (signal + key.shape[1]), blocks, width)
    integral = output.new_empty(batch, rows, signal, width).transpose(1, 2)
    shapes, numbers = inputs.shapes(), (rows, signal, inputs.scaling, inputs.tolerance)
    tensors = query, key, value, output
    of_rows = *inputs.rows(log_sums), log_sums
    strides = [s for tensor in tensors for s in _strides(tensor)]
    _columns_kernel[blocks, batch * signal](
        *tensors, *of_rows, before, bounds, last, sums, block_sums,
        *numbers, *strides, **shapes, CHUNK=min(64, chunk), num_stages=2,
    )  # fmt: skip
    _sum_up(block_sums)
    _integral_kernel[blocks, batch * signal, triton.cdiv(width, chunk)](
        *tensors, *of_rows, before, bounds, block_sums, integral, totals, errors,
        *numbers, *strides, *_strides(integral), **shapes, CHUNK=chunk, AT_ONCE=32,
    )  # fmt: skip
    return Integral(integral, sums, errors, totals, before, bounds, last)


def _backward(
    gradients: list[Tensor], d_integral: Tensor | None, inputs: HeadInputs, attended: _Outputs
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, from those of the signal and of the noise heads."""
    key, key_heads, outputs = inputs.key, inputs.value.shape[1], attended.outputs
    added = None
    if attended.integral is not None:
        assert d_integral is not None
        joined, shifted, added = _backward_of_integral(gradients, d_integral, inputs, attended)
        gradients = [joined, *gradients[1:]][: len(outputs)]
        outputs = [shifted, *outputs[1:]]
    elif len(gradients) > len(outputs):
        both = _joined(*gradients)
        gradients = [torch.cat(gradients, 1) if both is None else both]
    calls = zip(gradients, inputs.calls(), outputs, attended.log_sums, strict=True)
    parts = [
        attend_backward(_dense(gradient), *call, output, log_sum, inputs.scaling)
        for gradient, call, output, log_sum in calls
    ]
    d_query, d_key, d_value = (
        of_calls[0] if len(parts) == 1 else torch.cat(of_calls, 1)
        for of_calls in zip(*parts, strict=True)
    )
    d_query, d_key = d_query[..., : inputs.query.shape[3]], d_key[..., : key.shape[3]]
    if inputs.noise:  # both kinds of heads read the values, and may read the same keys
        d_value = d_value.unflatten(1, (2, key_heads)).sum(1)
        if key.shape[1] == key_heads:
            d_key = d_key.unflatten(1, (2, key_heads)).sum(1)
    if added is not None:
        d_query[:, : inputs.signal].add_(added[0])
        d_key[:, :key_heads].add_(added[1])
        d_value.add_(added[2])
    return d_query, d_key, d_value


def _backward_of_integral(
    gradients: list[Tensor], d_integral: Tensor, inputs: HeadInputs, attended: _Outputs
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """What the integral adds to gradients.

    Returns:
        The gradient of the output; the output, shifted so that torch's attention, which multiplies
        both, gets gradients of A₁ that hold those of the integral; and gradients of the queries,
        keys and values that tiles add, in float32.
    """
    (output, *_), (log_sums, *_), kept = attended
    assert kept is not None
    (batch, heads, rows, width), signal = output.shape, inputs.signal
    blocks, narrow = triton.cdiv(rows, TILE), min(32, _chunk(width))
    log_sums = log_sums[:, :signal].contiguous()
    of_rows = kept.totals, *inputs.rows(log_sums)
    after = log_sums.new_empty(2 * batch * signal, blocks, width)
    products = torch.empty_like(log_sums)
    grid, of_d = (blocks, batch * signal), _strides(d_integral)
    options = {"PADDING": inputs.real is not None, "WIDTH": width, "CHUNK": narrow, "TILE": TILE}
    _block_gradients_kernel[grid](
        d_integral, kept.integral, *of_rows, after, products, rows, signal,
        *of_d, *_strides(kept.integral), **options,
    )  # fmt: skip
    _sum_up(after, reverse=True)
    gradient = torch.empty_like(output)
    d_signal, d_noise = (_dense(gradient) for gradient in (gradients[0], gradients[-1]))
    d_value = log_sums.new_empty(batch, signal, rows, width)
    _suffix_kernel[blocks, batch * heads, triton.cdiv(width, narrow)](
        d_integral, d_signal, d_noise, *of_rows, after, gradient, d_value, rows, heads, signal,
        *of_d, *_strides(d_signal), *_strides(d_noise), *_strides(gradient), **options,
    )  # fmt: skip
    d_query, d_key, extra = _backward_of_tiles(
        inputs, d_integral, (*of_rows, log_sums, products), d_value, kept
    )
    shifted, padded = torch.empty_like(output), triton.next_power_of_2(width)
    rows_at_once = max(1, min(16, 8192 // padded))
    _shift_kernel[triton.cdiv(rows, rows_at_once), batch * heads](
        output, gradient, extra, shifted, rows, heads, signal,
        *_strides(output), *_strides(gradient), *_strides(shifted),
        WIDTH=width, PADDED=padded, TILE=rows_at_once,
    )  # fmt: skip
    added = [d_query, d_key, d_value]
    if signal != inputs.value.shape[1]:
        groups = inputs.value.shape[1], -1
        added[1:] = (gradient.unflatten(1, groups).sum(2) for gradient in added[1:])
    return gradient, shifted, added


def _backward_of_tiles(
    inputs: HeadInputs,
    d_integral: Tensor,
    of_rows: Sequence[Tensor],
    d_value: Tensor,
    kept: Integral,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries and keys from the tiles of G; those of values are added to ``d_value``.

    Returns:
        Both, in float32, and the sum of the gradients of A₁ times A₁ in each row.
    """
    tensors = *inputs.of_signal(), d_integral
    d_key = d_value.new_zeros(*d_value.shape[:3], inputs.query.shape[3])
    d_query, later = torch.empty_like(d_key), torch.empty_like(kept.before)
    batch, signal, rows, width = d_value.shape
    blocks, extra = triton.cdiv(rows, TILE), d_value.new_empty(batch, signal, rows)
    grid, tolerance = (blocks, batch * signal), inputs.tolerance
    for first in (True, False):
        _tiles_backward_kernel[grid](
            *tensors, *of_rows, kept.before, kept.bounds, kept.last, later,
            d_query, d_key, d_value, extra, rows, signal, inputs.scaling, tolerance,
            *(s for tensor in tensors for s in _strides(tensor)),
            **inputs.shapes(), FIRST=first, CHUNK=min(64, _chunk(width)), AT_ONCE=32, num_stages=1,
        )  # fmt: skip
        if first:
            _later_kernel[grid](
                later, kept.bounds, kept.last, tolerance, blocks, TILE=TILE, AT_ONCE=32
            )
    return d_query, d_key, extra


# Graphs take both as they are: custom operations, whose names differ between copies of this file.
_NAME = re.sub(r"\W", lambda found: f"_{ord(found[0]):x}_", __name__, flags=re.ASCII)
_SPACE = f"kernels_{_NAME}"


@torch.library.custom_op(f"{_SPACE}::with_integral", mutates_args=())
def _with_integral(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = HeadInputs(query, key, value, query.shape[1], scaling, real).dense()
    (output,), (log_sums,), kept = _forward(inputs, integral=True)
    assert kept is not None
    return output, log_sums, *kept


@_with_integral.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None) -> Any:
    batch, heads, rows, _ = query.shape
    blocks = (rows + TILE - 1) // TILE
    output = value.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
    log_sums, sums, totals = (
        query.new_empty(batch, heads, rows, dtype=torch.float32) for _ in range(3)
    )
    before = sums.new_empty(batch, heads, blocks, blocks * TILE)
    bounds = sums.new_empty(batch, heads, blocks, blocks)
    errors = sums.new_empty(batch, heads, blocks)
    kept = torch.empty_like(output), sums, errors, totals, before, bounds, errors.int()
    return output, log_sums, *kept


@torch.library.custom_op(f"{_SPACE}::with_integral_backward", mutates_args=())
def _with_integral_backward(
    d_output: Tensor,
    d_integral: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    real: Tensor | None,
    attended: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = HeadInputs(query, key, value, query.shape[1], scaling, real).dense()
    output, log_sums, *kept = attended
    outputs = _Outputs([output], [log_sums], Integral(*kept))
    gradients = _backward([d_output], _dense(d_integral), inputs, outputs)
    return tuple(gradient.contiguous() for gradient in gradients)  # type: ignore[return-value]


@_with_integral_backward.register_fake
def _(
    d_output: Tensor, d_integral: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> Any:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.scaling, real = inputs
    ctx.save_for_backward(query, key, value, real, *output)


def _gradients(ctx: Any, d_output: Tensor, _: Any, d_integral: Tensor, *others: Any) -> Any:
    query, key, value, real, *attended = ctx.saved_tensors
    inputs = query, key, value, ctx.scaling, real
    return *_with_integral_backward(d_output, d_integral, *inputs, attended), None, None


_with_integral.register_autograd(_gradients, setup_context=_keep)


class _Heads(torch.autograd.Function):
    """``attention_of_heads`` outside of graphs, where calling an operation takes longer."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        inputs, integral = HeadInputs(*arguments[:-1]).dense(), arguments[-1]
        outputs, log_sums, kept = _forward(inputs, integral=integral)
        query, key, value, *ctx.options, real = inputs
        ctx.calls = len(outputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, real, *outputs, *log_sums, *(kept or ()))
        if kept is not None:
            ctx.mark_non_differentiable(kept.sums, kept.errors)
        noise = outputs[-1][:, -inputs.noise :] if inputs.noise else None
        return outputs[0][:, : inputs.signal], noise, *(kept[:3] if kept else (None,) * 3)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, real, *saved = ctx.saved_tensors
        inputs, calls = HeadInputs(query, key, value, *ctx.options, real), ctx.calls
        outputs, log_sums, kept = saved[:calls], saved[calls : 2 * calls], saved[2 * calls :]
        batch, _, *shape = outputs[0].shape
        of_heads = [
            value.new_zeros(batch, count, *shape) if gradient is None else gradient
            for gradient, count in zip(gradients, (inputs.signal, inputs.noise), strict=False)
            if count
        ]
        d_integral = torch.zeros_like(kept[0]) if kept and gradients[2] is None else gradients[2]
        d_integral = None if d_integral is None else _dense(d_integral)
        attended = _Outputs(outputs, log_sums, Integral(*kept) if kept else None)
        return *_backward(of_heads, d_integral, inputs, attended), *(None,) * 4


def attention_of_heads(inputs: HeadInputs, *, integral: bool) -> Attended:
    """A₁ V, A₂ V and softmax(G) V of a text (DINT, arXiv 2501.17486, eq. 5 and 6).

    What the integral leaves out of a row's weights is at most ``errors`` of their sum.

    Args:
        inputs: queries, keys and values.
        integral: whether the integral is computed.
    """
    if not torch.compiler.is_compiling():
        return Attended(*_run(_Heads, *inputs, integral))
    query, key, value, signal, scaling, real = inputs
    of_signal, of_noise = query.split([signal, inputs.noise], 1)
    keys = key.split(value.shape[1], 1)
    output, _, summed, sums, errors, *_ = _with_integral(of_signal, keys[0], value, scaling, real)
    noise = None
    if of_noise.shape[1]:
        noise = attention(*hide_padding(of_noise, keys[-1], real), value, scaling)
    return Attended(output, noise, summed, sums, errors)


# --- A row of a text in a cache -------------------------------------------------------------------


@triton.jit
def _add_block(q, k, v, seen, peak, total, output, scale):
    """Softmax over some columns more: scores, and the sums so far."""
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, -1e30)
    highest = tl.maximum(peak, tl.max(scores, 1))
    p = tl.where(seen, tl.exp(scores - highest[:, None]), 0.0)
    less = tl.exp(peak - highest)
    total = total * less + tl.sum(p, 1)
    output = output * less[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return scores, highest, total, output


@triton.jit
def _store_part(
    outputs, marks, place, kept, peak, total, output, w, WIDTH: tl.constexpr
):  # fmt: skip
    """Write what some heads read in a part of the columns."""
    tl.store(marks + 2 * place, peak, kept)
    tl.store(marks + 2 * place + 1, total, kept)
    _store(outputs, place, w, WIDTH, kept, output, WIDTH)


@triton.jit(do_not_specialize=["columns", "length", "real_b"])
def _row_kernel(
    query, key, value, real, scores, outputs, marks, columns, length,
    key_heads, noise_keys, scale, q_b, q_h, k_b, k_h, k_n, v_b, v_h, v_n, real_b,
    SIGNAL: tl.constexpr, NOISE: tl.constexpr, KEEP: tl.constexpr, PADDING: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of a key head: what its signal heads and its noise heads read there."""
    split, parts = tl.program_id(0), tl.num_programs(0)
    b, kh = (tl.program_id(1) // key_heads).to(tl.int64), tl.program_id(1) % key_heads
    r, d, w = tl.arange(0, HEADS), tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    q = _load(query + b * q_b, kh * SIGNAL + r, d, q_h, r < SIGNAL, WIDTH)
    peak, total = tl.full([HEADS], -1e30, tl.float32), tl.zeros([HEADS], tl.float32)
    output = tl.zeros([HEADS, VALUE_PADDED], tl.float32)
    noise_peak, noise_total, noise_output = peak, total, output
    noise_q = q
    if NOISE:
        of_noise = key_heads * SIGNAL + kh * NOISE + r
        noise_q = _load(query + b * q_b, of_noise, d, q_h, r < NOISE, WIDTH)
    for first in range(split * length, min(split * length + length, columns), BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside = j < columns
        seen = inside
        if PADDING:
            seen &= tl.load(real + b * real_b + j, inside, 0) != 0
        v = _load(value + b * v_b + kh * v_h, j, w, v_n, inside, VALUE_WIDTH)
        k = _load(key + b * k_b + kh * k_h, j, d, k_n, inside, WIDTH)
        of_row, peak, total, output = _add_block(q, k, v, seen[None, :], peak, total, output, scale)
        if KEEP:
            heads = (b * key_heads + kh) * SIGNAL + r
            to = scores + heads[:, None] * columns + j[None, :]
            tl.store(to, of_row, (r < SIGNAL)[:, None] & inside[None, :])
        if NOISE:
            k = _load(key + b * k_b + (noise_keys + kh) * k_h, j, d, k_n, inside, WIDTH)
            _, noise_peak, noise_total, noise_output = _add_block(
                noise_q, k, v, seen[None, :], noise_peak, noise_total, noise_output, scale
            )
    every = key_heads * (SIGNAL + NOISE)
    place = (b * every + kh * SIGNAL + r) * parts + split
    _store_part(outputs, marks, place, r < SIGNAL, peak, total, output, w, VALUE_WIDTH)
    if NOISE:
        place = (b * every + key_heads * SIGNAL + kh * NOISE + r) * parts + split
        _store_part(
            outputs, marks, place, r < NOISE, noise_peak, noise_total, noise_output, w, VALUE_WIDTH
        )


@triton.jit(do_not_specialize=["columns", "length", "sums_b", "sums_h", "real_b"])
def _row_integral_kernel(
    value, real, scores, marks, sums, counts, new_sums, outputs, totals, columns, length,
    heads, every, v_b, v_h, v_n, sums_b, sums_h, real_b,
    GROUP: tl.constexpr, PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of a signal head: their sums with this row, and what exp(G) reads there."""
    split, parts = tl.program_id(0), tl.num_programs(0)
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    part, w = tl.arange(0, PARTS), tl.arange(0, PADDED)
    place = marks + 2 * ((b * every + h) * parts + part)
    maxima = tl.load(place, part < parts, -1e30)
    highest = tl.max(maxima, 0)
    divisor = tl.sum(tl.exp(maxima - highest) * tl.load(place + 1, part < parts, 0.0), 0)
    count = tl.load(counts + b)
    of_row = 1.0
    if PADDING:
        of_row = (tl.load(real + b * real_b + columns - 1) != 0).to(tl.float32)
    output, total = tl.zeros([PADDED], tl.float32), 0.0
    row = b * heads + h
    for first in range(split * length, min(split * length + length, columns), BLOCK):
        j = first + tl.arange(0, BLOCK)
        seen = j < columns
        if PADDING:
            seen &= tl.load(real + b * real_b + j, j < columns, 0) != 0
        score = tl.load(scores + row * columns + j, j < columns, -1e30)
        p = tl.where(seen, tl.exp(score - highest) / divisor, 0.0) * of_row
        new = p + tl.load(sums + b * sums_b + h * sums_h + j, j < columns - 1, 0.0)
        tl.store(new_sums + row * columns + j, new, j < columns)
        weight = tl.where(seen, tl.exp(new / count), 0.0) * of_row
        total += tl.sum(weight, 0)
        v = _load(value + b * v_b + (h // GROUP) * v_h, j, w, v_n, j < columns, WIDTH)
        output += tl.sum(weight[:, None] * v.to(tl.float32), 0)
    place = row * parts + split
    tl.store(totals + place, total)
    tl.store(outputs + place * WIDTH + w, output, w < WIDTH)


@triton.jit
def _merged(outputs, marks, place, w, parts, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    """Attention over all parts of the columns."""
    part = tl.arange(0, PARTS)
    maxima = tl.load(marks + 2 * (place + part), part < parts, -1e30)
    less = tl.exp(maxima - tl.max(maxima, 0))
    total = tl.sum(less * tl.load(marks + 2 * (place + part) + 1, part < parts, 0.0), 0)
    output = _load(outputs, place + part, w, WIDTH, part < parts, WIDTH)
    return tl.sum(less[:, None] * output, 0) / tl.where(total > 0, total, 1.0)


@triton.jit
def _row_end_kernel(
    outputs, marks, integrals, totals, lambda_, gamma, weight, out, heads, every, parts, eps, scale,
    l_b, l_h, g_b, g_h,
    NOISE: tl.constexpr, INTEGRAL: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """A signal head: the difference and the sum of all parts, norm and scale."""
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    w, part = tl.arange(0, PADDED), tl.arange(0, PARTS)
    x = _merged(outputs, marks, (b * every + h) * parts, w, parts, WIDTH, PARTS)
    if NOISE:
        noise = (b * every + heads + h // GROUP) * parts
        by = tl.load(lambda_ + b * l_b + h * l_h).to(tl.float32)
        x -= by * _merged(outputs, marks, noise, w, parts, WIDTH, PARTS)
    if INTEGRAL:
        place = (b * heads + h) * parts + part
        added = _load(integrals, place, w, WIDTH, part < parts, WIDTH)
        total = tl.sum(tl.load(totals + place, part < parts, 0.0), 0)
        by = tl.load(gamma + b * g_b + h * g_h).to(tl.float32)
        x += by * tl.sum(added, 0) / tl.where(total > 0, total, 1.0)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    if WEIGHT:
        x *= tl.load(weight + w, w < WIDTH, 0.0).to(tl.float32)
    place = out + (b * heads + h) * WIDTH + w
    tl.store(place, (x * scale).to(out.dtype.element_ty), w < WIDTH)


MAX_PARTS = 64
"""Of the columns of a row, which programs read side by side."""

PART = 256
"""Columns of a part, at least."""


def row_of_heads(
    inputs: HeadInputs,
    lambda_: Tensor | None,
    gamma: Tensor | None,
    sums: Tensor | None,
    norm: HeadNorm,
) -> tuple[Tensor, Tensor | None]:
    """A row after those in a cache, without gradients, up to ``combine_in_kernel``.

    Args:
        inputs: a row, with as many columns as there are tokens, this one included; ``real`` is
            [batch, columns].
        lambda_: None without noise heads.
        gamma: weight of the integral; not read without sums.
        sums: the sums of columns before this row, [batch, signal, at least columns - 1]; None
            without an integral.
        norm: norm and scale.

    Returns:
        [batch, 1, signal · width], and the sums of columns after this row.
    """
    (outputs, marks, integrals, totals), new_sums = _read_parts(inputs.dense(), sums)
    value, signal, (batch, every) = inputs.value, inputs.signal, inputs.query.shape[:2]
    width, weight = value.shape[3], norm.weight
    weights = [totals.view(-1, 1, 1, 1) if by is None else by for by in (lambda_, gamma)]
    strides = [s * (n > 1) for e in weights for s, n in zip(e.stride()[:2], e.shape, strict=False)]
    out, parts = value.new_empty(batch, 1, signal * width), len(totals) // (batch * signal)
    _row_end_kernel[(batch * signal,)](
        outputs, marks, integrals, totals, *weights, value if weight is None else weight, out,
        signal, every, parts, norm.eps, norm.scale, *strides,
        NOISE=inputs.noise > 0, INTEGRAL=sums is not None, NORM=norm.norm,
        WEIGHT=weight is not None, GROUP=signal // max(inputs.noise, 1), WIDTH=width,
        PADDED=max(16, triton.next_power_of_2(width)), PARTS=triton.next_power_of_2(parts),
    )  # fmt: skip
    return out, new_sums


def _read_parts(inputs: HeadInputs, sums: Tensor | None) -> tuple[Sequence[Tensor], Tensor | None]:
    """What ``_row_kernel`` and ``_row_integral_kernel`` write, and the sums after the row.

    See ``row_of_heads`` for the arguments.
    """
    query, key, value, signal, scaling, real = inputs
    batch, every, _, width = query.shape
    key_heads, columns, value_width = value.shape[1:]
    length = max(PART, -(-columns // MAX_PARTS))
    length += -length % 64
    parts = -(-columns // length)
    sizes = [batch * every * parts * n for n in (value_width, 2)]
    sizes += [batch * signal * parts * n for n in (value_width, 1)]
    sizes += [batch * signal * columns if sums is not None else 0] * 2
    buffers = value.new_empty(sum(sizes), dtype=torch.float32).split(sizes)
    outputs, marks, integrals, totals, scores, new = buffers
    real_b = 0 if real is None else real.stride(0)
    mask = query if real is None else real
    padded = max(16, triton.next_power_of_2(value_width))
    _row_kernel[parts, batch * key_heads](
        query, key, value, mask, scores, outputs, marks, columns, length,
        key_heads, key.shape[1] - key_heads, scaling, *query.stride()[:2], *_strides(key),
        *_strides(value), real_b,
        SIGNAL=signal // key_heads, NOISE=inputs.noise // key_heads, KEEP=sums is not None,
        PADDING=real is not None, WIDTH=width, PADDED=max(16, triton.next_power_of_2(width)),
        VALUE_WIDTH=value_width, VALUE_PADDED=padded,
        HEADS=max(16, triton.next_power_of_2(max(signal, inputs.noise) // key_heads)), BLOCK=32,
        num_stages=2,
    )  # fmt: skip
    if sums is not None:
        if real is None:
            counts = torch.full((batch,), float(columns), device=value.device)
        else:
            counts = real.sum(-1).clamp_min(1).float()
        _row_integral_kernel[parts, batch * signal](
            value, mask, scores, marks, sums, counts, new, integrals, totals, columns, length,
            signal, every, *_strides(value), *sums.stride()[:2], real_b,
            GROUP=signal // key_heads, PADDING=real is not None, WIDTH=value_width, PADDED=padded,
            PARTS=triton.next_power_of_2(parts), BLOCK=64,
        )  # fmt: skip
    return buffers[:4], None if sums is None else new.view(batch, signal, columns)
