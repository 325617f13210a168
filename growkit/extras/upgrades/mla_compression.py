"""Compression of the latents of multi-head latent attention (MLA), by what attention makes of them.

What a token caches is a latent, and a rotary key. A pair of coordinates that RoPE rotates is one
complex number, and the keys of all KV heads at one frequency are a complex vector k.

- **Rotated.** A complex matrix across heads commutes with the rotation, so k ≈ U F k is cached as
  F k, and U becomes a part of the queries. Since LongRoPE's factors give every pair a frequency of
  its own, frequencies may have different numbers of components. (RoRoPE, in Meng et al.,
  "TransMLA", arXiv 2502.07864, rotates by one real matrix for all frequencies.)
- **Not rotated.** What is left, k - U F k, goes into the latent without positions: its rotation by
  a distance is replaced by the mean c of the rotations that the text's attention makes, for every
  head and frequency, with which queries are multiplied. Heads that look nearby, and low
  frequencies, lose little: the mean square error is 1 - |c|² of what rotated keys would add.
- **Values** share the latent: (k - U F k, v - m) ≈ Q P (…), where m is the mean on the text, which
  a constant of the latent carries. A constant of keys changes no attention.
- **Errors** of values weigh as ``o_proj`` reads them. Those of a head's scores weigh as what its
  values differ on the text (as the weights of tokens change, so does their mean). Tokens weigh as
  the squares of their weights in attention. Weighted principal components are the best ones.

How much of the cache the rotary key gets, is tried on the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.options import Option
from growkit.extras.calibration import (
    CALIBRATION,
    TOLERANCE,
    WINDOWS,
    Calibration,
    Replacement,
    costs_of,
    moment_of,
    search_ranks,
    windows_of,
)
from growkit.model.model import Model
from growkit.results.growth_result import RankTried
from growkit.results.proof_result import MAX_VALUES, Spectrum

SHARES = (0.2, 0.25, 0.3, 0.35, 0.45)
"""Parts of the cache to try for the rotary key."""

OF_SCORES = 0.25
"""Weight of scores in the latent, beside values: softmax saturates. Measured on small models."""
UNSEEN = 1e-6
"""How much every direction of inputs counts, as a part of the mean over all; texts miss some."""

LEAST_WEIGHT = 1e-8
"""Smallest weight of an error, as a part of a layer's largest."""


@dataclass(frozen=True)
class Shape:
    """The heads of grouped-query attention.

    Attributes:
        heads: number of query heads.
        kv_heads: number of KV heads.
        width: of a head.
        scale: by what products of queries and keys are multiplied.
    """

    heads: int
    kv_heads: int
    width: int
    scale: float

    @property
    def group(self) -> int:
        """Number of query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def pairs(self) -> int:
        """Number of pairs of coordinates that RoPE rotates."""
        return self.width // 2

    def rotated(self, rows: Tensor) -> Tensor:
        """Complex numbers of the pairs of heads, [pairs, heads, …] of [heads · width, …]."""
        halves = rows.double().unflatten(0, (-1, 2, self.pairs))
        return torch.complex(halves[:, 0], halves[:, 1]).transpose(0, 1)

    def heads_of(self, pairs: Tensor) -> Tensor:
        """The inverse of ``rotated``."""
        halves = torch.stack([pairs.real, pairs.imag]).transpose(0, 2)  # [heads, pairs, 2, …]
        return halves.transpose(1, 2).flatten(0, 2)


def _floored(weights: Tensor) -> Tensor:
    """Weights of errors, none of which is zero."""
    largest = weights.amax()
    return weights.clamp(min=LEAST_WEIGHT * largest) if largest > 0 else torch.ones_like(weights)


def _roots(weights: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a matrix, and its inverse.

    Args:
        weights: the blocks on its diagonal, symmetric, [blocks, size, size].
    """
    values, vectors = torch.linalg.eigh(weights)
    scales = _floored(values).sqrt()[:, None]
    root, inverse = (
        torch.block_diag(*(vectors * scale @ vectors.mT)) for scale in (scales, 1 / scales)
    )
    return root, inverse


@dataclass(frozen=True)
class Bases:
    """What is left of keys and values, and the latents that hold it; in float64.

    Attributes:
        frequencies: the pair of the source of each component of keys, [components].
        keys_down: F, [components, kv_heads], complex.
        keys_up: U, [components, kv_heads], complex.
        turns: c, [pairs, heads], complex.
        down: P, [latent, 2 · kv_heads · width], for keys, then values.
        up: Q, [2 · kv_heads · width, latent].
        constant: the part of the values that is the same for all tokens, [kv_heads · width].
    """

    frequencies: Tensor
    keys_down: Tensor
    keys_up: Tensor
    turns: Tensor
    down: Tensor
    up: Tensor
    constant: Tensor

    def keys(self, shape: Shape, rows: Tensor) -> Tensor:
        """The components of keys, [components, …] of ``k_proj`` or its bias; complex."""
        return torch.einsum("cg,cg...->c...", self.keys_down, shape.rotated(rows)[self.frequencies])

    def rotated(self, shape: Shape, rows: Tensor) -> Tensor:
        """The part of ``k_proj`` or its bias that is rotated, U F k."""
        components = self.keys(shape, rows)
        return _spread(shape, self.frequencies, self.keys_up, components)

    def latent(self, shape: Shape, keys: Tensor, values: Tensor) -> Tensor:
        """Rows of the latent, [latent, hidden] of ``k_proj`` and ``v_proj``."""
        return self.down @ torch.cat([keys - self.rotated(shape, keys), values])

    def queries(self, shape: Shape, rows: Tensor) -> Tensor:
        """Rows of queries: of each head those that read the latent, then the rotary key.

        Args:
            shape: the heads.
            rows: ``q_proj``, [heads · width, …].

        Returns:
            [heads · (width + 2 · components), …].
        """
        own = shape.rotated(rows)
        up = self.keys_up.conj().repeat_interleave(shape.heads // shape.kv_heads, 1)
        read = torch.einsum("ca,ca...->ac...", up, own[self.frequencies])
        turned = shape.heads_of(torch.einsum("pa,pa...->pa...", self.turns, own))
        halves = turned.unflatten(0, (shape.heads, shape.width)), read.real, read.imag
        return torch.cat(halves, 1).flatten(0, 1)


def _spread(shape: Shape, frequencies: Tensor, up: Tensor, components: Tensor) -> Tensor:
    """Keys of components, [kv_heads · width, …] of [components, …]."""
    spread = torch.einsum("cg,c...->cg...", up, components)
    pairs = spread.new_zeros(shape.pairs, *spread.shape[1:])
    return shape.heads_of(pairs.index_add(0, frequencies, spread))


@dataclass(frozen=True)
class Statistics:
    """What is known of a layer's attention on a text.

    Attributes:
        shape: its heads.
        queries: ``q_proj``, with its bias as last column, [heads · width, hidden + 1].
        rows: ``k_proj`` and ``v_proj``, with their biases as last column, [2 · kv_heads · width,
            hidden + 1].
        inputs: mean of x xᵀ, where x ends with a 1, weighted by attention, [hidden + 1, hidden +
            1].
        turns: the mean rotation c of every head, [pairs, heads], complex.
        losses: square root of what keys lose if they are not rotated, [pairs, kv_heads].
        roots: the root of what errors of keys and values in the latent weigh, and its inverse.
    """

    shape: Shape
    queries: Tensor
    rows: Tensor
    inputs: Tensor
    turns: Tensor
    losses: Tensor
    roots: tuple[Tensor, Tensor]

    @cached_property
    def components(self) -> tuple[Tensor, Tensor]:
        """How much each component of keys loses if it is not rotated, and eigenvectors as columns.

        The first is [pairs, kv_heads], the largest of each pair first.
        """
        keys = self.losses[..., None] * self.shape.rotated(self.rows.chunk(2)[0])
        moments = keys @ self.inputs.to(keys.dtype) @ keys.mH
        values, vectors = torch.linalg.eigh(moments)
        return values.flip(-1).clamp(min=0), vectors.flip(-1)

    def bases(
        self,
        pairs: Sequence[int],
        latent: int,
        stored: Callable[[Tensor], Tensor] = lambda up: up,
    ) -> Bases:
        """The best components.

        Args:
            pairs: how many components of keys are rotated with each frequency.
            latent: how many numbers of keys and values the latent holds.
            stored: maps Q to what the target's dtype can hold; P is the best for that.
        """
        frequencies = torch.arange(len(pairs)).repeat_interleave(torch.tensor(pairs))
        numbers = torch.cat([torch.arange(count) for count in pairs])
        vectors = self.components[1][frequencies, :, numbers]
        losses = self.losses[frequencies]
        keys_down, keys_up = vectors.conj() * losses, vectors / losses
        keys, values = self.rows.chunk(2)
        components = torch.einsum(
            "cg,cg...->c...", keys_down, self.shape.rotated(keys)[frequencies]
        )
        rotated = _spread(self.shape, frequencies, keys_up, components)
        left = torch.cat([keys - rotated, values])
        root, back = self.roots
        mean, wide = left @ self.inputs[:, -1], root @ left
        moment = wide @ self.inputs @ wide.T - torch.outer(root @ mean, root @ mean)
        linear = wide[:, :-1]  # biases are a part of the constant
        moment += UNSEEN * self.inputs.trace() / len(self.inputs) * (linear @ linear.T)
        directions = torch.linalg.eigh(moment).eigenvectors.flip(-1)[:, :latent]
        up = stored(torch.linalg.qr(back @ directions).Q)
        seen = root @ up
        down = torch.linalg.pinv(seen) @ root
        constant = (mean - up @ (down @ (mean - left[:, -1])))[len(keys) :]
        return Bases(frequencies, keys_down, keys_up, self.turns, down, up, constant)


def record_attention(
    module: Any, inputs: Tensor, arguments: Mapping[str, Any], output: Any
) -> Tensor:
    """What ``statistics`` needs to know of a layer on a text (``calibration.Record``).

    Returns:
        For squares of weights in attention: Σ e^{iωΔ} of each pair and head; their sum for each
        head; and Σ x xᵀ, where x ends with a 1; all in one dimension, as real numbers.
    """
    squares = output[1].double().square()  # [batch, heads, queries, keys]
    rows = torch.nn.functional.pad(inputs.double(), (0, 1), value=1.0)
    cos, sin = (part.double().chunk(2, -1)[0] for part in arguments["position_embeddings"])
    waves = torch.complex(cos, sin)
    waves = (waves / waves.abs()).expand(len(squares), -1, -1)
    turned = torch.einsum("bhts,bsp->bhtp", squares.to(waves.dtype), waves.conj())
    turns = torch.view_as_real(torch.einsum("bhtp,btp->ph", turned, waves))
    sums = turns, squares.sum((0, 2, 3)), moment_of(rows, squares.sum((1, 2)))
    return torch.cat([part.flatten() for part in sums])


def statistics(shape: Shape, sums: Tensor, weights: Mapping[str, Tensor]) -> Statistics:
    """What is known of a layer's attention, by what was recorded on a text.

    Args:
        shape: its heads.
        sums: see ``record_attention``.
        weights: ``q_proj``, ``k_proj`` and ``v_proj``, each with its bias as the last column, and
            ``o_proj``, in float64.
    """
    queries, values, size = weights["q_proj"], weights["v_proj"], weights["q_proj"].shape[1]
    turned, totals, inputs = sums.split([2 * shape.pairs * shape.heads, shape.heads, size**2])
    turns = torch.view_as_complex(turned.view(shape.pairs, shape.heads, 2)) / totals
    inputs = inputs.view(size, size)
    inputs = inputs / inputs[-1, -1]
    read = weights["o_proj"].unflatten(1, (shape.heads, shape.width)).transpose(0, 1)
    of_values = read.mT @ read  # [heads, width, width]
    centred = inputs - torch.outer(inputs[-1], inputs[-1])
    by_head = values.unflatten(0, (shape.kv_heads, -1)).repeat_interleave(shape.group, 0)
    spread = torch.einsum("axy,ayh,hk,axk->a", of_values, by_head, centred, by_head)
    by_head = queries.unflatten(0, (shape.heads, -1))
    sizes = spread.sqrt()[:, None, None] * by_head
    own = shape.rotated(sizes.flatten(0, 1))
    moment = inputs.to(own.dtype)
    lost = 1 - turns.abs().square()
    losses = lost * torch.einsum("pah,hk,pak->pa", own, moment, own.conj()).real
    by_head = shape.heads_of(turns[..., None] * own).unflatten(0, (shape.heads, -1))
    of_keys = OF_SCORES * shape.scale**2 * (by_head @ inputs @ by_head.mT)
    blocks = torch.cat([of_keys, of_values]).unflatten(0, (-1, shape.group)).sum(1)
    return Statistics(
        shape,
        queries,
        torch.cat([weights["k_proj"], values]),
        inputs,
        turns,
        _floored(losses.unflatten(1, (-1, shape.group)).sum(-1)).sqrt(),
        _roots(blocks),
    )


ATTENTION = "model.layers.{layer}.self_attn."


def _is_rank(text: str) -> bool:
    return text == "auto" or (text.isdecimal() and int(text) > 0)


def _is_counts(text: str) -> bool:
    return all(count.isdecimal() for count in text.split(","))


OPTIONS = (
    Option(
        "rank",
        "how many numbers a layer of mla caches for a token (default: enough to be exact), or the "
        "rank of the updates of shared-diff, also one per layer; or auto",
        form="N|auto",
        accepts=_is_rank,
    ),
    TOLERANCE,
    CALIBRATION,
    Option(
        "pairs",
        "how many pairs of the rotary key have each frequency of the source (default: what costs "
        "least on the text)",
        form="N,N,…",
        accepts=_is_counts,
    ),
)


@dataclass(frozen=True)
class LatentWay:
    """One way to compress.

    Attributes:
        rank: how many numbers a layer caches for a token.
        pairs: how many components of keys are rotated with each frequency.
        latent: how many numbers of keys and values the latent holds.
    """

    rank: int
    pairs: tuple[int, ...]
    latent: int


class LatentSearch:
    """The choice of a way to compress one model, by its options or by a search.

    Args:
        source: the model.
        shape: its heads.
        layers: number of layers.
        constants: how many numbers of a latent are constants.
        options: values of ``OPTIONS``.
    """

    def __init__(
        self,
        source: Model,
        shape: Shape,
        layers: int,
        constants: int,
        options: Mapping[str, str],
    ) -> None:
        self.source, self.shape = source, shape
        self._layers, self._constants, self._options = layers, constants, options
        self._full = shape.kv_heads * shape.width
        self._known = lru_cache(2)(self._statistics)  # layers are written one after the other

    def _windows(self, count: int | None = None) -> Sequence[Tensor]:
        return windows_of(self.source, self._options.get("calibration"), count)

    @cached_property
    def _calibration(self) -> Calibration:
        from growkit.engine.kernels import EAGER  # imports torch

        return Calibration(self.source, self._windows(WINDOWS), record_attention, EAGER)

    def _statistics(self, layer: int) -> Statistics:
        prefix = ATTENTION.format(layer=layer)
        weights = {"o_proj": self.source.read(f"{prefix}o_proj.weight").double()}
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = self.source.read(f"{prefix}{name}.weight").double()
            bias = f"{prefix}{name}.bias"
            has = bias in self.source.tensors
            last = self.source.read(bias).double() if has else torch.zeros_like(weight[:, 0])
            weights[name] = torch.cat([weight, last[:, None]], 1)
        return statistics(self.shape, self._calibration.sums(layer), weights)

    def bases(self, layer: int, way: LatentWay, stored: Callable[[Tensor], Tensor]) -> Bases:
        """The bases of a layer, see ``Statistics.bases``."""
        return self._known(layer).bases(way.pairs, way.latent, stored)

    def settle(self) -> tuple[LatentWay, list[RankTried]]:
        """Choose the way to compress; return it with all ranks that were tried.

        Raises:
            InputError: the options contradict each other, or no rank keeps the tolerance.
        """
        options, auto = self._options, self._options["rank"] == "auto"
        if auto != ("tolerance" in options):
            raise InputError("rank auto and a tolerance need each other; give both, or a rank")
        if auto and "pairs" in options:
            raise InputError("pairs need a rank; leave them out, or give the rank in place of auto")
        if auto:
            largest = 2 * self._full + self._constants - 1
            return search_ranks(largest, float(options["tolerance"]), self._ways, self._costs)
        return self._with_rank(int(options["rank"])), []

    def _with_rank(self, rank: int) -> LatentWay:
        smallest, largest = self._constants + 3, 2 * self._full + self._constants - 1
        if not smallest <= rank <= largest:
            raise InputError(
                f"rank {rank} is out of range; {self.source.where()} can have latents of "
                f"{smallest} to {largest} numbers, or exact ones without rank"
            )
        if "pairs" in self._options:
            pairs = tuple(map(int, self._options["pairs"].split(",")))
            latent = rank - self._constants - 2 * sum(pairs)
            fits = len(pairs) == self.shape.pairs and 0 < max(pairs) <= self.shape.kv_heads
            if not (fits and latent > 0):
                raise InputError(
                    f"pairs {self._options['pairs']} do not fit rank {rank}; give "
                    f"{self.shape.pairs} numbers of at most {self.shape.kv_heads}, not all 0, "
                    f"twice whose sum is less than {rank - self._constants}; or leave them out"
                )
            return LatentWay(rank, pairs, latent)
        ways = self._ways(rank)
        return min(ways, key=self._costs(ways).__getitem__) if len(ways) > 1 else ways[0]

    @cached_property
    def _order(self) -> list[int]:
        """The frequency of every component of keys, the most important of all layers first."""
        by_layer = [self._known(layer).components[0] for layer in range(self._layers)]
        order = torch.stack(by_layer).sum(0).flatten().argsort(descending=True, stable=True)
        return (order // self.shape.kv_heads).tolist()

    def _ways(self, rank: int) -> list[LatentWay]:
        """What is tried for a rank; nothing if it has no room for keys and values."""
        room = rank - self._constants
        largest = min(self._full, room - 1) // 2
        if largest < 1:
            return []
        ways = []
        for count in sorted({min(max(round(share * room / 2), 1), largest) for share in SHARES}):
            rotated = self._order[:count]
            pairs = tuple(rotated.count(pair) for pair in range(self.shape.pairs))
            ways.append(LatentWay(rank, pairs, room - 2 * count))
        return ways

    def _costs(self, ways: Sequence[LatentWay]) -> Mapping[LatentWay, float]:
        def of_layer(layer: int) -> Callable[[LatentWay], Replacement]:
            known = self._known(layer)
            return lambda way: _replacement(known, known.bases(way.pairs, way.latent))

        ranks = sorted({way.rank for way in ways})
        title = f"trying rank {', '.join(map(str, ranks))}"
        return costs_of(self.source, self._windows(), ways, of_layer, title)


def _replacement(known: Statistics, bases: Bases) -> Replacement:
    """What computes the same as latents, with the source's class."""
    shape = known.shape
    keys, values = known.rows.chunk(2)
    rotated = bases.rotated(shape, keys)
    left, expanded = (bases.up @ bases.latent(shape, keys, values)).chunk(2)
    turned = shape.heads_of(bases.turns[..., None] * shape.rotated(known.queries))

    def scores(inputs: Tensor) -> Tensor:
        rows = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
        queries, products = (rows @ part.T.to(rows) for part in (turned, left))
        queries = queries.unflatten(-1, (shape.kv_heads, shape.group, shape.width))
        by_head = products.unflatten(-1, (shape.kv_heads, shape.width))
        return torch.einsum("btgad,bsgd->bgats", queries, by_head).flatten(1, 2)

    projections = {
        "k_proj": (rotated[:, :-1], rotated[:, -1]),
        "v_proj": (expanded[:, :-1], bases.constant),
    }
    return Replacement(projections, scores)


def check_latents(
    module: str,
    shape: Shape,
    frequencies: Sequence[int],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> tuple[bool, Spectrum]:
    """Check that latents hold exactly what is in the space into which they are expanded.

    Which space it is depends on a text; that nothing in it is lost does not.

    Args:
        module: name of the attention.
        shape: the heads.
        frequencies: the pair of the source of each component of keys.
        sources: ``q_proj``; ``k_proj``, with its bias as last column if it has one; and
            ``v_proj``.
        targets: rows of queries, as combined from ``q_proj``; of the rotary key, with biases if
            keys have some; of the latent; and of Q, for every head, [heads · 2 · width, latent].
    """
    (queries, keys, values), (read, rotary, latent, expanded) = sources, targets
    eps = max(torch.finfo(rotary.dtype).eps, 1e-11)
    parts = read.double().unflatten(0, (shape.heads, -1))
    own, at = shape.rotated(queries), torch.tensor(frequencies)
    turned = shape.rotated(parts[:, : shape.width].flatten(0, 1))
    components = torch.complex(*parts[:, shape.width :].chunk(2, 1)).transpose(0, 1)
    turns, fits = _factors(turned, own, eps)
    factors, combined = _factors(components, own[at], eps, shape.group)
    fits &= combined and bool((turns.abs() <= 1 + 4 * eps).all())
    up = expanded.double().unflatten(0, (shape.kv_heads, shape.group, -1))
    fits &= bool((up == up[:, :1]).all())
    of_keys = torch.complex(*rotary.double().chunk(2))
    by_pair = shape.rotated(keys)
    systems = []
    for pair in sorted(set(frequencies)):
        here = factors[at == pair].conj().T
        scales = here.norm(dim=1, keepdim=True).clamp(min=eps * float(here.norm()))
        rows = by_pair[pair] / scales  # each KV head of the size that its factors have
        systems.append((here / scales, rows, of_keys[at == pair], rows))
    inputs = values.shape[1]
    rotated = _spread(shape, at, factors.conj(), of_keys[:, :inputs])
    rows = torch.cat([keys[:, :inputs], values]).double()
    left = torch.cat([keys[:, :inputs] - rotated, values.double()])
    shared = torch.cat([half.flatten(0, 1) for half in up[:, 0].chunk(2, 1)])
    systems.append((shared, left, latent.double(), rows))
    kept, spectrum = _judge(module, systems, eps)
    return kept and fits, spectrum


def _factors(rows: Tensor, own: Tensor, eps: float, group: int = 1) -> tuple[Tensor, bool]:
    """By what the queries of every group of heads are multiplied; and whether that is all.

    Args:
        rows: of the target, [components, heads, hidden], complex.
        own: of the source, of the same shape.
        eps: of the dtype that stores them.
        group: number of heads that share a factor.

    Returns:
        The factors, [components, groups].
    """
    grouped = (len(own), -1, group)
    products, sizes = ((one * own.conj()).sum(-1).reshape(grouped).sum(-1) for one in (rows, own))
    factors = (products / sizes).where(sizes.real > 0, 0)
    spread = factors.repeat_interleave(group, 1)[..., None] * own
    return factors, float((rows - spread).norm()) <= 4 * eps * float(spread.norm())


def _judge(
    module: str, systems: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], eps: float
) -> tuple[bool, Spectrum]:
    """Check that down = D · matrix, where D · up is 1 on down, up to rounding, for some D.

    Args:
        module: name of the attention.
        systems: up, matrix, down, and what the matrix is the rest of.
        eps: of the dtype that stores them.
    """
    kept, residual, values = True, 0.0, []
    for up, matrix, down, rows in systems:
        residual += float((up @ down - matrix).norm().square())
        values.append(torch.linalg.svdvals(matrix))
        factor = down @ torch.linalg.pinv(matrix, atol=eps * float(rows.norm()))
        steep = torch.linalg.matrix_norm(factor, 2)
        limit = 4 * eps * (down.norm() * (1 + steep * up.norm()) + steep * rows.norm())
        kept &= bool((factor @ matrix - down).norm() <= limit)
        kept &= bool((factor @ (up @ down) - down).norm() <= limit)
    singular = torch.cat(values).sort(descending=True).values
    rank = sum(up.shape[1] for up, *_ in systems)
    spectrum = Spectrum(
        module=module,
        singular_values=singular[:MAX_VALUES].tolist(),
        rank=rank,
        kept=min(rank, len(singular)),
        residual=residual,
        best=float(singular[rank:].square().sum()),
        unit="squared Frobenius norm",
    )
    return kept, spectrum
