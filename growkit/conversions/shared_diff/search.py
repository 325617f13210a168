"""The way to share: a rank for every layer, as asked for or the smallest that keeps a promise.

What is tried on the way is shown as it is tried, and told with what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.base.limits import within
from growkit.base.progress import current
from growkit.base.settings import Settings
from growkit.checkpoint.tensors import TORCH_NAMES, Config, Weights, main_dtype, total_bytes
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import shared_keys
from growkit.families.llama import ATTENTION
from growkit.results.operation import RankTried

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.conversions.shared_diff.calibration import Calibration
    from growkit.conversions.shared_diff.shared_projection import Heads


RANKS_PER_PASS = 8
"""Ranks that are tried in one pass over the model."""


def smallest_rank(
    most: int, costs: Callable[[Sequence[int]], Mapping[int, float]], tolerance: float
) -> tuple[int, dict[int, float]]:
    """The rank that keeps a tolerance, where the one below does not.

    Costs fall as ranks rise, but for noise: ranks are tried in a geometric ladder, then between the
    last one that fails and the first one that keeps it, until these are neighbours.

    Args:
        most: the largest rank that makes sense.
        costs: takes ranks, gives what each of them costs.
        tolerance: what a rank may cost.

    Returns:
        The rank, and the cost of every rank that was tried.

    Raises:
        InputError: no rank keeps the tolerance.
    """
    tried: dict[int, float] = {}
    below, above = 0, most + 1
    while above - below > 1:
        tried |= costs(_ladder(below, above, most))
        kept = [rank for rank, cost in tried.items() if within(cost, tolerance)]
        if not kept:
            raise InputError(
                f"no rank keeps a tolerance of {tolerance:g}: rank {most} still costs "
                f"{tried[most]:.3g}; pass a wider --dtype or a larger tolerance"
            )
        above = min(kept)
        below = max((rank for rank in tried if rank < above), default=0)
    return above, dict(sorted(tried.items()))


def _ladder(below: int, above: int, most: int) -> list[int]:
    """Ranks between two bounds, not all of them if there are many."""
    if above > most:  # the first time: from one end to the other
        steps = {round(most ** (i / (RANKS_PER_PASS - 1))) for i in range(RANKS_PER_PASS)}
        return sorted(steps | {1, most})
    between = range(below + 1, above)
    step = -(-len(between) // RANKS_PER_PASS)
    return list(between[::step])


SHRINKAGES = (0.0, 0.3, 0.6, 0.9, 0.97, 1.0)
"""From what a text shows, as it is, to all inputs alike."""


@dataclass(frozen=True)
class Way:
    """A way to share.

    Attributes:
        ranks: of the updates, layer by layer.
        shrinkage: see ``Calibration``; 1 where all inputs count alike.
    """

    ranks: tuple[int, ...]
    shrinkage: float


class Search:
    """How the projections of one model come to share: as asked for, or as searched for."""

    def __init__(self, source: Weights, config: Config, options: Mapping[str, str]) -> None:
        self._source, self._config, self._options = source, config, options
        self.layers: int = config["num_hidden_layers"]
        self.tried: list[RankTried] = []

    @cached_property
    def projections(self) -> dict[str, Heads]:
        """The heads of every projection that is shared."""
        return projections(self._config | {"shared_scope": self._options["scope"]})

    @cached_property
    def _calibration(self) -> Calibration:
        from growkit.conversions.shared_diff.calibration import WINDOWS, Calibration

        return Calibration(self._source, self._windows(WINDOWS))

    def _windows(self, count: int | None = None) -> Sequence[Tensor]:
        from growkit.engine.prompts import make_prompts

        text = Settings(self._options.get("calibration"), count)
        return make_prompts(text, Path(self._source.where()), self._source.config).windows

    def settle(self) -> tuple[Way, Mapping[int, float]]:
        """The way to share, and what ranks cost that were tried.

        Raises:
            InputError: the options contradict each other, or no rank keeps the tolerance.
        """
        goals = [name for name in ("tolerance", "energy") if name in self._options]
        if "shrinkage" in self._options and "calibration" not in self._options:
            raise InputError("shrinkage goes with a calibration text; leave it out, or give one")
        if self._options["rank"] != "auto":
            if goals:
                raise InputError(f"{goals[0]} goes with rank auto; leave it out, or choose auto")
            ranks = tuple(map(int, self._options["rank"].split(",")))
            if len(ranks) not in (1, self.layers):
                raise InputError(
                    f"{len(ranks)} ranks were given; the model has {self.layers} layers"
                )
            self._check_use(max(ranks))
            return self._best(ranks * (self.layers // len(ranks))), {}
        if len(goals) != 1:
            raise InputError("rank auto needs either a tolerance or an energy to keep; give one")
        if goals[0] == "energy":
            return self._way_for_energy(float(self._options["energy"])), {}
        return self._way_for_tolerance(float(self._options["tolerance"]))

    @cached_property
    def _shrinkages(self) -> Sequence[float]:
        """Those that are allowed."""
        if "calibration" not in self._options:
            return (1.0,)
        given = self._options.get("shrinkage")
        return SHRINKAGES if given is None else (float(given),)

    def _best(self, ranks: tuple[int, ...]) -> Way:
        ways = [Way(ranks, shrinkage) for shrinkage in self._shrinkages]
        costs = self._costs(ways) if len(ways) > 1 else {ways[0]: 0.0}
        return min(ways, key=costs.__getitem__)

    def _way_for_tolerance(self, tolerance: float) -> tuple[Way, Mapping[int, float]]:
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
        """What ways cost on the text, nats per token."""
        import torch

        from growkit.conversions.shared_diff.calibration import divergences

        dtype = getattr(torch, TORCH_NAMES[main_dtype(self._source.tensors)])  # of the parts

        def rewritten(name: str, weight: Tensor, way: Way) -> Tensor:
            heads, layer = self.projections[name.split(".")[-2]], _layer_of(name)
            moment = self.moment(layer, way.shrinkage)
            parts = heads.factorise(weight.double(), way.ranks[layer], moment, dtype)
            return heads.multiplied_out(*(part.double() for part in parts))

        ranks = sorted({rank for way in ways for rank in way.ranks})
        title = f"trying rank {', '.join(map(str, ranks))}"
        with current().bytes(title, total_bytes(self._source.tensors)) as advance:
            return divergences(
                self._source, self._windows(), list(self.projections), rewritten, ways, advance
            )

    def _way_for_energy(self, energy: float) -> Way:
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

    def _check_use(self, rank: int) -> None:
        """Refuse a rank that only takes room.

        Raises:
            InputError: a lower one holds everything.
        """
        if rank > 1 and rank > self._full_rank:  # there is none below 1
            saving = max(heads.saving_rank(shape) for heads, shape in self._shared)
            raise InputError(
                f"rank {rank} is of no use: updates of rank {self._full_rank} hold any difference "
                f"between these heads exactly, and only ranks up to {saving} make the model "
                f"smaller; choose at most {self._full_rank}"
            )

    @cached_property
    def _shared(self) -> list[tuple[Heads, Sequence[int]]]:
        """The heads of every projection, and the shape of its matrix in a layer."""
        return [
            (heads, self._source.tensors[weight_of(name, 0)].shape)
            for name, heads in self.projections.items()
        ]

    @cached_property
    def _full_rank(self) -> int:
        return max(heads.full_rank(shape) for heads, shape in self._shared)

    def moment(self, layer: int, shrinkage: float) -> Tensor | None:
        """Of what a layer reads; None if all inputs count alike."""
        return self._calibration.moment(layer, shrinkage) if shrinkage < 1 else None


def weight_of(projection: str, layer: int) -> str:
    """The name of a projection's weight."""
    return f"{ATTENTION.format(layer=layer)}{projection}.weight"


def _layer_of(name: str) -> int:
    return next(int(part) for part in name.split(".") if part.isdecimal())


def projections(config: Config) -> dict[str, Heads]:
    """The projections that a model shares, each with its heads."""
    from growkit.conversions.shared_diff.shared_projection import Heads

    sizes, scope = DIFF.sizes(config | {"qk_projection": "full"}), config["shared_scope"]
    found = {"q_proj": Heads(sizes["signal_heads"], sizes["noise_heads"], scope)}
    if shared_keys(config):
        found["k_proj"] = Heads(sizes["kv_heads"], sizes["kv_heads"], scope)
    return found
