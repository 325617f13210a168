"""Compression of the latents of multi-head latent attention (MLA), by what attention makes of them.

What a token caches is a latent of the values, and a rotary key. In the latent attention that equals
a grouped-query source, both are as wide as the source's cache (``conversions.mla``).

- **Keys.** A pair of coordinates that RoPE rotates is one complex number, and the keys of all KV
  heads at one frequency are a complex vector k. A complex matrix across heads commutes with the
  rotation, so k ≈ U F k is cached as F k, and U becomes a part of the queries: positions are
  treated exactly, and only components of keys are left out. Since LongRoPE's factors give every
  pair a frequency of its own, frequencies may have different numbers of components. (RoRoPE, in
  Meng et al., "TransMLA", arXiv 2502.07864, rotates by one real matrix for all frequencies.)
- **Values.** v ≈ Q P (v - m) + m, where m is the mean on a text. The latent's constants carry m.
- **Errors** are weighted by what reads them: values by ``o_proj``, keys by the queries of their
  heads. Weighted principal components of keys and values on the text are the best ones.

How much of the cache keys and values each get, is tried on the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.options import Option
from growkit.extras.calibration import (
    CALIBRATION,
    TOLERANCE,
    WINDOWS,
    Calibration,
    Projections,
    costs_of,
    smallest_rank,
    windows_of,
)
from growkit.families.model import Model
from growkit.results.growth_result import RankTried
from growkit.results.proof_result import MAX_VALUES, Spectrum

SHARES = (0.2, 0.35, 0.5, 0.65, 0.8)
"""Parts of the cache to try for keys."""

SEEN = 1e-12
"""Smallest eigenvalue of a weight, as a part of its largest; smaller ones count as zero."""


@dataclass(frozen=True)
class Shape:
    """The heads of grouped-query attention.

    Attributes:
        heads: number of query heads.
        kv_heads: number of KV heads.
        width: of a head.
    """

    heads: int
    kv_heads: int
    width: int

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

    def weight_of_keys(self, queries: Tensor) -> Tensor:
        """Squared size of the queries that read each KV head, [pairs, kv_heads].

        Args:
            queries: ``q_proj``, [heads · width, hidden].
        """
        sizes: Tensor = self.rotated(queries).abs().square().sum(-1)
        return sizes.reshape(self.pairs, self.kv_heads, -1).sum(-1)

    def weight_of_values(self, output: Tensor) -> Tensor:
        """What ``o_proj`` makes of values, a block for each KV head, [kv_heads · width] squared.

        Args:
            output: ``o_proj``, [hidden, heads · width].
        """
        read = output.double().unflatten(1, (self.kv_heads, -1, self.width)).permute(1, 2, 0, 3)
        blocks: Tensor = torch.block_diag(*(read.transpose(-1, -2) @ read).sum(1))
        return blocks


def _roots(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The square root of a symmetric matrix, and its inverse where it is not zero."""
    values, vectors = torch.linalg.eigh(weight)
    values = values.where(values > SEEN * values[-1], 0)
    roots = values.sqrt()
    inverse = (1 / roots).where(roots > 0, 0)
    return (vectors * roots) @ vectors.T, (vectors * inverse) @ vectors.T


@dataclass(frozen=True)
class Bases:
    """What is left of keys and values, and the latents that hold it; in float64.

    Attributes:
        frequencies: the pair of the source of each component of keys, [components].
        keys_down: F, [components, kv_heads], complex.
        keys_up: U, [components, kv_heads], complex.
        values_down: P, [latent, kv_heads · width].
        values_up: Q, with orthonormal columns, [kv_heads · width, latent].
        constant: the part of the values that is the same for all tokens, [kv_heads · width].
    """

    frequencies: Tensor
    keys_down: Tensor
    keys_up: Tensor
    values_down: Tensor
    values_up: Tensor
    constant: Tensor

    def keys(self, shape: Shape, rows: Tensor) -> Tensor:
        """The components of keys, [components, …] of ``k_proj`` or its bias; complex."""
        return torch.einsum("cg,cg...->c...", self.keys_down, shape.rotated(rows)[self.frequencies])

    def keys_left(self, shape: Shape, rows: Tensor) -> Tensor:
        """``k_proj`` or its bias, without what is left out."""
        spread = torch.einsum("cg,c...->cg...", self.keys_up, self.keys(shape, rows))
        left = torch.zeros_like(shape.rotated(rows)).index_add(0, self.frequencies, spread)
        return shape.heads_of(left)

    def queries(self, shape: Shape, rows: Tensor) -> Tensor:
        """Rows of queries that read the components, [heads · 2 · components, …]."""
        up = self.keys_up.conj().repeat_interleave(shape.heads // shape.kv_heads, 1)
        read = torch.einsum("ca,ca...->ac...", up, shape.rotated(rows)[self.frequencies])
        return torch.cat([read.real, read.imag], 1).flatten(0, 1)


@dataclass(frozen=True)
class Statistics:
    """What is known of a layer's attention on a text.

    Attributes:
        shape: its heads.
        keys: mean of k kᴴ with the weights of the heads, [pairs, kv_heads, kv_heads], complex.
        queries: what the queries of the text are larger than ``weight_of_keys``, [pairs].
        key_roots: square roots of the weights, [pairs, kv_heads].
        values: covariance of the values, with the weight of ``o_proj``.
        mean: of the values, [kv_heads · width].
        bias: of the values, [kv_heads · width].
        value_roots: the root of the weight, and its inverse.
    """

    shape: Shape
    keys: Tensor
    queries: Tensor
    key_roots: Tensor
    values: Tensor
    mean: Tensor
    bias: Tensor
    value_roots: tuple[Tensor, Tensor]

    @cached_property
    def components(self) -> tuple[Tensor, Tensor]:
        """Eigenvalues of the keys, the largest first, and eigenvectors as columns."""
        values, vectors = torch.linalg.eigh(self.keys)
        return values.flip(-1).clamp(min=0), vectors.flip(-1)

    @cached_property
    def directions(self) -> Tensor:
        """Eigenvectors of the values as columns, those of the largest eigenvalues first."""
        vectors: Tensor = torch.linalg.eigh(self.values).eigenvectors
        return vectors.flip(-1)

    @property
    def importance(self) -> Tensor:
        """The mean square of what each component adds to scores, [pairs, kv_heads]."""
        return self.components[0] * self.queries[:, None]

    def bases(self, pairs: Sequence[int], latent: int) -> Bases:
        """The best components.

        Args:
            pairs: how many components of keys are left of each frequency.
            latent: how many of values.
        """
        frequencies = torch.arange(len(pairs)).repeat_interleave(torch.tensor(pairs))
        numbers = torch.cat([torch.arange(count) for count in pairs])
        vectors = self.components[1][frequencies, :, numbers]
        roots = self.key_roots[frequencies]
        inverse = (1 / roots).where(roots > 0, 0)
        root, back = self.value_roots
        leading = self.directions[:, :latent]
        up, scale = torch.linalg.qr(back @ leading)
        down = scale @ leading.T @ root
        constant = self.mean - up @ (down @ (self.mean - self.bias))
        return Bases(frequencies, vectors.conj() * roots, vectors * inverse, down, up, constant)


def statistics(shape: Shape, inputs: Tensor, weights: Mapping[str, Tensor]) -> Statistics:
    """What is known of a layer's attention, by the second moment of its inputs.

    Args:
        shape: its heads.
        inputs: mean of x xᵀ, where x ends with a 1, [hidden + 1, hidden + 1].
        weights: ``q_proj``, ``k_proj`` and ``v_proj``, each with its bias as the last column, and
            ``o_proj``, in float64.
    """
    queries, keys = shape.rotated(weights["q_proj"]), shape.rotated(weights["k_proj"])
    weight = shape.weight_of_keys(weights["q_proj"][:, :-1])
    moment = inputs.to(queries.dtype)
    read = ((queries @ moment) * queries.conj()).sum((1, 2)).real
    weight = weight.where(weight > SEEN * weight.amax(-1, keepdim=True), 0)
    roots = weight.sqrt()
    keys = roots[..., None] * keys
    values = weights["v_proj"]
    mean = values @ inputs[:, -1]
    root, back = _roots(shape.weight_of_values(weights["o_proj"]))
    spread = root @ (values @ inputs @ values.T - mean[:, None] * mean) @ root
    total = weight.sum(-1)
    return Statistics(
        shape,
        keys @ moment @ keys.mH,
        (read / total).where(total > 0, 0),
        roots,
        spread,
        mean,
        values[:, -1],
        (root, back),
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
        pairs: how many components of keys are left of each frequency.
        latent: how many of values.
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
        return Calibration(self.source, self._windows(WINDOWS))

    def _statistics(self, layer: int) -> Statistics:
        prefix = ATTENTION.format(layer=layer)
        weights = {"o_proj": self.source.read(f"{prefix}o_proj.weight").double()}
        for name in ("q_proj", "k_proj", "v_proj"):
            weight = self.source.read(f"{prefix}{name}.weight").double()
            bias = f"{prefix}{name}.bias"
            has = bias in self.source.tensors
            last = self.source.read(bias).double() if has else torch.zeros_like(weight[:, 0])
            weights[name] = torch.cat([weight, last[:, None]], 1)
        return statistics(self.shape, self._calibration.mean(layer), weights)

    def bases(self, layer: int, way: LatentWay) -> Bases:
        """The bases of a layer."""
        return self._known(layer).bases(way.pairs, way.latent)

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
            return self._within(float(options["tolerance"]))
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
            if not (fits and 0 < latent <= self._full):
                raise InputError(
                    f"pairs {self._options['pairs']} do not fit rank {rank}; give "
                    f"{self.shape.pairs} numbers of at most {self.shape.kv_heads}, twice whose sum "
                    f"is less than {rank - self._constants} by 1 to {self._full}; or leave them out"
                )
            return LatentWay(rank, pairs, latent)
        ways = self._ways(rank)
        return min(ways, key=self._costs(ways).__getitem__) if len(ways) > 1 else ways[0]

    def _within(self, tolerance: float) -> tuple[LatentWay, list[RankTried]]:
        tried: dict[LatentWay, float] = {}

        def cheapest(rank: int) -> LatentWay | None:
            ways = [way for way in tried if way.rank == rank]
            return min(ways, key=tried.__getitem__, default=None)

        def costs(ranks: Sequence[int]) -> Mapping[int, float]:
            tried.update(self._costs([way for rank in ranks for way in self._ways(rank)]))
            best = {rank: cheapest(rank) for rank in ranks}
            return {rank: float("inf") if way is None else tried[way] for rank, way in best.items()}

        largest = 2 * self._full + self._constants - 1
        best, _ = smallest_rank(largest, costs, tolerance)
        way = cheapest(best)
        assert way is not None
        ranks = sorted({way.rank for way in tried})
        return way, [
            RankTried(
                layer=None,
                rank=rank,
                kl_nats_per_token=min(cost for way, cost in tried.items() if way.rank == rank),
                energy=None,
                chosen=rank == best,
            )
            for rank in ranks
        ]

    @cached_property
    def _order(self) -> list[int]:
        """The frequency of every component of keys, the most important of all layers first."""
        by_layer = [self._known(layer).importance for layer in range(self._layers)]
        order = torch.stack(by_layer).sum(0).flatten().argsort(descending=True, stable=True)
        return (order // self.shape.kv_heads).tolist()

    def _ways(self, rank: int) -> list[LatentWay]:
        """What is tried for a rank; nothing if it has no room for keys and values."""
        room = rank - self._constants
        smallest, largest = max(1, -(-(room - self._full) // 2)), min(self._full, room - 1) // 2
        if largest < smallest:
            return []
        counts = {min(max(round(share * room / 2), smallest), largest) for share in SHARES}
        ways = []
        for count in sorted(counts):
            kept = self._order[:count]
            pairs = tuple(kept.count(pair) for pair in range(self.shape.pairs))
            ways.append(LatentWay(rank, pairs, room - 2 * count))
        return ways

    def _costs(self, ways: Sequence[LatentWay]) -> Mapping[LatentWay, float]:
        def of_layer(layer: int) -> Callable[[LatentWay], Projections]:
            prefix, known = ATTENTION.format(layer=layer), self._known(layer)
            keys, values = (self.source.read(f"{prefix}{n}.weight") for n in ("k_proj", "v_proj"))
            bias = f"{prefix}k_proj.bias"
            shift = self.source.read(bias) if bias in self.source.tensors else None

            def projections(way: LatentWay) -> Projections:
                bases = known.bases(way.pairs, way.latent)
                left = bases.values_up @ (bases.values_down @ values.double())
                of_keys = None if shift is None else bases.keys_left(self.shape, shift)
                return {
                    "k_proj": (bases.keys_left(self.shape, keys), of_keys),
                    "v_proj": (left, bases.constant),
                }

            return projections

        ranks = sorted({way.rank for way in ways})
        title = f"trying rank {', '.join(map(str, ranks))}"
        return costs_of(self.source, self._windows(), ways, of_layer, title)


def judge_values(
    module: str, shape: Shape, sources: Sequence[Tensor], targets: Sequence[Tensor]
) -> tuple[bool, Spectrum]:
    """Check that the latent holds what is best for the directions into which it is expanded.

    Which directions they are depends on a text; what is best for them does not.

    Args:
        module: name of the projection.
        shape: the heads.
        sources: ``v_proj`` and ``o_proj``.
        targets: ``kv_b_proj`` and the latent's rows of ``kv_a_proj_with_mqa``.
    """
    (values, output), (expanded, latent) = sources, targets
    by_head = expanded.double().unflatten(0, (shape.kv_heads, -1, shape.width))
    up = by_head[:, 0].flatten(0, 1)[:, : len(latent)]
    root, _ = _roots(shape.weight_of_values(output))
    wide, tall, eps = root @ values.double(), root @ up, torch.finfo(latent.dtype).eps
    kept, spectrum = _judge(module, [(tall, wide, latent.double())], root, eps)
    return kept and bool((by_head == by_head[:, :1]).all()), spectrum


def judge_keys(
    module: str,
    shape: Shape,
    frequencies: Sequence[int],
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> tuple[bool, Spectrum]:
    """Check that the rotary key holds what is best for the queries that read it.

    Args:
        module: name of the projection.
        shape: the heads.
        frequencies: the pair of the source of each component of keys.
        sources: ``q_proj`` and ``k_proj``, with the bias of keys as last column if there is one.
        targets: rows of queries, as combined from ``q_proj``, and of the rotary key.
    """
    (queries, keys), (read, stored) = sources, targets
    at = torch.tensor(frequencies)
    parts = read.double().unflatten(0, (shape.heads, 2, -1))
    combined = torch.complex(parts[:, 0], parts[:, 1]).transpose(0, 1)  # [components, heads, …]
    own = shape.rotated(queries)[at]
    grouped = (len(at), shape.kv_heads, -1)
    products = (combined * own.conj()).reshape(grouped).sum(-1)
    sizes = own.abs().square().reshape(grouped).sum(-1)
    factors = (products / sizes).where(sizes > 0, 0)
    spread = factors.repeat_interleave(shape.heads // shape.kv_heads, 1)[..., None] * own
    eps = torch.finfo(stored.dtype).eps
    fits = float((combined - spread).norm()) <= 4 * eps * float(spread.norm())
    roots, wide = shape.weight_of_keys(queries).sqrt(), shape.rotated(keys)
    down = torch.complex(*stored.double().chunk(2))
    systems = []
    for pair in range(shape.pairs):
        root, here = roots[pair][:, None], at == pair
        systems.append((root * factors[here].conj().T, root * wide[pair], down[here]))
    kept, spectrum = _judge(module, systems, torch.eye(1), eps)
    return kept and fits, spectrum


def _judge(
    module: str,
    systems: Sequence[tuple[Tensor, Tensor, Tensor]],
    root: Tensor,
    eps: float,
) -> tuple[bool, Spectrum]:
    """Check least squares, each ‖up · down - matrix‖ over down, up to the rounding of both.

    Args:
        module: name of the projection.
        systems: up, matrix and down of each.
        root: what errors of up are multiplied by.
        eps: of the dtype that stores them.
    """
    kept, residual, values = True, 0.0, []
    for up, matrix, down in systems:
        best = up @ torch.linalg.pinv(up) @ matrix
        steep = torch.linalg.matrix_norm(torch.linalg.pinv(up), 2) if up.numel() else 0
        left = torch.linalg.matrix_norm(matrix - best)
        size = torch.linalg.matrix_norm(root, 2)
        limit = 4 * eps * (size * down.norm() + size * steep * left)
        kept &= bool((up @ down - best).norm() <= limit + 1e-13 * matrix.norm())
        residual += float((up @ down - matrix).norm().square())
        values.append(torch.linalg.svdvals(matrix))
    singular = torch.cat(values).sort(descending=True).values
    rank = sum(up.shape[1] for up, _, _ in systems)
    spectrum = Spectrum(
        module=module,
        singular_values=singular[:MAX_VALUES].tolist(),
        rank=rank,
        kept=min(rank, len(singular)),
        residual=residual,
        best=float(singular[rank:].square().sum()),
        unit="squared Frobenius norm, with the weights of what reads it",
    )
    return kept, spectrum
