"""Differential attention on GPUs: kernels in Triton around torch's fused attention.

``differential_attention.kernels_for`` imports this file only where it can run. The kernels do what
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


# --- Rotation -------------------------------------------------------------------------------------


@triton.jit
def _rotate_kernel(
    query, key, cos, sin, out, key_out, rows, heads, key_heads,
    q_b, q_h, q_n, k_b, k_h, k_n, cos_b, cos_n, sin_b, sin_n,
    SIGN: tl.constexpr, HALF: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    every = heads + key_heads
    b, h = (tl.program_id(1) // every).to(tl.int64), tl.program_id(1) % every
    d = tl.arange(0, PADDED)
    inside = (n < rows)[:, None] & (d < HALF)[None, :]
    if h < heads:
        place = query + b * q_b + h * q_h + n[:, None] * q_n + d[None, :]
        to = out + ((b * rows + n[:, None]) * heads + h) * (2 * HALF) + d[None, :]
    else:
        h -= heads
        place = key + b * k_b + h * k_h + n[:, None] * k_n + d[None, :]
        to = key_out + ((b * rows + n[:, None]) * key_heads + h) * (2 * HALF) + d[None, :]
    first = tl.load(place, inside, 0.0).to(tl.float32)
    second = tl.load(place + HALF, inside, 0.0).to(tl.float32)
    c = tl.load(cos + b * cos_b + n[:, None] * cos_n + d[None, :], inside, 0.0).to(tl.float32)
    s = tl.load(sin + b * sin_b + n[:, None] * sin_n + d[None, :], inside, 0.0).to(tl.float32)
    s = s * SIGN
    tl.store(to, (first * c - second * s).to(out.dtype.element_ty), inside)
    tl.store(to + HALF, (second * c + first * s).to(out.dtype.element_ty), inside)


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
    if not torch.is_grad_enabled():
        return _rotate(query, key, cos, sin, 1.0)
    rotated: tuple[Tensor, Tensor] = _Rotation.apply(query, key, cos, sin)
    return rotated


# --- λ --------------------------------------------------------------------------------------------


@triton.jit
def _lambda_kernel(q1, k1, q2, k2, out, initial, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    d = tl.arange(0, PADDED)
    inside = d < WIDTH
    first = tl.load(q1 + d, inside, 0.0).to(tl.float32) * tl.load(k1 + d, inside, 0.0)
    second = tl.load(q2 + d, inside, 0.0).to(tl.float32) * tl.load(k2 + d, inside, 0.0)
    tl.store(out, tl.exp(tl.sum(first, 0)) - tl.exp(tl.sum(second, 0)) + initial)


class _Lambda(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs[:4])
        return _lambda(*inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        vectors = ctx.saved_tensors  # once: checkpoints count
        floats = [vector.float() for vector in vectors]
        products = [(query * key).sum().exp() for query, key in (floats[:2], floats[2:])]
        first, second = (product * gradients[0].sum() for product in products)
        q1, k1, q2, k2 = floats
        parts = first * k1, first * q1, -second * k2, -second * q2
        return *(a.to(b.dtype) for a, b in zip(parts, vectors, strict=True)), None


def _lambda(q1: Tensor, k1: Tensor, q2: Tensor, k2: Tensor, initial: float) -> Tensor:
    out = q1.new_empty(1, 1, 1, 1, dtype=torch.float32)
    width = len(q1)
    _lambda_kernel[(1,)](
        q1, k1, q2, k2, out, initial, WIDTH=width, PADDED=triton.next_power_of_2(width), num_warps=1
    )
    return out


def lambda_of_vectors(
    lambda_q1: Tensor, lambda_k1: Tensor, lambda_q2: Tensor, lambda_k2: Tensor, initial: float
) -> Tensor:
    """λ of a layer, as in ``differential_attention``, [1, 1, 1, 1]."""
    inputs = lambda_q1, lambda_k1, lambda_q2, lambda_k2, initial
    if not torch.is_grad_enabled():
        return _lambda(*inputs)
    out: Tensor = _Lambda.apply(*inputs)
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
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    w = tl.arange(0, PADDED)
    inside = (n < rows)[:, None] & (w < WIDTH)[None, :]
    b = b.to(tl.int64)
    x = tl.load(signal + b * s_b + h * s_h + n[:, None] * s_n + w[None, :], inside, 0.0)
    x = x.to(tl.float32)
    if NOISE:
        by = tl.load(lambda_ + b * l_b + h * l_h + n * l_n, n < rows, 0.0).to(tl.float32)
        place = noise + b * n_b + (h // GROUP) * n_h + n[:, None] * n_n + w[None, :]
        x -= by[:, None] * tl.load(place, inside, 0.0).to(tl.float32)
    if INTEGRAL:
        by = tl.load(gamma + b * g_b + h * g_h + n * g_n, n < rows, 0.0).to(tl.float32)
        place = integral + b * i_b + h * i_h + n[:, None] * i_n + w[None, :]
        x += by[:, None] * tl.load(place, inside, 0.0).to(tl.float32)
    if NORM:
        x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
    if WEIGHT:
        x *= tl.load(weight + w, w < WIDTH, 0.0).to(tl.float32)[None, :]
    place = out + ((b * rows + n[:, None]) * heads + h) * WIDTH + w[None, :]
    tl.store(place, (x * scale).to(out.dtype.element_ty), inside)


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
    b, k = tl.program_id(1) // (heads // GROUP), tl.program_id(1) % (heads // GROUP)
    w = tl.arange(0, PADDED)
    inside = (n < rows)[:, None] & (w < WIDTH)[None, :]
    b = b.to(tl.int64)
    other = tl.zeros([ROWS, PADDED], tl.float32)
    d_other = tl.zeros([ROWS, PADDED], tl.float32)
    of_weight = tl.zeros([PADDED], tl.float32)
    factor = tl.full([PADDED], 1.0, tl.float32)
    if NOISE:
        of_noise = noise + b * n_b + k * n_h + n[:, None] * n_n + w[None, :]
        other = tl.load(of_noise, inside, 0.0).to(tl.float32)
    if WEIGHT:
        factor = tl.load(weight + w, w < WIDTH, 0.0).to(tl.float32)
    for member in range(GROUP):
        h = k * GROUP + member
        x = tl.load(signal + b * s_b + h * s_h + n[:, None] * s_n + w[None, :], inside, 0.0)
        x = x.to(tl.float32)
        by_noise = tl.zeros([ROWS], tl.float32)
        by_integral = tl.zeros([ROWS], tl.float32)
        added = tl.zeros([ROWS, PADDED], tl.float32)
        if NOISE:
            by_noise = tl.load(lambda_ + b * l_b + h * l_h + n * l_n, n < rows, 0.0)
            by_noise = by_noise.to(tl.float32)
            x -= by_noise[:, None] * other
        if INTEGRAL:
            by_integral = tl.load(gamma + b * g_b + h * g_h + n * g_n, n < rows, 0.0)
            by_integral = by_integral.to(tl.float32)
            of_integral = integral + b * i_b + h * i_h + n[:, None] * i_n + w[None, :]
            added = tl.load(of_integral, inside, 0.0).to(tl.float32)
            x += by_integral[:, None] * added
        of_gradient = gradient + ((b * rows + n[:, None]) * heads + h) * WIDTH + w[None, :]
        dy = tl.load(of_gradient, inside, 0.0).to(tl.float32) * scale
        if NORM:
            root = tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None]
            normed = x * root
            of_weight += tl.sum(dy * normed, 0)
            dy *= factor[None, :]
            dy = root * (dy - normed * (tl.sum(dy * normed, 1) / WIDTH)[:, None])
        to_signal = d_signal + b * ds_b + h * ds_h + n[:, None] * ds_n + w[None, :]
        tl.store(to_signal, dy.to(d_signal.dtype.element_ty), inside)
        row = (b * heads + h) * rows + n
        if NOISE:
            d_other -= by_noise[:, None] * dy
            tl.store(d_lambda + row, -tl.sum(dy * other, 1), n < rows)
        if INTEGRAL:
            tl.store(d_gamma + row, tl.sum(dy * added, 1), n < rows)
            to_integral = d_integral + b * di_b + h * di_h + n[:, None] * di_n + w[None, :]
            dy *= by_integral[:, None]
            tl.store(to_integral, dy.to(d_integral.dtype.element_ty), inside)
    if NOISE:
        to_noise = d_noise + b * dn_b + k * dn_h + n[:, None] * dn_n + w[None, :]
        tl.store(to_noise, d_other.to(d_noise.dtype.element_ty), inside)
    if WEIGHT:
        program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(d_weight + program * WIDTH + w, of_weight, w < WIDTH)


class _Combination(torch.autograd.Function):
    """See ``combine``; what is missing is the signal, and not read."""

    @staticmethod
    def forward(
        ctx: Any,
        signal: Tensor,
        noise: Tensor | None,
        lambda_: Tensor | None,
        integral: Tensor | None,
        gamma: Tensor | None,
        weight: Tensor | None,
        eps: float,
        norm: bool,
        scale: float,
        dtype: torch.dtype,
    ) -> Tensor:
        batch, heads, rows, width = signal.shape
        parts = [
            _dense(signal if tensor is None else tensor) for tensor in (signal, noise, integral)
        ]
        weights = [
            signal.new_ones(1, 1, 1, 1) if weight is None else weight for weight in (lambda_, gamma)
        ]
        of_rows = [weight.expand(batch, heads, rows, 1).stride()[:3] for weight in weights]
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
        ctx.numbers, ctx.shapes = (rows, heads, eps, scale), [weight.shape for weight in weights]
        ctx.strides = [s for part in parts for s in _strides(part)] + [
            s for o in of_rows for s in o
        ]
        weight = signal if weight is None else weight
        ctx.save_for_backward(*parts, *weights, weight)
        out = signal.new_empty(batch, rows, heads * width, dtype=dtype)
        _combine_kernel[triton.cdiv(rows, ctx.block), batch * heads](
            *parts, *weights, weight, out, *ctx.numbers, *ctx.strides, **ctx.options
        )
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        *parts, lambda_, gamma, weight = ctx.saved_tensors
        signal, (rows, heads) = parts[0], ctx.numbers[:2]
        batch, options = len(signal), ctx.options
        outputs = [torch.empty_like(part) for part in parts]
        outputs = [_dense(gradient) for gradient in outputs]
        grid = triton.cdiv(rows, ctx.block), batch * heads // options["GROUP"]
        of_rows = signal.new_empty(2, batch, heads, rows, 1, dtype=torch.float32)
        of_weight = signal.new_empty(*grid, options["WIDTH"], dtype=torch.float32)
        _combine_backward_kernel[grid](
            *parts, lambda_, gamma, weight, gradients[0].contiguous(),
            *outputs, *of_rows, of_weight, *ctx.numbers, *ctx.strides,
            *(s for gradient in outputs for s in _strides(gradient)), **options,
        )  # fmt: skip
        d_lambda, d_gamma = (
            gradient.sum_to_size(shape).to(to.dtype)
            for gradient, shape, to in zip(of_rows, ctx.shapes, (lambda_, gamma), strict=True)
        )
        return (
            outputs[0],
            *((outputs[1], d_lambda) if options["NOISE"] else (None, None)),
            *((outputs[2], d_gamma) if options["INTEGRAL"] else (None, None)),
            of_weight.flatten(0, 1).sum(0).to(weight.dtype) if options["WEIGHT"] else None,
            *(None,) * 4,
        )


def combine(
    signal: Tensor,
    noise: Tensor | None,
    lambda_: Tensor | None,
    integral: Tensor | None,
    gamma: Tensor | None,
    weight: Tensor | None,
    eps: float,
    norm: bool,
    scale: float,
    dtype: torch.dtype,
) -> Tensor:
    """norm(signal - λ noise + γ integral) · weight · scale, head by head, in one pass.

    Args:
        signal: [batch, signal, rows, width].
        noise: [batch, noise, rows, width]; None for none.
        lambda_: weight of the noise, [batch or 1, signal or 1, rows or 1, 1].
        integral: like the signal; None for none.
        gamma: weight of the integral, like ``lambda_``.
        weight: of the norm, [width]; None for none.
        eps: added to the mean square.
        norm: whether the heads are divided by the root of their mean square.
        scale: factor of the heads.
        dtype: of the result.

    Returns:
        [batch, rows, signal · width].
    """
    inputs = signal, noise, lambda_, integral, gamma, weight, eps, norm, scale, dtype
    if not torch.is_grad_enabled():
        return _Combination.forward(_Context(), *inputs)
    out: Tensor = _Combination.apply(*inputs)
    return out


class _Context:
    """Of a function without gradients."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Keep nothing."""


# --- Integral -------------------------------------------------------------------------------------


@triton.jit
def _tile(
    query, key, real, log_sums, n, j, rows, scale, q_n, k_n,
    PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Queries [rows, d], keys [columns, d] and A₁ [rows, columns] of a tile, 0 where hidden."""
    d = tl.arange(0, PADDED)
    q = tl.load(
        query + n[:, None].to(tl.int64) * q_n + d[None, :],
        (n < rows)[:, None] & (d < WIDTH)[None, :], 0.0,
    )  # fmt: skip
    k = tl.load(
        key + j[:, None].to(tl.int64) * k_n + d[None, :],
        (j < rows)[:, None] & (d < WIDTH)[None, :], 0.0,
    )  # fmt: skip
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
def _add_columns(
    query, k, real, log_sums, counts, before, bounds, running, latest, of_column, j, rows, place,
    column, block, blocks, scale, tolerance, q_n,
    DIAGONAL: tl.constexpr, PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Sums of columns after a tile, and the last block of rows that counts so far."""
    d = tl.arange(0, PADDED)
    n = block * TILE + tl.arange(0, TILE)
    q = tl.load(
        query + n[:, None].to(tl.int64) * q_n + d[None, :],
        (n < rows)[:, None] & (d < WIDTH)[None, :], 0.0,
    )  # fmt: skip
    log_sum = tl.load(log_sums + n, n < rows, float("inf"))
    if PADDING:
        of_row = tl.load(real + n, n < rows, 0) != 0
        log_sum = tl.where(of_row, log_sum, float("inf"))
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    p = tl.exp2(scores * (scale * 1.4426950408889634) - (log_sum * 1.4426950408889634)[None, :])
    if DIAGONAL:
        p = tl.where(n[None, :] >= j[:, None], p, 0.0)
    after = running + tl.where(of_column, tl.sum(p, 1), 0.0)
    mean = after / tl.load(counts + block * TILE)
    bound = 0.7182818284590452 * tl.sum(mean * mean)
    tl.store(bounds + (place + block) * blocks + column, bound)
    if bound > tolerance:
        tl.store(before + (place + block) * blocks * TILE + j, running)
        latest = block
    return after, latest


@triton.jit
def _columns_kernel(
    query, key, real, log_sums, counts, before, bounds, last, sums, rows, heads, scale, tolerance,
    q_b, q_h, q_n, k_b, k_h, k_n, c_b,
    GROUP: tl.constexpr, PADDING: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Columns of a tile, from the diagonal down: their sums before every block of rows."""
    column, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0)
    b, h = head // heads, head % heads
    j = column * TILE + tl.arange(0, TILE)
    query += b * q_b + h * q_h
    key += b * k_b + (h // GROUP) * k_h
    d = tl.arange(0, PADDED)
    k = tl.load(
        key + j[:, None].to(tl.int64) * k_n + d[None, :],
        (j < rows)[:, None] & (d < WIDTH)[None, :], 0.0,
    )  # fmt: skip
    of_column = j < rows
    if PADDING:
        of_column &= tl.load(real + b * rows + j, j < rows, 0) != 0
    running = tl.zeros([TILE], tl.float32)
    latest = column - 1
    for block in range(column, column + 1):  # the tile of the diagonal, then those below it
        running, latest = _add_columns(
            query, k, real + b * rows, log_sums + head * rows, counts + b * c_b, before, bounds,
            running, latest, of_column, j, rows, head * blocks, column, block, blocks, scale,
            tolerance, q_n, True, PADDING, WIDTH, PADDED, TILE,
        )  # fmt: skip
    for block in range(column + 1, blocks):
        running, latest = _add_columns(
            query, k, real + b * rows, log_sums + head * rows, counts + b * c_b, before, bounds,
            running, latest, of_column, j, rows, head * blocks, column, block, blocks, scale,
            tolerance, q_n, False, PADDING, WIDTH, PADDED, TILE,
        )  # fmt: skip
    tl.store(last + head * blocks + column, latest)
    tl.store(sums + head * rows + j, running, j < rows)


@triton.jit
def _block_sums_kernel(
    x, factors, out, rows, heads, x_b, x_h, x_n, f_b, f_h,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Sum of every block of rows, each times a factor."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    n = block * TILE + tl.arange(0, TILE)
    w = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = (n < rows)[:, None] & (w < WIDTH)[None, :]
    place = x + b * x_b + h * x_h + n[:, None].to(tl.int64) * x_n + w[None, :]
    factor = tl.load(factors + b * f_b + h * f_h + n, n < rows, 0.0)
    total = tl.sum(tl.load(place, inside, 0.0).to(tl.float32) * factor[:, None], 0)
    tl.store(out + (head * tl.num_programs(0) + block) * WIDTH + w, total, w < WIDTH)


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
    query, key, value, output, real, log_sums, counts, before, bounds, values, outputs,
    out, totals, errors, rows, heads, scale, tolerance,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n, i_b, i_h, i_n, c_b,
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
    count = tl.load(counts + b * c_b + n, n < rows, 1.0)
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
                    v = tl.load(
                        value + j[:, None].to(tl.int64) * v_n + w[None, :],
                        (j < rows)[:, None] & (w < VALUE_WIDTH)[None, :], 0.0,
                    )  # fmt: skip
                    beyond += tl.dot(r.to(v.dtype), v, input_precision="ieee")
                    total += tl.sum(r, 1)
    inside = (n < rows)[:, None] & (w < VALUE_WIDTH)[None, :]
    seen = inside
    if PADDING:
        seen &= tl.load(real + n, n < rows, 0)[:, None] != 0
    from_rows = n[:, None].to(tl.int64)
    v = tl.load(value + from_rows * v_n + w[None, :], seen, 0.0).to(tl.float32)
    o = tl.load(output + from_rows * o_n + w[None, :], seen, 0.0).to(tl.float32)
    kind = w < VALUE_WIDTH
    of_keys = ((head // heads) * (heads // GROUP) + of_key) * blocks + block
    v_before = tl.load(values + of_keys * VALUE_WIDTH + w, kind, 0.0)
    o_before = tl.load(outputs + place * VALUE_WIDTH + w, kind, 0.0)
    summed = v_before[None, :] + tl.cumsum(v, 0)
    summed += (o_before[None, :] + tl.cumsum(o, 0)) / count[:, None]
    summed = tl.where(seen, (summed + beyond) / total[:, None], 0.0)
    to = out + b * i_b + h * i_h + from_rows * i_n + w[None, :]
    tl.store(to, summed.to(out.dtype.element_ty), inside)
    if tl.program_id(2) == 0:
        tl.store(totals + head * rows + n, total, n < rows)
        tl.store(errors + place, error / tl.load(counts + b * c_b + block * TILE))


@triton.jit
def _row_products_kernel(
    x, y, out, rows, heads, x_b, x_h, x_n, y_b, y_h, y_n,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Scalar product of every row with that of another tensor."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head, w = tl.program_id(1).to(tl.int64), tl.arange(0, PADDED)
    b, h = head // heads, head % heads
    inside = (n < rows)[:, None] & (w < WIDTH)[None, :]
    from_rows = n[:, None].to(tl.int64)
    first = tl.load(x + b * x_b + h * x_h + from_rows * x_n + w[None, :], inside, 0.0)
    second = tl.load(y + b * y_b + h * y_h + from_rows * y_n + w[None, :], inside, 0.0)
    product = tl.sum(first.to(tl.float32) * second.to(tl.float32), 1)
    tl.store(out + head * rows + n, product, n < rows)


@triton.jit
def _shift_kernel(
    output, gradient, extra, out, rows, heads, o_b, o_h, o_n, g_b, g_h, g_n, s_b, s_h, s_n,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Add to each row the multiple of its gradient that makes their product larger by ``extra``."""
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    head, w = tl.program_id(1).to(tl.int64), tl.arange(0, PADDED)
    b, h = head // heads, head % heads
    inside = (n < rows)[:, None] & (w < WIDTH)[None, :]
    from_rows = n[:, None].to(tl.int64)
    o = tl.load(output + b * o_b + h * o_h + from_rows * o_n + w[None, :], inside, 0.0)
    g = tl.load(gradient + b * g_b + h * g_h + from_rows * g_n + w[None, :], inside, 0.0)
    g = g.to(tl.float32)
    square = tl.sum(g * g, 1)
    by = tl.load(extra + head * rows + n, n < rows, 0.0) / tl.where(square > 0, square, 1.0)
    o = o.to(tl.float32) + by[:, None] * g
    place = out + b * s_b + h * s_h + from_rows * s_n + w[None, :]
    tl.store(place, o.to(out.dtype.element_ty), inside)


@triton.jit
def _suffix_kernel(
    d_integral, d_output, whole, means, after, after_means, out, d_value, rows, heads,
    i_b, i_h, i_n, o_b, o_h, o_n, s_b, s_h, s_n,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Gradients of the running sums: what all later rows add to values and to A₁V."""
    block, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    n = block * TILE + tl.arange(0, TILE)
    w = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    inside = (n < rows)[:, None] & (w < WIDTH)[None, :]
    from_rows = n[:, None].to(tl.int64)
    d = tl.load(d_integral + b * i_b + h * i_h + from_rows * i_n + w[None, :], inside, 0.0)
    d = d.to(tl.float32)
    factor = tl.load(whole + head * rows + n, n < rows, 0.0)
    mean = tl.load(means + head * rows + n, n < rows, 0.0)
    place = (head * tl.num_programs(0) + block) * WIDTH + w
    later = tl.load(after + place, w < WIDTH, 0.0)
    later_means = tl.load(after_means + place, w < WIDTH, 0.0)
    of_value = later[None, :] + tl.cumsum(d * factor[:, None], 0, reverse=True)
    of_output = later_means[None, :] + tl.cumsum(d * mean[:, None], 0, reverse=True)
    seen = tl.load(whole + head * rows + n, n < rows, 0.0) != 0
    of_value = tl.where(seen[:, None], of_value, 0.0)
    of_output = tl.where(seen[:, None], of_output, 0.0)
    tl.store(d_value + (head * rows + n[:, None]) * WIDTH + w[None, :], of_value, inside)
    o = tl.load(d_output + b * o_b + h * o_h + from_rows * o_n + w[None, :], inside, 0.0)
    to = out + b * s_b + h * s_h + from_rows * s_n + w[None, :]
    tl.store(to, (o.to(tl.float32) + of_output).to(out.dtype.element_ty), inside)


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
        of_rows = (n < rows)[:, None] & (w < WIDTH)[None, :]
        of_columns = (j < rows)[:, None] & (w < WIDTH)[None, :]
        up = tl.load(d_integral + n[:, None].to(tl.int64) * i_n + w[None, :], of_rows, 0.0)
        v = tl.load(value + j[:, None].to(tl.int64) * v_n + w[None, :], of_columns, 0.0)
        d_r += tl.dot(up, tl.trans(v), input_precision="ieee")
        if ADD:
            by = (r * factor[:, None]).to(v.dtype)
            added = tl.dot(tl.trans(by), up, input_precision="ieee")
            to = d_value + j[:, None].to(tl.int64) * WIDTH + w[None, :]
            tl.atomic_add(to, added, of_columns, sem="relaxed")
    return slope * d_r * (factor / count)[:, None]


@triton.jit
def _tiles_backward_kernel(
    query, key, value, d_integral, real, log_sums, counts, factors, products, before, bounds, last,
    later, d_query, d_key, d_value, extra, rows, heads, scale, tolerance,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, i_b, i_h, i_n, c_b,
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
    count = tl.load(counts + b * c_b + n, n < rows, 1.0)
    factor = tl.load(factors + head * rows + n, n < rows, 0.0)
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
                        d_p *= p
                        of_rows += tl.sum(d_p, 1)
                        d_scores = (d_p * scale).to(q.dtype)
                        of_query += tl.dot(d_scores, k, input_precision="ieee")
                        added = tl.dot(tl.trans(d_scores), q, input_precision="ieee")
                        to = d_key + (head * rows + j[:, None]) * WIDTH + d[None, :]
                        inside = (j < rows)[:, None] & (d < WIDTH)[None, :]
                        tl.atomic_add(to, added, inside, sem="relaxed")
    if not FIRST:
        tl.store(extra + head * rows + n, of_rows, n < rows)
        to = d_query + (head * rows + n[:, None]) * WIDTH + d[None, :]
        tl.store(to, of_query, (n < rows)[:, None] & (d < WIDTH)[None, :])


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
    """What attention with an integral returns, and keeps for its gradients.

    Attributes:
        output: A₁ V, [batch, signal, rows, width], in the dtype of the values.
        integral: softmax(G) V, likewise.
        sums: the sum of each column of A₁, [batch, signal, rows], in float32 like the following.
        log_sums: of the exponentials of A₁, [batch, signal, rows].
        totals: of the exponentials of G, [batch, signal, rows].
        before: sums of columns before each block of rows, [batch, signal, blocks, columns]; only
            those of tiles that count were written.
        bounds: of the sum of r in a row of each tile, [batch, signal, blocks, blocks].
        last: the last block of rows that counts, by block of columns, [batch, signal, blocks].
        errors: bound of what is left out of a row's weights, [batch, signal, blocks].
    """

    output: Tensor
    integral: Tensor
    sums: Tensor
    log_sums: Tensor
    totals: Tensor
    before: Tensor
    bounds: Tensor
    last: Tensor
    errors: Tensor


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
        query, key, value = (_dense(tensor) for tensor in (query, key, value))
        output, log_sums = attend(query, key, value, scaling)
        ctx.save_for_backward(query, key, value, output, log_sums)
        ctx.scaling = scaling
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return *attend_backward(_dense(gradients[0]), *ctx.saved_tensors, ctx.scaling), None


def attention(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Attention without an integral; see ``attend``."""
    if not torch.is_grad_enabled():
        return attend(*(_dense(tensor) for tensor in (query, key, value)), scaling)[0]
    attended: Tensor = _Attention.apply(query, key, value, scaling)
    return attended


def _counts(real: Tensor | None, rows: int, device: torch.device) -> Tensor:
    """Number of columns that a row sees, [batch or 1, rows], at least 1, in float32."""
    if real is None:
        return torch.arange(1, rows + 1, device=device, dtype=torch.float32)[None]
    return real.cumsum(-1).clamp_min_(1).float()


def _shapes(query: Tensor, key: Tensor, value: Tensor, real: Tensor | None) -> dict[str, Any]:
    """What kernels of tiles are compiled for."""
    padded = max(16, triton.next_power_of_2(query.shape[3]))
    return {
        "GROUP": query.shape[1] // key.shape[1],
        "PADDING": real is not None,
        "WIDTH": query.shape[3],
        "PADDED": padded,
        "TILE": TILE,
    }


def _chunk(width: int) -> int:
    return int(min(CHUNK, max(16, triton.next_power_of_2(width))))


def _sums_beyond(x: Tensor, factors: Tensor, *, reverse: bool = False) -> Tensor:
    """Sums of all rows before each block, or after it, [batch, heads, blocks, width].

    Args:
        x: [batch, heads, rows, width].
        factors: of rows, [batch or 1, heads or 1, rows].
        reverse: whether they are the rows after the block.
    """
    batch, heads, rows, width = x.shape
    blocks, chunk = triton.cdiv(rows, TILE), _chunk(width)
    out = x.new_empty(batch, heads, blocks, width, dtype=torch.float32)
    narrow = min(32, chunk)
    of_factors = factors.expand(batch, heads, rows).stride()[:2]
    _block_sums_kernel[blocks, batch * heads, triton.cdiv(width, chunk)](
        x, factors, out, rows, heads, *_strides(x), *of_factors,
        WIDTH=width, CHUNK=chunk, TILE=TILE,
    )  # fmt: skip
    _running_kernel[batch * heads, triton.cdiv(width, narrow)](
        out, blocks, WIDTH=width, CHUNK=narrow, AT_ONCE=32, REVERSE=reverse
    )
    return out


def _tolerance(dtype: torch.dtype) -> float:
    return TOLERANCE * torch.finfo(dtype).eps


def _forward(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None
) -> Attended:
    batch, heads, rows, _ = query.shape
    width, blocks = value.shape[3], triton.cdiv(rows, TILE)
    query, key, value = (_dense(tensor) for tensor in (query, key, value))
    output, log_sums = attend(*hide_padding(query, key, real), value, scaling)
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    counts = _counts(real, rows, query.device)
    seen = torch.ones_like(counts) if real is None else real.float()
    real = counts if real is None else real.contiguous()
    before = log_sums.new_empty(batch, heads, blocks, blocks * TILE)
    bounds = log_sums.new_empty(batch, heads, blocks, blocks)
    last = log_sums.new_empty(batch, heads, blocks, dtype=torch.int32)
    errors = log_sums.new_empty(batch, heads, blocks)
    sums, totals = torch.empty_like(log_sums), torch.empty_like(log_sums)
    shapes, tolerance = _shapes(query, key, value, real), _tolerance(query.dtype)
    shapes["PADDING"] = real is not counts
    of_counts = counts.stride(0) if len(counts) > 1 else 0
    of_heads = *_strides(query), *_strides(key)
    _columns_kernel[blocks, batch * heads](
        query, key, real, log_sums, counts, before, bounds, last, sums,
        rows, heads, scaling, tolerance, *of_heads, of_counts, **shapes, num_stages=2,
    )  # fmt: skip
    values, outputs = (_sums_beyond(tensor, seen[:, None]) for tensor in (value, output))
    integral, chunk = torch.empty_like(output), _chunk(width)
    _integral_kernel[blocks, batch * heads, triton.cdiv(width, chunk)](
        query, key, value, output, real, log_sums, counts, before, bounds, values, outputs,
        integral, totals, errors, rows, heads, scaling, tolerance,
        *of_heads, *_strides(value), *_strides(output), *_strides(integral), of_counts,
        **shapes, VALUE_WIDTH=width, CHUNK=chunk, AT_ONCE=32,
    )  # fmt: skip
    return Attended(output, integral, sums, log_sums, totals, before, bounds, last, errors)


def _backward(
    d_output: Tensor,
    d_integral: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    real: Tensor | None,
    attended: Attended,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, rows, width = attended.output.shape
    blocks, device = triton.cdiv(rows, TILE), query.device
    query, key, value, d_output, d_integral = (
        _dense(tensor) for tensor in (query, key, value, d_output, d_integral)
    )
    output, integral = attended.output, attended.integral
    counts = _counts(real, rows, device)
    weights = 1 / attended.totals if real is None else real[:, None] / attended.totals
    means = weights / counts[:, None]
    after, after_means = (
        _sums_beyond(d_integral, factors, reverse=True) for factors in (weights, means)
    )
    chunk, grid = _chunk(width), (blocks, batch * heads)
    gradient = torch.empty_like(output)
    d_value = output.new_empty(batch, heads, rows, width, dtype=torch.float32)
    narrow = min(32, chunk)
    by_chunks = *grid, triton.cdiv(width, narrow)
    _suffix_kernel[by_chunks](
        d_integral, d_output, weights, means, after, after_means, gradient, d_value, rows, heads,
        *_strides(d_integral), *_strides(d_output), *_strides(gradient),
        WIDTH=width, CHUNK=narrow, TILE=TILE,
    )  # fmt: skip
    products, extra = torch.empty_like(weights), torch.empty_like(weights)
    padded = triton.next_power_of_2(width)
    rows_at_once = max(1, min(16, 8192 // padded))
    by_rows = triton.cdiv(rows, rows_at_once), batch * heads
    of_row = {"WIDTH": width, "PADDED": padded, "TILE": rows_at_once}
    _row_products_kernel[by_rows](
        d_integral, integral, products, rows, heads, *_strides(d_integral), *_strides(integral),
        **of_row,
    )  # fmt: skip
    d_key = query.new_zeros(batch, heads, rows, query.shape[3], dtype=torch.float32)
    d_query, later = torch.empty_like(d_key), torch.empty_like(attended.before)
    shapes, tolerance = _shapes(query, key, value, real), _tolerance(query.dtype)
    for first in (True, False):
        _tiles_backward_kernel[grid](
            query, key, value, d_integral, counts if real is None else real.contiguous(),
            attended.log_sums, counts, weights, products, attended.before, attended.bounds,
            attended.last, later, d_query, d_key, d_value, extra, rows, heads, scaling, tolerance,
            *_strides(query), *_strides(key), *_strides(value), *_strides(d_integral),
            counts.stride(0) if len(counts) > 1 else 0,
            **shapes, FIRST=first, VALUE_WIDTH=width, CHUNK=min(64, chunk), AT_ONCE=32,
            num_stages=1,
        )  # fmt: skip
        if first:
            _later_kernel[grid](
                later, attended.bounds, attended.last, tolerance, blocks, TILE=TILE, AT_ONCE=32
            )
    shifted = torch.empty_like(output)
    _shift_kernel[by_rows](
        output, gradient, extra, shifted, rows, heads, *_strides(output), *_strides(gradient),
        *_strides(shifted), **of_row,
    )  # fmt: skip
    hidden = hide_padding(query, key, real)
    of_maps = attend_backward(gradient, *hidden, value, shifted, attended.log_sums, scaling)
    if heads != key.shape[1]:
        d_key, d_value = (grad.unflatten(1, (key.shape[1], -1)).sum(2) for grad in (d_key, d_value))
    added, maps = (d_query, d_key, d_value), (grad.contiguous() for grad in of_maps)
    parts = zip(added, maps, strict=True)
    return tuple(grad[..., : mine.shape[3]].add_(mine).contiguous() for mine, grad in parts)  # type: ignore[return-value]


# Graphs take both as they are: custom operations, whose names differ between copies of this file.
_SPACE = "kernels_" + __name__.replace(".", "_")


@torch.library.custom_op(f"{_SPACE}::with_integral", mutates_args=())
def _with_integral(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    return tuple(_forward(query, key, value, scaling, real))  # type: ignore[return-value]


@_with_integral.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None) -> Any:
    batch, heads, rows, _ = query.shape
    blocks = (rows + TILE - 1) // TILE
    output = value.new_empty(batch, rows, heads, value.shape[3]).transpose(1, 2)
    of_rows = [query.new_empty(batch, heads, rows, dtype=torch.float32) for _ in range(3)]
    before = of_rows[0].new_empty(batch, heads, blocks, blocks * TILE)
    bounds = of_rows[0].new_empty(batch, heads, blocks, blocks)
    errors = of_rows[0].new_empty(batch, heads, blocks)
    return output, torch.empty_like(output), *of_rows, before, bounds, errors.int(), errors


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
    inputs = query, key, value, scaling, real
    return _backward(d_output, d_integral, *inputs, Attended(*attended))


@_with_integral_backward.register_fake
def _(
    d_output: Tensor, d_integral: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any
) -> Any:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (query, key, value))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    query, key, value, ctx.scaling, real = inputs
    ctx.save_for_backward(query, key, value, real, *output)


def _gradients(ctx: Any, d_output: Tensor, d_integral: Tensor, *_: Any) -> Any:
    query, key, value, real, *attended = ctx.saved_tensors
    inputs = query, key, value, ctx.scaling, real
    return *_with_integral_backward(d_output, d_integral, *inputs, attended), None, None


_with_integral.register_autograd(_gradients, setup_context=_keep)


class _WithIntegral(torch.autograd.Function):
    """The same outside of graphs, where calling an operation takes longer."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        ctx.mark_non_differentiable(*output[2:])
        ctx.set_materialize_grads(False)
        return tuple(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, real, *attended = ctx.saved_tensors
        of_both = (
            torch.zeros_like(a) if d is None else d
            for d, a in zip(gradients[:2], attended[:2], strict=True)
        )
        inputs = query, key, value, ctx.scaling, real
        return *_backward(*of_both, *inputs, Attended(*attended)), None, None


def attention_with_integral(
    query: Tensor, key: Tensor, value: Tensor, scaling: float, real: Tensor | None
) -> Attended:
    """A₁ V and softmax(G) V of a text (DINT, arXiv 2501.17486, eq. 5 and 6), with their gradients.

    What the integral leaves out of a row's weights is at most ``errors`` of their sum.

    Args:
        query: of the signal heads, [batch, signal, rows, head_dim].
        key: [batch, key_heads, rows, head_dim].
        value: [batch, key_heads, rows, width].
        scaling: factor of the scores.
        real: [batch, rows], false for padding, whose rows are 0; None if there is none.
    """
    inputs = query, key, value, scaling, real
    if torch.compiler.is_compiling():
        return Attended(*_with_integral(*inputs))
    if not torch.is_grad_enabled():
        return _forward(*inputs)
    return Attended(*_WithIntegral.apply(*inputs))


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


@triton.jit(do_not_specialize=["columns", "length", "real_b"])
def _row_kernel(
    query, key, noise_query, noise_key, value, real, scores, outputs, marks, columns, length,
    key_heads, scale, q_b, q_h, k_b, k_h, k_n, nq_b, nq_h, nk_b, nk_h, nk_n, v_b, v_h, v_n, real_b,
    SIGNAL: tl.constexpr, NOISE: tl.constexpr, KEEP: tl.constexpr, PADDING: tl.constexpr,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_PADDED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some columns of a key head: what its signal heads and its noise heads read there."""
    split, parts = tl.program_id(0), tl.num_programs(0)
    b, kh = (tl.program_id(1) // key_heads).to(tl.int64), tl.program_id(1) % key_heads
    r, d, w = tl.arange(0, HEADS), tl.arange(0, PADDED), tl.arange(0, VALUE_PADDED)
    of_width, of_value = (d < WIDTH)[None, :], (w < VALUE_WIDTH)[None, :]
    place = query + b * q_b + (kh * SIGNAL + r)[:, None] * q_h + d[None, :]
    q = tl.load(place, (r < SIGNAL)[:, None] & of_width, 0.0)
    peak, total = tl.full([HEADS], -1e30, tl.float32), tl.zeros([HEADS], tl.float32)
    output = tl.zeros([HEADS, VALUE_PADDED], tl.float32)
    noise_peak, noise_total, noise_output = peak, total, output
    noise_q = q
    if NOISE:
        place = noise_query + b * nq_b + (kh * NOISE + r)[:, None] * nq_h + d[None, :]
        noise_q = tl.load(place, (r < NOISE)[:, None] & of_width, 0.0)
    for first in range(split * length, min(split * length + length, columns), BLOCK):
        j = first + tl.arange(0, BLOCK)
        inside, at = (j < columns)[:, None], j[:, None].to(tl.int64)
        seen = j < columns
        if PADDING:
            seen &= tl.load(real + b * real_b + j, j < columns, 0) != 0
        v = tl.load(value + b * v_b + kh * v_h + at * v_n + w[None, :], inside & of_value, 0.0)
        k = tl.load(key + b * k_b + kh * k_h + at * k_n + d[None, :], inside & of_width, 0.0)
        of_row, peak, total, output = _add_block(q, k, v, seen[None, :], peak, total, output, scale)
        if KEEP:
            heads = (b * key_heads + kh) * SIGNAL + r
            to = scores + heads[:, None] * columns + j[None, :]
            tl.store(to, of_row, (r < SIGNAL)[:, None] & (j < columns)[None, :])
        if NOISE:
            of_noise = noise_key + b * nk_b + kh * nk_h + at * nk_n + d[None, :]
            k = tl.load(of_noise, inside & of_width, 0.0)
            _, noise_peak, noise_total, noise_output = _add_block(
                noise_q, k, v, seen[None, :], noise_peak, noise_total, noise_output, scale
            )
    every = key_heads * (SIGNAL + NOISE)
    place = (b * every + kh * SIGNAL + r) * parts + split
    kept = r < SIGNAL
    tl.store(marks + 2 * place, peak, kept)
    tl.store(marks + 2 * place + 1, total, kept)
    to = outputs + place[:, None] * VALUE_WIDTH + w[None, :]
    tl.store(to, output, kept[:, None] & of_value)
    if NOISE:
        place = (b * every + key_heads * SIGNAL + kh * NOISE + r) * parts + split
        kept = r < NOISE
        tl.store(marks + 2 * place, noise_peak, kept)
        tl.store(marks + 2 * place + 1, noise_total, kept)
        to = outputs + place[:, None] * VALUE_WIDTH + w[None, :]
        tl.store(to, noise_output, kept[:, None] & of_value)


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
        at = value + b * v_b + (h // GROUP) * v_h + j[:, None].to(tl.int64) * v_n + w[None, :]
        v = tl.load(at, (j < columns)[:, None] & (w < WIDTH)[None, :], 0.0).to(tl.float32)
        output += tl.sum(weight[:, None] * v, 0)
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
    at = outputs + (place + part[:, None]) * WIDTH + w[None, :]
    output = tl.load(at, (part < parts)[:, None] & (w < WIDTH)[None, :], 0.0)
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
        at = integrals + place[:, None] * WIDTH + w[None, :]
        added = tl.load(at, (part < parts)[:, None] & (w < WIDTH)[None, :], 0.0)
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
    signal_query: Tensor,
    signal_key: Tensor,
    value: Tensor,
    noise_query: Tensor | None,
    noise_key: Tensor | None,
    lambda_: Tensor | None,
    gamma: Tensor | None,
    scaling: float,
    real: Tensor | None,
    sums: Tensor | None,
    weight: Tensor | None,
    eps: float,
    norm: bool,
    scale: float,
) -> tuple[Tensor, Tensor | None]:
    """A row after those in a cache, without gradients: attention, integral and ``combine``.

    Args:
        signal_query: see ``differential_attention.Projected``, also for the following.
        signal_key: with as many columns as there are tokens, this one included.
        value: likewise.
        noise_query: None without noise heads.
        noise_key: likewise.
        lambda_: likewise.
        gamma: weight of the integral; not read without sums.
        scaling: factor of the scores.
        real: [batch, columns], false for padding; None if there is none.
        sums: the sums of columns before this row, [batch, signal, at least columns - 1]; None
            without an integral.
        weight: see ``combine``, also for the following.
        eps: see ``combine``.
        norm: see ``combine``.
        scale: see ``combine``.

    Returns:
        [batch, 1, signal · width], and the sums of columns after this row.
    """
    batch, heads, _, width = signal_query.shape
    key_heads, columns, value_width = value.shape[1:]
    noise = 0 if noise_query is None else noise_query.shape[1]
    query, key, noise_q, noise_k, value = (
        _dense(signal_query if tensor is None else tensor)
        for tensor in (signal_query, signal_key, noise_query, noise_key, value)
    )
    length = max(PART, -(-columns // MAX_PARTS))
    length += -length % 64
    parts, every = -(-columns // length), heads + noise
    numbers = value.new_empty(
        (batch * every * (value_width + 2) + batch * heads * (value_width + 1)) * parts
        + (2 * batch * heads * columns if sums is not None else 0),
        dtype=torch.float32,
    )
    sizes = [batch * every * parts * n for n in (value_width, 2)]
    sizes += [batch * heads * parts * n for n in (value_width, 1)]
    rest = len(numbers) - sum(sizes)
    outputs, marks, integrals, totals, scores, new = numbers.split([*sizes, rest // 2, rest // 2])
    real_b = 0 if real is None else real.stride(0)
    mask = signal_query if real is None else real
    padded = max(16, triton.next_power_of_2(value_width))
    of_parts = triton.next_power_of_2(parts)
    _row_kernel[parts, batch * key_heads](
        query, key, noise_q, noise_k, value, mask, scores, outputs, marks, columns, length,
        key_heads, scaling, *query.stride()[:2], *_strides(key), *noise_q.stride()[:2],
        *_strides(noise_k), *_strides(value), real_b,
        SIGNAL=heads // key_heads, NOISE=noise // key_heads, KEEP=sums is not None,
        PADDING=real is not None, WIDTH=width, PADDED=max(16, triton.next_power_of_2(width)),
        VALUE_WIDTH=value_width, VALUE_PADDED=padded,
        HEADS=max(16, triton.next_power_of_2(max(heads, noise) // key_heads)), BLOCK=32,
        num_stages=2,
    )  # fmt: skip
    if sums is not None:
        if real is None:
            counts = torch.full((batch,), float(columns), device=value.device)
        else:
            counts = real.sum(-1).clamp_min(1).float()
        _row_integral_kernel[parts, batch * heads](
            value, mask, scores, marks, sums, counts, new, integrals, totals, columns, length,
            heads, every, *_strides(value), *sums.stride()[:2], real_b,
            GROUP=heads // key_heads, PADDING=real is not None, WIDTH=value_width, PADDED=padded,
            PARTS=of_parts, BLOCK=64,
        )  # fmt: skip
    out = value.new_empty(batch, 1, heads * value_width)
    weights = [
        outputs.view(-1, 1, 1, 1) if weight is None else weight for weight in (lambda_, gamma)
    ]
    of_heads = [s * (n > 1) for e in weights for s, n in zip(e.stride()[:2], e.shape, strict=False)]
    _row_end_kernel[(batch * heads,)](
        outputs, marks, integrals, totals, *weights, value if weight is None else weight, out,
        heads, every, parts, eps, scale, *of_heads,
        NOISE=noise > 0, INTEGRAL=sums is not None, NORM=norm, WEIGHT=weight is not None,
        GROUP=heads // max(noise, 1), WIDTH=value_width, PADDED=padded, PARTS=of_parts,
    )  # fmt: skip
    return out, None if sums is None else new.view(batch, heads, columns)
