"""DIFF to Shared DIFF: queries and keys as shared bases with low-rank updates.

The base and updates are the best ones for the weights alone (``low_rank``), or for the inputs that
a text gives them; computed in float64.

Cang et al., "Shared DIFF Transformer", equations 3 and 4 and section 2.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from threading import Lock
from typing import Any

from growkit.base.lazy import Tensor
from growkit.base.tensors import Config, TensorInfo, Weights
from growkit.conversions.rewriting import OnDiffTransformer, Special, refuse, rewrite
from growkit.conversions.shared_diff.search import Heads, Search, Way, projections, weight_of
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import shared_queries
from growkit.planning.operation import Change, Option, Row, Value, is_within
from growkit.planning.plan import Check, Judged, Plan, Rule, taken_over, unused_tensors
from growkit.planning.transforms import Computed
from growkit.results.operation import RankTried

PARTS = ("base.weight", "down.weight", "up.weight")


def _is_rank(text: str) -> bool:
    return text == "auto" or all(each.isdecimal() and int(each) > 0 for each in text.split(","))


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
            accepts=partial(is_within, above=0),
        ),
        Option(
            "energy",
            "the share of the squared differences between heads with one base that rank auto keeps "
            "in every layer, e.g. 0.99",
            form="SHARE",
            accepts=partial(is_within, above=0, most=1),
        ),
        Option(
            "calibration",
            "a UTF-8 text; inputs then count as often as they occur in it, and rank auto is tried "
            "on it",
            form="TEXT",
            kinds=(str,),
        ),
        Option(
            "shrinkage",
            "how little to trust the calibration text, from 0 (inputs count as often as they occur "
            "in it) to 1 (all count alike); by default, what costs least on the text",
            form="SHARE",
            accepts=partial(is_within, least=0, most=1),
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
        diff = self.with_noise_heads(source, "there are no noise heads to share with")
        if shared_queries(diff):
            raise refuse(self.name, diff, "its projections are shared already")
        paired = diff["num_attention_heads"] == 2 * diff["num_noise_heads"]
        if options["scope"] == "layer" and not paired:
            raise refuse(
                self.name, diff, "scope layer pairs signal with noise heads; choose scope head"
            )
        unused_tensors(source, DIFF)  # refuses what is no such model, before ranks are tried on it
        search = Search(source, diff | {"qk_projection": "shared"}, options)
        way, kl_by_rank = search.settle()
        tried = search.tried or [
            RankTried(
                layer=None,
                rank=rank,
                kl_nats_per_token=cost,
                energy=None,
                chosen=rank == way.ranks[0],
            )
            for rank, cost in kl_by_rank.items()
        ]
        distinct = sorted(set(way.ranks))
        config = diff | {
            "qk_projection": "shared",
            "shared_scope": options["scope"],
            "shared_rank": distinct[0] if len(distinct) == 1 else list(way.ranks),
        }
        plan = rewrite(source, config, _special(search, way), _checks(search, way))
        some = " or ".join(map(str, distinct))
        lost = f"what rank {some} cannot hold of the difference between heads that share a base"
        settled: dict[str, Value | None] = {"scope": options["scope"]}
        settled |= dict.fromkeys(("tolerance", "energy"))
        settled["rank"] = ",".join(map(str, distinct if len(distinct) == 1 else way.ranks))
        if "calibration" in options:
            settled["shrinkage"] = str(way.shrinkage)
        warnings = _larger_than_source(source, plan, way)
        return Change([plan], "bounded", lost, settled, kl_by_rank, ranks=tried, warnings=warnings)


def _special(search: Search, way: Way) -> Special:
    """The rules of the parts."""
    factors: dict[str, _Factors] = {}

    def special(name: str, info: TensorInfo, layer: int | None) -> Rule | None:
        module, part, heads = _shared(name, search.projections)
        if heads and part in PARTS:
            assert layer is not None
            of, rank = f"{module}.weight", way.ranks[layer]
            moment = partial(search.moment, layer, way.shrinkage)
            made = factors.setdefault(of, _Factors(heads, rank, moment))
            compute = partial(made.part, PARTS.index(part), info)
            why = f"best base and rank-{rank} updates, scope {heads.scope}"
            return Rule(name, info, Computed((of,), why, compute, repeatable=False))
        return taken_over(name, info, f"{module}.bias") if part == "up.bias" else None

    return special


def _shared(name: str, shared: Mapping[str, Heads]) -> tuple[str, str, Heads | None]:
    """The module of a shared projection's tensor, the rest of its name, and the heads."""
    for projection, heads in shared.items():
        before, found, part = name.partition(f"{projection}.")
        if found:
            return before + projection, part, heads
    return "", "", None


def _checks(search: Search, way: Way) -> list[Check]:
    """What must hold of the parts."""

    def judge(*args: Any) -> Judged:
        from growkit.conversions.shared_diff.low_rank import judge_parts  # brings torch

        return judge_parts(*args)

    found = []
    for layer in range(search.layers):
        for projection, heads in search.projections.items():
            weight = weight_of(projection, layer)
            module = weight.removesuffix(".weight")
            targets = tuple(f"{module}.{part}" for part in PARTS)
            judged = partial(judge, module, heads, way.shrinkage < 1)
            found.append(Check((weight,), targets, judged))
    return found


def _larger_than_source(source: Weights, plan: Plan, way: Way) -> list[str]:
    """A warning where the parts have more parameters than the projections that they replace."""
    before = bases = of_each_rank = after = 0
    for check in plan.checks:
        before += sum(source.tensors[name].elements for name in check.sources)
        base, *updates = (plan.by_target[name].info.elements for name in check.targets)
        bases += base
        of_each_rank += sum(updates) // plan.by_target[check.targets[-1]].info.shape[1]
        after += base + sum(updates)
    if after <= before:
        return []
    most = (before - bases - 1) // of_each_rank
    return [
        f"rank {' or '.join(map(str, sorted(set(way.ranks))))} makes the model larger: "
        f"{after:,} parameters in the place of {before:,} of the source's own projections; "
        + (f"ranks up to {most} hold fewer" if most > 0 else "no rank holds fewer")
    ]


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
        with self._lock:
            if which not in self._parts:
                dtype = info.torch_dtype
                moment = self._moment()
                parts = self._heads.factorise(weight.double(), self._rank, moment, dtype)
                self._parts = dict(enumerate(parts))
            part = self._parts.pop(which)
        return part.contiguous()


def multiplied_out(config: Config) -> Special:
    """Rules for a model with full projections, from a Shared DIFF model of this config."""
    shared = projections(config)

    def special(name: str, info: TensorInfo, layer: int | None) -> Rule | None:
        module, part, heads = _shared(name, shared)
        if heads and part == "weight":
            sources = tuple(f"{module}.{each}" for each in PARTS)
            compute = partial(_product, info, heads)
            return Rule(name, info, Computed(sources, "multiplied out", compute))
        return taken_over(name, info, f"{module}.up.bias") if part == "bias" else None

    return special


def _product(info: TensorInfo, heads: Heads, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
    weight = heads.multiplied_out(base.double(), down.double(), up.double())
    return weight.to(info.torch_dtype)


OPERATION = SharedDiff()
