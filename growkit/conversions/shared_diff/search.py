"""The search for ranks: as asked for, or the smallest that keep a promise.

What a model's attention reads on real text, and what changed projections cost, come from streaming
the model out of its files (``growkit.engine.layerwise``), so that it may be larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from operator import add
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.limits import within
from growkit.base.progress import Advance, current, nothing
from growkit.base.settings import Settings
from growkit.base.tensors import TORCH_NAMES, Config, Weights, main_dtype, total_bytes
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import shared_keys
from growkit.families.llama import ATTENTION
from growkit.results.operation import RankTried

if TYPE_CHECKING:
    from torch import Tensor, nn

    from growkit.engine.calls import Spool
    from growkit.engine.layerwise import Layerwise

WINDOWS = 64
"""Windows of the text from which second moments are taken: 32,768 tokens of 512 each."""

RANKS_PER_PASS = 8
"""Ranks that are tried in one pass over the model."""

SHRINKAGES = (0.0, 0.3, 0.6, 0.9, 0.97, 1.0)
"""From the text alone to all inputs alike."""


@dataclass(frozen=True)
class Way:
    """One way to share.

    Attributes:
        ranks: of the updates, layer by layer.
        shrinkage: see ``Calibration``; 1 where all inputs weigh the same.
    """

    ranks: tuple[int, ...]
    shrinkage: float


def smallest_rank(
    most: int, costs: Callable[[Sequence[int]], Mapping[int, float]], tolerance: float
) -> tuple[int, dict[int, float]]:
    """The rank that keeps a tolerance, where the one below does not.

    Costs fall as ranks rise, but for noise: ranks are tried in a geometric ladder, then between the
    last one that fails and the first one that keeps it, until these are neighbours.

    Args:
        most: the largest rank that makes sense.
        costs: takes ranks, gives the cost of each.
        tolerance: the most that a rank may cost.

    Returns:
        The rank, and the cost of every rank that was tried.

    Raises:
        InputError: no rank keeps the tolerance.
    """
    tried: dict[int, float] = {}
    below, above = 0, most + 1
    while above - below > 1:
        between = range(below + 1, above)
        ranks = list(between[:: -(-len(between) // RANKS_PER_PASS)])
        if above > most:  # the first time: from one end to the other
            steps = {round(most ** (i / (RANKS_PER_PASS - 1))) for i in range(RANKS_PER_PASS)}
            ranks = sorted(steps | {1, most})
        tried |= costs(ranks)
        kept = [rank for rank, cost in tried.items() if within(cost, tolerance)]
        if not kept:
            raise InputError(
                f"no rank keeps a tolerance of {tolerance:g}: rank {most} still costs "
                f"{tried[most]:.3g}; pass a wider --dtype or a larger tolerance"
            )
        above = min(kept)
        below = max((rank for rank in tried if rank < above), default=0)
    return above, dict(sorted(tried.items()))


@dataclass(frozen=True)
class Heads:
    """The heads of a projection, signal heads first, and which of them share a base.

    The scope is ``head``, a noise head with the signal heads of its group; ``layer``, all signal
    heads together with all noise heads together; or ``all_heads``, every head of a layer with every
    other. Cang et al., "Shared DIFF Transformer", equations 3 and 4 and section 2.4.

    Attributes:
        signal: number of signal heads.
        noise: number of noise heads.
        scope: ``head``, ``layer`` or ``all_heads``.
    """

    signal: int
    noise: int
    scope: str

    def members(self, weight: Tensor) -> Tensor:
        """Matrices by the base they share: [groups, members, hidden, outputs].

        Args:
            weight: [(signal + noise) · head_dim, hidden].
        """
        hidden = weight.shape[1]
        if self.scope == "layer":
            return weight.view(1, 2, -1, hidden).transpose(-1, -2)
        heads = weight.view(self.signal + self.noise, -1, hidden).transpose(1, 2)
        if self.scope == "all_heads":
            return heads[None]
        ratio = self.signal // self.noise
        groups = heads[: self.signal].unflatten(0, (self.noise, ratio))
        return torch.cat([groups, heads[self.signal :, None]], dim=1)

    def ranks(self, shape: Sequence[int]) -> tuple[int, int]:
        """The rank of updates that hold any matrices, and the largest with fewer elements.

        Fewer than the projection: a base and ``members`` updates, r · (inputs + outputs) each, for
        ``members`` matrices. It is 0 if no rank has fewer.

        Args:
            shape: of the projection, [(signal + noise) · head_dim, hidden].
        """
        rows, inputs = shape
        heads = self.signal + self.noise
        members, outputs = 2, rows // 2
        if self.scope != "layer":
            members = heads if self.scope == "all_heads" else self.signal // self.noise + 1
            outputs = rows // heads
        most = min(inputs, outputs)
        saving = ((members - 1) * inputs * outputs - 1) // (members * (inputs + outputs))
        return (most + 1) // 2 if members == 2 else most, saving

    def factorise(
        self,
        weight: Tensor,
        rank: int,
        moment: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best parts of a projection: base, down and up, as ``growkit.modeling`` stores them.

        Args:
            weight: [(signal + noise) · head_dim, hidden], in float64.
            rank: of the updates.
            moment: second moment of the inputs, [hidden, hidden]; None to weigh all inputs equally.
            dtype: of the rounded parts, float64 by default; the base is that of the rounded
                updates.
        """
        from growkit.conversions.shared_diff.low_rank import share

        dtype = dtype or weight.dtype
        found = share(self.members(weight), rank, moment)
        down = self._by_head(found.down).transpose(-1, -2).reshape(-1, weight.shape[1]).to(dtype)
        up = self._by_head(found.up).reshape(-1, rank).to(dtype)
        return self.best_base(weight, down.double(), up.double()).to(dtype), down, up

    def best_base(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The mean of what updates leave over; all in float64, the same bits on every machine.

        Args:
            weight: the projection, [(signal + noise) · head_dim, hidden].
            down: of all updates, as stored.
            up: of all updates, as stored.
        """
        rests = self.members(self._updated(weight, down, -up))
        mean = reduce(add, rests.unbind(1)) / rests.shape[1]
        return mean.transpose(-1, -2).reshape(-1, weight.shape[1])

    def multiplied_out(self, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The projection that parts represent, [(signal + noise) · head_dim, hidden].

        All in float64, the same bits on every machine.
        """
        hidden = base.shape[1]
        bases = base.view(-1, up.shape[0] // (self.signal + self.noise), hidden)
        counts = (self.signal, self.noise)
        repeated = torch.cat([bases.repeat_interleave(n // len(bases), 0) for n in counts])
        return self._updated(repeated.reshape(-1, hidden), down, up)

    def _updated(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The projection plus the updates.

        Products are rounded, then added in the order of the rank. A product of matrices would be
        summed in another order, with other last bits, by every library and number of threads.
        """
        counts = (self.signal, self.noise)
        updated = weight.clone()
        heads = updated.view(sum(counts), -1, weight.shape[1])
        ups = up.view(sum(counts), -1, up.shape[1])
        downs = down.view(-1, up.shape[1], weight.shape[1])
        if self.scope == "layer":
            downs = torch.cat([downs[i : i + 1].expand(n, -1, -1) for i, n in enumerate(counts)])
        for head, tall, wide in zip(heads, ups, downs, strict=True):
            for column, row in zip(tall.unbind(1), wide, strict=True):
                head += column[:, None] * row
        return updated

    def _by_head(self, parts: Tensor) -> Tensor:
        """[groups, members, …] to [heads, …], signal heads first."""
        if self.scope != "head":
            return parts[0]
        return torch.cat([parts[:, :-1].flatten(0, 1), parts[:, -1]])


def weight_of(projection: str, layer: int) -> str:
    """The name of a projection's weight."""
    return f"{ATTENTION.format(layer=layer)}{projection}.weight"


def projections(config: Config) -> dict[str, Heads]:
    """The projections that a model shares, each with its heads."""
    sizes, scope = DIFF.sizes(config | {"qk_projection": "full"}), config["shared_scope"]
    found = {"q_proj": Heads(sizes["signal_heads"], sizes["noise_heads"], scope)}
    if shared_keys(config):
        found["k_proj"] = Heads(sizes["kv_heads"], sizes["kv_heads"], scope)
    return found


class Search:
    """How the projections of one model are shared: as asked for, or as searched for.

    Attributes:
        layers: number of layers.
        projections: the heads of every projection that is shared.
        tried: the ranks that were tried layer by layer.
    """

    def __init__(self, source: Weights, config: Config, options: Mapping[str, str]) -> None:
        self._source, self._options = source, options
        self.layers: int = config["num_hidden_layers"]
        self.projections = projections(config | {"shared_scope": options["scope"]})
        self.tried: list[RankTried] = []
        shapes = {name: source.tensors[weight_of(name, 0)].shape for name in self.projections}
        ranks = [heads.ranks(shapes[name]) for name, heads in self.projections.items()]
        self._full_rank, self._saving_rank = (max(each) for each in zip(*ranks, strict=True))
        self._shrinkages: Sequence[float] = (1.0,)
        if "calibration" in options:
            given = options.get("shrinkage")
            self._shrinkages = SHRINKAGES if given is None else (float(given),)

    @cached_property
    def _calibration(self) -> Calibration:
        return Calibration(self._source, self._windows(WINDOWS))

    def _windows(self, count: int | None = None) -> Sequence[Tensor]:
        from growkit.engine.prompts import make_prompts

        text = Settings(self._options.get("calibration"), count)
        return make_prompts(text, Path(self._source.where()), self._source.config).windows

    def moment(self, layer: int, shrinkage: float) -> Tensor | None:
        """The second moment of a layer's inputs; None if all inputs weigh the same."""
        return self._calibration.moment(layer, shrinkage) if shrinkage < 1 else None

    def settle(self) -> tuple[Way, Mapping[int, float]]:
        """The way to share, and the cost of all ranks that were tried.

        Raises:
            InputError: the options contradict each other, or no rank keeps the tolerance.
        """
        goals = [name for name in ("tolerance", "energy") if name in self._options]
        if "shrinkage" in self._options and "calibration" not in self._options:
            raise InputError("shrinkage goes with a calibration text; leave it out, or give one")
        if self._options["rank"] != "auto":
            if goals:
                raise InputError(f"{goals[0]} goes with rank auto; leave it out, or choose auto")
            return self._with_ranks(tuple(map(int, self._options["rank"].split(",")))), {}
        if len(goals) != 1:
            raise InputError("rank auto needs either a tolerance or an energy to keep; give one")
        if goals[0] == "energy":
            return self._with_energy(float(self._options["energy"])), {}
        return self._within_tolerance(float(self._options["tolerance"]))

    def _with_ranks(self, ranks: tuple[int, ...]) -> Way:
        if len(ranks) not in (1, self.layers):
            raise InputError(f"{len(ranks)} ranks were given; the model has {self.layers} layers")
        if max(ranks) > max(1, self._full_rank):  # there is none below 1
            raise InputError(
                f"rank {max(ranks)} is of no use: updates of rank {self._full_rank} hold any "
                "difference between these heads exactly, and only ranks up to "
                f"{self._saving_rank} make the model smaller; choose at most {self._full_rank}"
            )
        ranks *= self.layers // len(ranks)
        ways = [Way(ranks, shrinkage) for shrinkage in self._shrinkages]
        costs = self._costs(ways) if len(ways) > 1 else {ways[0]: 0.0}
        return min(ways, key=costs.__getitem__)

    def _within_tolerance(self, tolerance: float) -> tuple[Way, Mapping[int, float]]:
        tried: dict[Way, float] = {}

        def cheapest(rank: int) -> Way:
            return min((way for way in tried if way.ranks[0] == rank), key=tried.__getitem__)

        def costs(ranks: Sequence[int]) -> Mapping[int, float]:
            for shrinkage in self._shrinkages:  # all at once would hold that many hidden states
                tried.update(self._costs([Way((r,) * self.layers, shrinkage) for r in ranks]))
            return {rank: tried[cheapest(rank)] for rank in ranks}

        rank, kl_by_rank = smallest_rank(self._full_rank, costs, tolerance)
        return cheapest(rank), kl_by_rank

    def _costs(self, ways: Sequence[Way]) -> Mapping[Way, float]:
        """The cost of ways on the text, in nats per token."""
        dtype = getattr(torch, TORCH_NAMES[main_dtype(self._source.tensors)])  # of the parts

        def rewritten(projection: str, layer: int, weight: Tensor, way: Way) -> Tensor:
            heads, moment = self.projections[projection], self.moment(layer, way.shrinkage)
            parts = heads.factorise(weight.double(), way.ranks[layer], moment, dtype)
            return heads.multiplied_out(*(part.double() for part in parts))

        ranks = sorted({rank for way in ways for rank in way.ranks})
        title = f"trying rank {', '.join(map(str, ranks))}"
        with current().bytes(title, total_bytes(self._source.tensors)) as advance:
            return divergences(
                self._source, self._windows(), list(self.projections), rewritten, ways, advance
            )

    def _with_energy(self, energy: float) -> Way:
        shrinkage = self._shrinkages[0]  # the energy is that of the text as it is
        ranks = []
        total = total_bytes(self._source.tensors)
        with current().bytes("looking for ranks, layer by layer", total) as advance:
            for layer in range(self.layers):
                ranks.append(self._rank_for_energy(layer, energy, shrinkage))
                advance(total // self.layers)
        return Way(tuple(ranks), shrinkage)

    def _rank_for_energy(self, layer: int, energy: float, shrinkage: float) -> int:
        from growkit.conversions.shared_diff.low_rank import share, spread

        moment = self.moment(layer, shrinkage)
        members = [
            heads.members(self._source.read(weight_of(name, layer)).double())
            for name, heads in self.projections.items()
        ]
        whole = sum(float(spread(each, moment).sum()) for each in members)

        def costs(ranks: Sequence[int]) -> dict[int, float]:
            return {
                rank: sum(float(share(each, rank, moment).residual.sum()) for each in members)
                for rank in ranks
            }

        # What is computed is never exact: the last bits are no energy.
        found, tried = smallest_rank(self._full_rank, costs, (1 - energy + 1e-12) * whole)
        self.tried += [
            RankTried(
                layer=layer,
                rank=rank,
                kl_nats_per_token=None,
                energy=max(0.0, 1 - cost / whole) if whole else 1.0,
                chosen=rank == found,
            )
            for rank, cost in tried.items()
        ]
        return found


class Calibration:
    """Second moments of the inputs of every layer's attention, on a text.

    The model runs once. Moments of all layers together are as large as a part of the model, so they
    wait in a folder for temporary files, which goes when the object goes.

    Args:
        source: a DIFF Transformer.
        windows: token ids, each [tokens].
    """

    def __init__(self, source: Weights, windows: Sequence[Tensor]) -> None:
        from growkit.engine.calls import Spool

        self._moments = Spool()
        self._lock = Lock()
        self._running = _run(source, windows, self._moments)

    def moment(self, layer: int, shrinkage: float = 0.0) -> Tensor:
        """Σ x xᵀ over all tokens, where x is what queries and keys read: [hidden, hidden], float64.

        Args:
            layer: its index.
            shrinkage: the part of the moment that is spread evenly over all directions. Rare
                directions of a text differ in another text (Ledoit and Wolf, "A
                well-conditioned estimator for large-dimensional covariance matrices", 2004).

        Raises:
            InputError: the model cannot be run, or there is no room for temporary files.
        """
        with self._lock:
            while len(self._moments) <= layer:
                next(self._running)
        moment = self._moments[layer]
        even = torch.eye(len(moment), dtype=moment.dtype) * moment.trace() / len(moment)
        return moment.lerp(even, shrinkage)


def _run(source: Weights, windows: Sequence[Tensor], moments: Spool) -> Iterator[None]:
    """Run a model, and keep the moment of one layer at a time."""
    from growkit.engine.calls import Call

    model = _layerwise(source)
    hidden = source.config["hidden_size"]
    moment = torch.zeros(hidden, hidden, dtype=torch.float64, device=model.device)

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        read = args[0].flatten(0, -2).double()
        moment.addmm_(read.T, read)

    for module in model.model.modules():
        if hasattr(module, "q_proj"):
            module.q_proj.register_forward_pre_hook(look)
    for stage in model.stages([Call(window) for window in windows]):
        if stage.layer is not None:
            moments.append(moment)
            moment.zero_()
            yield


def divergences(
    source: Weights,
    windows: Sequence[Tensor],
    projections: Sequence[str],
    rewritten: Callable[[str, int, Tensor, Way], Tensor],
    ways: Sequence[Way],
    advance: Advance = nothing,
) -> dict[Way, float]:
    """The cost of other projections: KL(source ‖ source with rewritten ones), all in one pass.

    Args:
        source: a DIFF Transformer.
        windows: token ids, each [tokens].
        projections: names within a layer's attention, e.g. ``q_proj``.
        rewritten: from a projection's name, its layer, its weight and a way to its new weight.
        ways: those to try, e.g. ranks.
        advance: called with the number of bytes done, of those of the source.

    Returns:
        For every way, nats per token.
    """
    from growkit.engine.calls import Call
    from growkit.engine.metrics import distance_of

    model = _layerwise(source)
    states: dict[Way, list[Tensor]] = {}
    for stage in model.stages([Call(window) for window in windows]):
        if stage.layer is None:
            states = {way: list(stage.after) for way in ways}
            continue
        advance(total_bytes(source.tensors) // source.config["num_hidden_layers"])
        attention = next(m for m in stage.module.modules() if hasattr(m, "q_proj"))
        modules = {name: getattr(attention, name) for name in projections}
        weights = {name: source.read(weight_of(name, stage.layer)) for name in projections}
        for way in ways:
            new = {n: rewritten(n, stage.layer, weight, way) for n, weight in weights.items()}
            with _replaced(modules, new):
                states[way] = [stage.again(i, state) for i, state in enumerate(states[way])]
    with model.head() as head:
        clean = head, stage.after
        found = {way: distance_of(clean, (head, states[way]), windows) for way in ways}
    return {way: each.kl_per_token for way, each in found.items()}


@contextmanager
def _replaced(modules: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[None]:
    from torch.nn import functional

    for name, module in modules.items():
        weight = weights[name].to(dict(module.named_parameters())["weight"])
        module.forward = partial(functional.linear, weight=weight, bias=module.bias)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def _layerwise(source: Weights) -> Layerwise:
    from growkit.engine.layerwise import Layerwise

    dtype = torch.float64 if main_dtype(source.tensors) == "F64" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Layerwise(source, dtype, device, None)
