"""Conversion of DIFF to Shared DIFF: queries and keys as shared bases with low-rank updates.

Bases and updates are the best ones for the weights alone (``low_rank``), or for the inputs that
attention reads on a text; they are computed in float64. Ranks are given, or the smallest ones that
keep a tolerance (``growkit.extras.calibration``).

Cang et al., "Shared DIFF Transformer", equations 3 and 4 and section 2.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from threading import Lock

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.options import Option, Value
from growkit.base.progress import current
from growkit.base.tensors import TORCH_NAMES, Config, main_dtype, total_bytes
from growkit.extras.calibration import (
    CALIBRATION,
    TOLERANCE,
    WINDOWS,
    Calibration,
    Replacement,
    costs_of,
    search_ranks,
    smallest_rank,
    windows_of,
)
from growkit.extras.composed_transforms import Computed
from growkit.extras.differential.conversions.layout_conversions import OnDiffTransformer, refuse
from growkit.extras.differential.diff_family import ATTENTION
from growkit.extras.differential.diff_family import FAMILY as DIFF
from growkit.extras.differential.low_rank import HeadGroups, judge_parts, share, spread
from growkit.model.model import Model
from growkit.planning.operation import Change
from growkit.planning.plan import Plan, TargetCheck
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Kept, Transform
from growkit.results.growth_result import RankTried

PARTS = ("base.weight", "down.weight", "up.weight")


def _is_rank(text: str) -> bool:
    return text == "auto" or all(rank.isdecimal() and int(rank) > 0 for rank in text.split(","))


class SharedDiff(OnDiffTransformer):
    """See the module."""

    name = "shared-diff"
    paper = "Cang et al., Shared DIFF Transformer, ICML 2025"
    options = (
        Option("scope", "which heads share a base and an update", ("head", "layer", "all_heads")),
        Option(
            "rank",
            "the rank of the updates, a whole number from 1 upwards, one per layer, or auto",
            form="N|N,N,…|auto",
            accepts=_is_rank,
            example=1,
        ),
        TOLERANCE,
        Option(
            "energy",
            "the share of differences between heads that rank auto keeps in each layer, e.g. 0.99",
            form="SHARE",
            kind=float,
            limits=(None, 1),
        ),
        CALIBRATION,
        Option(
            "shrinkage",
            "how little the calibration text weighs, from 0 (inputs weigh as much as they occur in "
            "it) to 1 (all weigh alike); by default, the value that costs least on the text",
            form="SHARE",
            kind=float,
            limits=(0, 1),
        ),
    )

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        diff = self.with_noise_heads(source, "there are no noise heads to share with")
        if diff["qk_projection"] == "shared":
            raise refuse(self.name, diff, "its projections are shared already")
        paired = diff["num_attention_heads"] == 2 * diff["num_noise_heads"]
        if options["scope"] == "layer" and not paired:
            raise refuse(
                self.name, diff, "scope layer pairs signal with noise heads; choose scope head"
            )
        search = Search(source, diff | {"qk_projection": "shared"}, options)
        way, tried = search.settle()
        distinct = sorted(set(way.ranks))
        config = diff | {
            "qk_projection": "shared",
            "shared_scope": options["scope"],
            "shared_rank": distinct[0] if len(distinct) == 1 else list(way.ranks),
        }
        transforms, checks = _parts(search, way, main_dtype(source.tensors))
        plan = rewrite(
            source, DIFF, config, lambda member, info: transforms.get(member.name), checks=checks
        )
        downs = [check.targets[PARTS.index("down.weight")] for check in checks]
        plan = replace(plan, waits=downs)  # for updates of zero
        ranks = " or ".join(map(str, distinct))
        lost = (
            f"the part of the difference between heads with one base that rank {ranks} cannot hold"
        )
        settings: dict[str, Value | None] = {"scope": options["scope"]}
        settings |= dict.fromkeys(("tolerance", "energy"))
        settings["rank"] = ",".join(map(str, distinct if len(distinct) == 1 else way.ranks))
        if "calibration" in options:
            settings["shrinkage"] = str(way.shrinkage)
        warnings = _larger_than_source(source, plan, way)
        return Change([plan], "bounded", lost, settings, ranks=tried, warnings=warnings)


def _parts(search: Search, way: Way, dtype: str) -> tuple[dict[str, Transform], list[TargetCheck]]:
    """The transforms of all parts of projections, by name, and their checks."""
    transforms: dict[str, Transform] = {}
    checks = []
    for layer, rank in enumerate(way.ranks):
        for projection, heads in search.projections.items():
            weight = weight_of(projection, layer)
            module = weight.removesuffix(".weight")
            names = [f"{module}.{part}" for part in PARTS]
            moment = partial(search.moment, layer, way.shrinkage)
            factors = _factors(heads, rank, moment, dtype, module)
            why = f"best base and rank-{rank} updates, scope {heads.scope}"
            for number, name in enumerate(names):
                part = partial(factors, number)
                transforms[name] = Computed((weight,), why, part, repeatable=False, dtype=dtype)
            transforms[f"{module}.up.bias"] = Kept(f"{module}.bias")
            judge = partial(judge_parts, module, heads, way.shrinkage < 1)
            checks.append(TargetCheck((weight,), tuple(names), judge))
    return transforms, checks


def _larger_than_source(source: Model, plan: Plan, way: Way) -> list[str]:
    """Warn if the parts have more parameters than the projections that they replace."""
    before = bases = of_each_rank = after = 0
    for check in plan.checks:
        before += sum(source.tensors[name].elements for name in check.sources)
        base, *updates = (plan.by_target[name].info.elements for name in check.targets)
        bases += base
        of_each_rank += sum(updates) // plan.by_target[check.targets[-1]].info.shape[1]
        after += base + sum(updates)
    if after <= before:
        return []
    largest = (before - bases - 1) // of_each_rank
    return [
        f"rank {' or '.join(map(str, sorted(set(way.ranks))))} makes the model larger: "
        f"{after:,} parameters replace {before:,} of the source's projections; "
        + (f"ranks up to {largest} hold fewer" if largest > 0 else "no rank holds fewer")
    ]


def _factors(
    heads: HeadGroups, rank: int, moment: Callable[[], Tensor | None], dtype: str, seed: str
) -> Callable[[int, Tensor], Tensor]:
    """Make a function that computes the parts of one projection once, and keeps each until used.

    The function takes an index into ``PARTS`` and the full projection,
    [(signal + noise) · head_dim, hidden].
    """
    lock, kept = Lock(), dict[int, Tensor]()

    def part(which: int, weight: Tensor) -> Tensor:
        with lock:
            if which not in kept:
                stored = getattr(torch, TORCH_NAMES[dtype])
                factors = heads.factorise(weight.double(), rank, moment(), stored, seed)
                kept.update(enumerate(factors))
            return kept.pop(which).contiguous()

    return part


def multiplied_out(source: Model, config: Config) -> Plan:
    """Plan a model with full projections, and this config, from a Shared DIFF model."""
    dtype, transforms = main_dtype(source.tensors), dict[str, Transform]()
    for layer in range(config["num_hidden_layers"]):
        for projection, heads in projections(DIFF.complete(source.config)).items():
            weight = weight_of(projection, layer)
            module = weight.removesuffix(".weight")
            sources = tuple(f"{module}.{part}" for part in PARTS)
            compute = partial(_product, heads, TORCH_NAMES[dtype])
            transforms[weight] = Computed(sources, "multiplied out", compute, dtype=dtype)
            transforms[f"{module}.bias"] = Kept(f"{module}.up.bias")
    return rewrite(source, DIFF, config, lambda member, info: transforms.get(member.name))


def _product(heads: HeadGroups, dtype: str, *parts: Tensor) -> Tensor:
    return heads.multiplied_out(*(part.double() for part in parts)).to(getattr(torch, dtype))


SHRINKAGES = (0.0, 0.3, 0.6, 0.9, 0.97, 1.0)
"""Values to try, from the weights of the text to equal weights."""


@dataclass(frozen=True)
class Way:
    """One way to share.

    Attributes:
        ranks: ranks of the updates, layer by layer.
        shrinkage: see ``Calibration``; 1 if all inputs have equal weights.
    """

    ranks: tuple[int, ...]
    shrinkage: float


def weight_of(projection: str, layer: int) -> str:
    """The name of a projection's weight."""
    return f"{ATTENTION.format(layer=layer)}{projection}.weight"


def projections(config: Config) -> dict[str, HeadGroups]:
    """The shared projections of a model, each with its heads."""
    sizes, scope = DIFF.sizes(config | {"qk_projection": "full"}), config["shared_scope"]
    heads = {"q_proj": HeadGroups(sizes["signal_heads"], sizes["noise_heads"], scope)}
    if config["noise_keys"] == "own":
        heads["k_proj"] = HeadGroups(sizes["kv_heads"], sizes["kv_heads"], scope)
    return heads


class Search:
    """The choice of ranks and shrinkage for one model, by its options or by a search.

    Attributes:
        layers: number of layers.
        projections: the heads of every shared projection.
    """

    def __init__(self, source: Model, config: Config, options: Mapping[str, str]) -> None:
        self._source, self._options = source, options
        self.layers: int = config["num_hidden_layers"]
        self.projections = projections(config | {"shared_scope": options["scope"]})
        self._full_rank = max(
            heads.full_rank(source.tensors[weight_of(name, 0)].shape)
            for name, heads in self.projections.items()
        )
        self._shrinkages: Sequence[float] = (1.0,)
        if "calibration" in options:
            shrinkage = options.get("shrinkage")
            self._shrinkages = SHRINKAGES if shrinkage is None else (float(shrinkage),)

    def _windows(self, count: int | None = None) -> Sequence[Tensor]:
        return windows_of(self._source, self._options.get("calibration"), count)

    @cached_property
    def _calibration(self) -> Calibration:
        return Calibration(self._source, self._windows(WINDOWS))

    def moment(self, layer: int, shrinkage: float) -> Tensor | None:
        """The second moment of a layer's inputs; None if all inputs have equal weights."""
        return self._calibration.moment(layer, shrinkage) if shrinkage < 1 else None

    def settle(self) -> tuple[Way, list[RankTried]]:
        """Choose the way to share; return it with all ranks that were tried.

        Raises:
            InputError: the options contradict each other, or no rank keeps the tolerance.
        """
        options = self._options
        goals = [name for name in ("tolerance", "energy") if name in options]
        if "shrinkage" in options and "calibration" not in options:
            raise InputError("shrinkage needs a calibration text; leave it out, or give a text")
        if options["rank"] != "auto":
            if goals:
                raise InputError(f"{goals[0]} needs rank auto; leave it out, or choose auto")
            return self._with_ranks(tuple(map(int, options["rank"].split(",")))), []
        if len(goals) != 1:
            raise InputError("rank auto needs either a tolerance or an energy to keep; give one")
        if goals == ["energy"]:
            return self._with_energy(float(options["energy"]))
        return self._within_tolerance(float(options["tolerance"]))

    def _with_ranks(self, ranks: tuple[int, ...]) -> Way:
        if len(ranks) not in (1, self.layers):
            raise InputError(f"{len(ranks)} ranks were given; the model has {self.layers} layers")
        if max(ranks) > max(1, self._full_rank):  # no rank is below 1
            raise InputError(
                f"rank {max(ranks)} is useless: updates of rank {self._full_rank} already hold any "
                f"difference between these heads exactly; choose at most {self._full_rank}"
            )
        ranks *= self.layers // len(ranks)
        ways = [Way(ranks, shrinkage) for shrinkage in self._shrinkages]
        return min(ways, key=self._costs(ways).__getitem__) if len(ways) > 1 else ways[0]

    def _within_tolerance(self, tolerance: float) -> tuple[Way, list[RankTried]]:
        def ways_of(rank: int) -> list[Way]:
            return [Way((rank,) * self.layers, shrinkage) for shrinkage in self._shrinkages]

        def costs(ways: Sequence[Way]) -> dict[Way, float]:
            # One shrinkage after the other, to limit the hidden states in memory.
            alike = ([way for way in ways if way.shrinkage == of] for of in self._shrinkages)
            return {way: cost for part in alike for way, cost in self._costs(part).items()}

        return search_ranks(self._full_rank, tolerance, ways_of, costs)

    def _costs(self, ways: Sequence[Way]) -> Mapping[Way, float]:
        """The cost of ways, see ``growkit.extras.calibration.costs_of``."""

        def of_layer(layer: int) -> Callable[[Way], Replacement]:
            weights = {n: self._source.read(weight_of(n, layer)) for n in self.projections}
            return lambda way: Replacement(
                {n: (self._shared(n, layer, weights[n], way), None) for n in weights}
            )

        ranks = sorted({rank for way in ways for rank in way.ranks})
        title = f"trying rank {', '.join(map(str, ranks))}"
        return costs_of(self._source, self._windows(), ways, of_layer, title)

    def _shared(self, projection: str, layer: int, weight: Tensor, way: Way) -> Tensor:
        """The weight that a projection gets from its rounded parts."""
        heads, moment = self.projections[projection], self.moment(layer, way.shrinkage)
        dtype = getattr(torch, TORCH_NAMES[main_dtype(self._source.tensors)])
        parts = heads.factorise(weight.double(), way.ranks[layer], moment, dtype)
        return heads.multiplied_out(*(part.double() for part in parts))

    def _with_energy(self, energy: float) -> tuple[Way, list[RankTried]]:
        shrinkage = self._shrinkages[0]  # the smallest: the energy is measured on the text itself
        tried: list[RankTried] = []
        total = total_bytes(self._source.tensors)
        with current().bytes("looking for ranks, layer by layer", total) as advance:
            for layer in range(self.layers):
                tried += self._energies(layer, energy, self.moment(layer, shrinkage))
                advance(total // self.layers)
        return Way(tuple(entry["rank"] for entry in tried if entry["chosen"]), shrinkage), tried

    def _energies(self, layer: int, energy: float, moment: Tensor | None) -> list[RankTried]:
        """Find the rank of a layer; return all ranks that were tried."""
        members = [
            heads.members(self._source.read(weight_of(name, layer)).double())
            for name, heads in self.projections.items()
        ]
        total = sum(float(spread(member, moment).sum()) for member in members)

        def costs(ranks: Sequence[int]) -> dict[int, float]:
            return {
                rank: sum(float(share(member, rank, moment).residual.sum()) for member in members)
                for rank in ranks
            }

        # The last bits of computed residuals are rounding, not energy.
        best, tried = smallest_rank(self._full_rank, costs, (1 - energy + 1e-12) * total)
        kept = {rank: max(0.0, 1 - cost / total) if total else 1.0 for rank, cost in tried.items()}
        return [
            RankTried(layer=layer, rank=n, kl_nats_per_token=None, energy=e, chosen=n == best)
            for n, e in kept.items()
        ]


OPERATION = SharedDiff()
