"""DIFF to Shared DIFF: queries and keys as shared bases with low-rank updates.

The best base and updates for the weights as they are (``low_rank``), or for the
weights on what a text makes them read; computed in float64.

Cang et al., "Shared DIFF Transformer", equations 3 and 4 and section 2.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from growkit.checkpoint.tensors import TORCH_NAMES, Config, TensorInfo, Weights, main_dtype
from growkit.conversions.rewriting import OnDiffTransformer, refuse, rewrite
from growkit.conversions.shared_diff.ranks import smallest_rank
from growkit.errors import InputError
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import has_noise_heads, shared_keys, shared_queries
from growkit.families.llama import ATTENTION
from growkit.planning.operation import Change, Option, Row, Value
from growkit.planning.plan import Check, Judged, Rule, taken_over, unused_tensors
from growkit.planning.transforms import Computed
from growkit.results.proof import MOST_VALUES, Spectrum
from growkit.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.conversions.shared_diff.calibration import Calibration
    from growkit.conversions.shared_diff.shared_projection import Heads

PARTS = ("base.weight", "down.weight", "up.weight")

SHRINKAGES = (0.0, 0.3, 0.6, 0.9, 0.97, 1.0)
"""From what a text shows, as it is, to all inputs alike."""


def _is_rank(text: str) -> bool:
    return text == "auto" or all(each.isdecimal() and int(each) > 0 for each in text.split(","))


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False


def _is_share(text: str) -> bool:
    try:
        return 0 <= float(text) <= 1
    except ValueError:
        return False


class SharedDiff(OnDiffTransformer):
    """See the module."""

    name = "shared-diff"
    paper = "Cang et al., Shared DIFF Transformer, ICML 2025"
    options = (
        Option("scope", "which heads share a base and an update", ("head", "layer", "all_heads")),
        Option(
            "rank",
            "a whole number from 1 upwards as the rank of the updates, one for each layer, or auto",
            form="N|N,N,…|auto",
            accepts=_is_rank,
            needed=True,
            kinds=(str, int, list),
        ),
        Option(
            "tolerance",
            "what rank auto may cost, as KL in nats per token",
            form="NATS",
            accepts=_is_positive,
        ),
        Option(
            "energy",
            "the share of the squared differences that rank auto keeps in every layer, e.g. 0.99",
            form="SHARE",
            accepts=lambda text: _is_share(text) and float(text) > 0,
        ),
        Option(
            "calibration",
            "a UTF-8 text; inputs then count as often as it has them, and rank auto is tried on it",
            form="TEXT",
            kinds=(str,),
        ),
        Option(
            "shrinkage",
            "how far all inputs count alike whatever the text has, from 0 to 1; if it is left out, "
            "what costs least on the text",
            form="SHARE",
            accepts=_is_share,
        ),
    )
    rows = (
        Row(
            "DIFF, grouped DIFF",
            "Shared DIFF",
            "bounded; exact but for rounding once 2r reaches the rank of the difference",
            "singular value decomposition of the difference of signal and noise projections",
        ),
    )

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        diff = DIFF.complete(source.config)
        if not has_noise_heads(diff):
            raise refuse(self.name, diff, "there are no noise heads to share with")
        if shared_queries(diff):
            raise refuse(self.name, diff, "its projections are shared already")
        if (
            options["scope"] == "layer"
            and diff["num_attention_heads"] != 2 * diff["num_noise_heads"]
        ):
            raise refuse(
                self.name, diff, "scope layer pairs signal with noise heads; choose scope head"
            )
        unused_tensors(source, DIFF)  # refuses what is no such model, before ranks are tried on it
        sharing = _Sharing(source, diff | {"qk_projection": "shared"}, options)
        way, kl_by_rank = sharing.settle()
        distinct = sorted(set(way.ranks))
        config = diff | {
            "qk_projection": "shared",
            "shared_scope": options["scope"],
            "shared_rank": distinct[0] if len(distinct) == 1 else list(way.ranks),
        }
        plan = rewrite(source, config, sharing.rule(way), sharing.checks(way))
        some = " or ".join(map(str, distinct))
        lost = f"what rank {some} cannot hold of the difference between heads that share a base"
        settled: dict[str, Value | None] = {"scope": options["scope"]}
        settled |= dict.fromkeys(("tolerance", "energy"))
        settled["rank"] = ",".join(map(str, distinct if len(distinct) == 1 else way.ranks))
        if "calibration" in options:
            settled["shrinkage"] = str(way.shrinkage)
        return Change([plan], "bounded", lost, settled, kl_by_rank)


@dataclass(frozen=True)
class _Way:
    """A way to share.

    Attributes:
        ranks: of the updates, layer by layer.
        shrinkage: see ``Calibration``; 1 where all inputs count alike.
    """

    ranks: tuple[int, ...]
    shrinkage: float


class _Sharing:
    """How the projections of one model come to share."""

    def __init__(self, source: Weights, config: Config, options: Mapping[str, str]) -> None:
        self._source, self._config, self._options = source, config, options
        self._layers: int = config["num_hidden_layers"]

    @cached_property
    def projections(self) -> dict[str, Heads]:
        """The heads of every projection that is shared."""
        return projections(self._config | {"shared_scope": self._options["scope"]})

    @cached_property
    def _calibration(self) -> Calibration:
        from growkit.conversions.shared_diff.calibration import WINDOWS, Calibration

        return Calibration(self._source, self._windows(WINDOWS))

    def _windows(self, count: int = Settings.prompts) -> Sequence[Tensor]:
        from growkit.engine.prompts import make_prompts

        text = Settings(self._options.get("calibration"), count)
        return make_prompts(text, Path(self._source.where()), self._source.config).windows

    def settle(self) -> tuple[_Way, Mapping[int, float]]:
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
            if len(ranks) not in (1, self._layers):
                raise InputError(
                    f"{len(ranks)} ranks were given; the model has {self._layers} layers"
                )
            self._check_use(max(ranks))
            return self._best(ranks * (self._layers // len(ranks))), {}
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

    def _best(self, ranks: tuple[int, ...]) -> _Way:
        ways = [_Way(ranks, shrinkage) for shrinkage in self._shrinkages]
        costs = self._costs(ways) if len(ways) > 1 else {ways[0]: 0.0}
        return min(ways, key=costs.__getitem__)

    def _way_for_tolerance(self, tolerance: float) -> tuple[_Way, Mapping[int, float]]:
        tried: dict[_Way, float] = {}

        def cheapest(rank: int) -> _Way:
            return min((way for way in tried if way.ranks[0] == rank), key=tried.__getitem__)

        def costs(ranks: Sequence[int]) -> Mapping[int, float]:
            for shrinkage in self._shrinkages:  # all at once would hold that many hidden states
                tried.update(self._costs([_Way((r,) * self._layers, shrinkage) for r in ranks]))
            return {rank: tried[cheapest(rank)] for rank in ranks}

        rank, kl_by_rank = smallest_rank(self._full_rank, costs, tolerance)
        return cheapest(rank), kl_by_rank

    def _costs(self, ways: Sequence[_Way]) -> Mapping[_Way, float]:
        """What ways cost on the text, nats per token."""
        import torch

        from growkit.conversions.shared_diff.calibration import divergences

        dtype = getattr(torch, TORCH_NAMES[main_dtype(self._source.tensors)])  # of the parts

        def rewritten(name: str, weight: Tensor, way: _Way) -> Tensor:
            heads, layer = self.projections[name.split(".")[-2]], _layer_of(name)
            moment = self._moment(layer, way.shrinkage)
            parts = heads.factorise(weight.double(), way.ranks[layer], moment, dtype)
            return heads.multiplied_out(*(part.double() for part in parts))

        return divergences(self._source, self._windows(), list(self.projections), rewritten, ways)

    def _way_for_energy(self, energy: float) -> _Way:
        shrinkage = self._shrinkages[0]  # the energy is that of the text as it is
        layers = range(self._layers)
        ranks = tuple(self._rank_for_energy(layer, energy, shrinkage) for layer in layers)
        return _Way(ranks, shrinkage)

    def _rank_for_energy(self, layer: int, energy: float, shrinkage: float) -> int:
        from growkit.conversions.shared_diff.low_rank import share, spread

        moment = self._moment(layer, shrinkage)
        members = [
            heads.members(self._source.read(_weight(name, layer)).double())
            for name, heads in self.projections.items()
        ]
        whole = sum(float(spread(each, moment).sum()) for each in members)

        def costs(ranks: Sequence[int]) -> dict[int, float]:
            return {
                rank: sum(float(share(each, rank, moment).residual.sum()) for each in members)
                for rank in ranks
            }

        # What is computed is never exact: the last bits are no energy.
        return smallest_rank(self._full_rank, costs, (1 - energy + 1e-12) * whole)[0]

    def _check_use(self, rank: int) -> None:
        """Refuse a rank that only takes room.

        Raises:
            InputError: a lower one holds everything.
        """
        if rank > self._full_rank:
            saving = max(heads.saving_rank(weight) for heads, weight in self._shared)
            raise InputError(
                f"rank {rank} is of no use: updates of rank {self._full_rank} hold any difference "
                f"between these heads exactly, and only ranks up to {saving} make the model "
                f"smaller; choose at most {self._full_rank}"
            )

    @cached_property
    def _shared(self) -> list[tuple[Heads, Tensor]]:
        """The heads of every projection, and its matrix in a layer; the shape is all it has."""
        import torch

        shapes = {name: self._source.tensors[_weight(name, 0)].shape for name in self.projections}
        return [
            (h, torch.empty(shapes[name], device="meta")) for name, h in self.projections.items()
        ]

    @cached_property
    def _full_rank(self) -> int:
        return max(heads.full_rank(weight) for heads, weight in self._shared)

    def _moment(self, layer: int, shrinkage: float) -> Tensor | None:
        """Of what a layer reads; None if all inputs count alike."""
        return self._calibration.moment(layer, shrinkage) if shrinkage < 1 else None

    def rule(self, way: _Way) -> Callable[[str, TensorInfo, int | None], Rule | None]:
        """The rules of the parts."""
        factors: dict[str, _Factors] = {}

        def special(name: str, info: TensorInfo, layer: int | None) -> Rule | None:
            for projection, heads in self.projections.items():
                prefix, found, part = name.partition(f"{projection}.")
                if found and part in PARTS:
                    assert layer is not None
                    of, rank = f"{prefix}{projection}.weight", way.ranks[layer]
                    moment = partial(self._moment, layer, way.shrinkage)
                    made = factors.setdefault(of, _Factors(heads, rank, moment))
                    compute = partial(made.part, PARTS.index(part), info)
                    why = f"best base and rank-{rank} updates, scope {heads.scope}"
                    return Rule(name, info, Computed((of,), why, compute, repeatable=False))
                if found and part == "up.bias":
                    return taken_over(name, info, f"{prefix}{projection}.bias")
            return None

        return special

    def checks(self, way: _Way) -> list[Check]:
        """What must hold of the parts."""
        found = []
        for layer in range(self._layers):
            for projection, heads in self.projections.items():
                module = ATTENTION.format(layer=layer) + projection
                judge = partial(_judge, module, heads, way.shrinkage < 1)
                targets = tuple(f"{module}.{part}" for part in PARTS)
                found.append(Check((f"{module}.weight",), targets, judge))
        return found


def _judge(
    module: str,
    heads: Heads,
    calibrated: bool,
    sources: Sequence[Tensor],
    targets: Sequence[Tensor],
) -> Judged:
    """Whether the base is that of the updates, and whether there are no better updates.

    On what a text makes projections read, other updates are the best ones.
    """
    from growkit.conversions.shared_diff.shared_optimum import hold_against_optimum

    (weight,), (base, down, up) = sources, targets
    fitting = heads.best_base(weight.double(), down.double(), up.double()).to(base.dtype)
    held = hold_against_optimum(heads, weight, base, down, up)
    spectrum = Spectrum(
        module=module,
        singular_values=held.values[:MOST_VALUES].tolist(),
        rank=up.shape[1],
        kept=held.kept,
        residual=float(held.residual.sum()),
        best=float(held.best.sum()),
        unit="squared Frobenius norm",
    )
    fits = fitting.double().equal(base.double())
    return Judged(fits and (held.optimal or calibrated), spectrum)


def _weight(projection: str, layer: int) -> str:
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


class _Factors:
    """The three parts of one projection; computed once, kept until each was taken."""

    def __init__(self, heads: Heads, rank: int, moment: Callable[[], Tensor | None]) -> None:
        self._heads, self._rank, self._moment = heads, rank, moment
        self._lock = Lock()
        self._parts: dict[int, Tensor] = {}

    def part(self, which: int, info: TensorInfo, weight: Tensor) -> Tensor:
        """Base, down or up, in the target's dtype.

        Args:
            which: index into ``PARTS``.
            info: shape and dtype of the part; all three have the same dtype.
            weight: the full projection, [(signal + noise) · head_dim, hidden].
        """
        import torch

        with self._lock:
            if which not in self._parts:
                dtype = getattr(torch, TORCH_NAMES[info.dtype])
                moment = self._moment()
                parts = self._heads.factorise(weight.double(), self._rank, moment, dtype)
                self._parts = dict(enumerate(parts))
            part = self._parts.pop(which)
        return part.contiguous()


def multiplied_out(config: Config) -> Callable[[str, TensorInfo, int | None], Rule | None]:
    """Rules for a model with full projections, from a Shared DIFF model of this config."""
    shared = projections(config)

    def special(name: str, info: TensorInfo, layer: int | None) -> Rule | None:
        for projection, heads in shared.items():
            prefix, found, part = name.partition(f"{projection}.")
            if found and part == "weight":
                sources = tuple(f"{prefix}{projection}.{each}" for each in PARTS)
                compute = partial(_product, info, heads)
                return Rule(name, info, Computed(sources, "multiplied out", compute))
            if found and part == "bias":
                return taken_over(name, info, f"{prefix}{projection}.up.bias")
        return None

    return special


def _product(info: TensorInfo, heads: Heads, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    import torch

    weight = heads.multiplied_out(base.double(), down.double(), up.double())
    return weight.to(getattr(torch, TORCH_NAMES[info.dtype]))


OPERATION = SharedDiff()
