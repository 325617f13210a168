"""Upcycling: the MLP of a dense model becomes experts, and a new router chooses among them.

Komatsuzaki et al., "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints",
arXiv 2212.05055. The weights of the chosen experts sum to one, Σ w_i = 1.

- If every expert is the dense MLP f, the model computes Σ w_i f = f for any router. There is no
  other way: if every choice with any weights gives the same, all experts are the same function.
  They diverge because they train on different tokens. Until then the router has no effect, and its
  gradient is zero; it grows with the differences of the experts.
- Finer experts hold one of G pieces of the hidden units, f = Σ_p f_p, each in several copies. They
  are chosen in groups with one copy of every piece, since the router's rows are equal within a
  group (He et al., "Upcycling Large Language Models into Mixture of Experts", arXiv 2410.07524, who
  call G the granularity). Each has 1/G of its group's weight w_g, so with the last matrix times G
  the model computes Σ_g w_g Σ_p f_p = f. In a short dtype, two groups may have equal logits where
  only one fits into the choice, and a token then gets pieces of both.
- If a class has shared experts besides the routed ones, each side computes half of the MLP.
- Drop-Upcycling (Nakamura et al., arXiv 2502.19261) draws some hidden units of every expert anew:
  here each number is drawn from the old ones, so that their distribution stays the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

from growkit.algebra.expansion import Index
from growkit.algebra.splits import noise
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, np, torch
from growkit.base.options import MAX_COUNT, Option
from growkit.base.tensors import Config, TensorInfo, main_dtype
from growkit.extras.composed_transforms import Computed, Stacked, Subtensor
from growkit.extras.experts.growth.experts import (
    EXPERTS,
    NUMBER,
    TOP_K,
    expert_of,
    is_last,
    wanted_experts,
)
from growkit.extras.upgrades.more_general import config_with
from growkit.model.families.family import Family, families
from growkit.model.families.family_parts import NEW, Experts, Member, Without
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Plan
from growkit.planning.router_ties import lost_in_ties
from growkit.planning.transforms import Constant, Kept, Transform

SPREAD = 0.02
"""Standard deviation of a new router's weights: transformers' initializer_range."""


class Upcycle(Operation):
    """See the module."""

    name = "upcycle"
    paper = "https://arxiv.org/abs/2212.05055"
    options = (
        NUMBER,
        TOP_K,
        Option(
            "granularity",
            "number of pieces of the MLP; every group of experts has a copy of each; 1 by default",
            form="N",
            kind=int,
            limits=(1, MAX_COUNT),
        ),
        Option(
            "drop",
            "part of the hidden units of every expert to draw anew (Drop-Upcycling), which makes "
            "another function; 0.5 in the paper",
            form="PART",
            kind=float,
            limits=(None, 1),
        ),
    )

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        target, experts, dense = _find_target(source)
        old, drop = source.sizes, options.get("drop")
        count, top_k, pieces = _numbers_of_experts(options, old["ffn"], old["layers"])
        upcycling = _Upcycling(
            source, target, experts, count, top_k, pieces, old["ffn"], drop, seed
        )
        plan = upcycling.plan(upcycling.config(dense))
        settings = {"top_k": top_k}
        if drop:
            lost = f"{float(drop):.0%} of the hidden units of every expert, drawn anew"
            return Change([plan], "different", lost, settings)
        if pieces > 1 and (lost := lost_in_ties(source, experts, "groups of experts", "pieces")):
            return Change([plan], "bounded", lost, settings, by_ties=True)
        return Change([plan], settled=settings)


def _numbers_of_experts(options: Mapping[str, str], ffn: int, layers: int) -> tuple[int, int, int]:
    """Read the numbers of experts, of experts per token, and of pieces of the MLP.

    Raises:
        InputError: the model would not be exact, or could not learn.
    """
    experts = wanted_experts(options[EXPERTS], 1, layers)
    pieces = int(options.get("granularity", 1))
    top_k = int(options.get("top_k", 2 * pieces))
    if pieces & (pieces - 1):
        raise InputError(f"granularity {pieces} rounds; choose a power of two")
    for name, number in (("the MLP's width", ffn), (EXPERTS, experts), ("top_k", top_k)):
        if number % pieces:
            raise InputError(
                f"{name} {number} is not a multiple of granularity {pieces}, so the chosen "
                "experts would not always make up the MLP; choose multiples"
            )
    if not 1 < top_k <= experts:
        raise InputError(
            f"top_k is {top_k}, but there are {experts} experts, and a router with one choice "
            f"could never learn; choose at least 2 and at most {experts}"
        )
    return experts, top_k, pieces


def _find_target(source: Model) -> tuple[Family, Experts, Without]:
    """Find the family with experts into which models of a dense family are upcycled.

    Returns:
        The family, its experts, and how the dense family differs.

    Raises:
        InputError: there is none.
    """
    known = {
        kind: (target, target.experts, dense)
        for target in families().values()
        if target.experts
        for kind, dense in target.experts.dense.items()
    }
    match = known.get(source.config["model_type"])
    if match and match[2].when(source.complete):
        return match
    if source.family.experts:
        raise InputError(f"{source.where()} already has experts; --method experts copies them")
    listed = ", ".join(f"{kind} ({target.name})" for kind, (target, *_) in sorted(known.items()))
    raise InputError(
        f"no class with experts matches the rest of {source.family.one}, so {source.where()} "
        f"cannot be upcycled; these can: {listed}"
    )


@dataclass(frozen=True)
class _Upcycling:
    """The rules for a model with experts.

    Attributes:
        source: the dense model.
        target: the family of the model with experts.
        experts: the description of experts in that family.
        count: number of experts.
        top_k: number of experts that a token goes through.
        pieces: number of experts that make up the MLP.
        ffn: width of the MLP.
        drop: part of the hidden units to draw anew; None for none.
        seed: seed of random numbers.
    """

    source: Model
    target: Family
    experts: Experts
    count: int
    top_k: int
    pieces: int
    ffn: int
    drop: str | None
    seed: int

    def config(self, dense: Without) -> Config:
        """Make the config of the model with experts.

        Raises:
            InputError: the dense model has a setting that the class with experts lacks.
        """
        config = config_with(self.source, self.target, dense)
        config |= dict(self.experts.config) | {self.experts.top_k: self.top_k}
        sizes = self.source.sizes | {EXPERTS: self.count}
        sizes |= self.experts.sizes(self.ffn, self.pieces)
        sizes[self.experts.width] = self.ffn // self.pieces
        for key, axes in self.target.axes_of({**self.target.defaults, **config}).items():
            config[key] = sum(sizes[axis] for axis in axes)
        for key, other in self.target.aliases.items():
            if key in config:
                config.pop(other, None)
        self.target.complete(config)
        return config

    def plan(self, config: Config) -> Plan:
        """Make the plan.

        Raises:
            InputError: the class with experts has no place for a tensor.
        """
        sizes = self.target.sizes(config)
        rules = {
            place.name: self._transform(place, place.pattern.shape(sizes))
            for place in self.target.members(config)
        }
        used = {name for transform in rules.values() for name in transform.sources}
        for name in sorted(self.source.tensors.keys() - used - self.source.unused[0].keys()):
            raise InputError(
                f"{self.target.one} has no place for tensor {name} of "
                f"{self.source.where(name)}, so it cannot be upcycled"
            )
        # As long as all experts are the same function, a router has no gradient.
        same = self.pieces == 1 and self.drop is None
        return Plan.checked(
            self.source,
            config,
            rules,
            self.target,
            copies={EXPERTS: self.count // self.pieces},
            waits=[
                name
                for name, transform in rules.items()
                if same and isinstance(transform, Computed)
            ],
            divergence="experts train on the tokens that a new router sends to them",
        )

    def _transform(self, place: Member, shape: tuple[int, ...]) -> Transform:
        of = place.tensor.dense
        if of == NEW:
            info = TensorInfo(shape, main_dtype(self.source.tensors))
            if place.pattern.dimensions[0].axes != {EXPERTS} or len(shape) == 1:
                return Constant(info.dtype, 0.0, "new, zero")
            router = partial(_new_router, f"{self.seed}:{place.name}", info, self.pieces)
            return Computed((), "new, small random numbers", router, together=self.pieces)
        names = (
            [place.name] if of is None else [pattern.format(layer=place.layer) for pattern in of]
        )
        for name in names:
            if name not in self.source.tensors:
                raise InputError(
                    f"{self.target.one} needs {place.name}, but {self.source.where()} "
                    f"has no {name}, so it cannot be upcycled"
                )
        if of is None:
            return Kept(place.name)
        if len(shape) == 2:
            return self._copied(names[0], place, expert_of(place))
        rows = shape[1] // len(names)
        stacked = [
            [(self._copied(name, place, expert), rows) for name in names]
            for expert in range(self.count)
        ]
        return Stacked(stacked, "the dense MLP for every expert")

    def _copied(self, name: str, place: Member, expert: int | None) -> Transform:
        """Make an expert's tensor from that of the dense MLP; None for the shared experts."""
        dimension, times = 0, 1.0
        if is_last(place):
            dimension = 1
            times = self.experts.beside if expert is None else self.experts.part * self.pieces
        why = f"the dense MLP, times {times:g}" if times != 1 else "the dense MLP"
        matrix: Transform = Kept(name, times, why)
        if self.drop is not None and expert is not None:
            units = f"{self.seed}:{place.layer}:{expert}"
            drawn = partial(_redraw, float(self.drop), units, name, dimension, times)
            matrix = Computed((name,), f"{why}, units drawn anew", drawn)
        if expert is None or self.pieces == 1:
            return matrix
        number = expert % self.pieces
        offsets = [0, 0]
        offsets[dimension] = number * (self.ffn // self.pieces)
        why = f"piece {number + 1} of {self.pieces} of {matrix.why}"
        return Subtensor(matrix, tuple(offsets), why)


def _new_router(key: str, info: TensorInfo, pieces: int) -> Tensor:
    """Draw the rows of a router, [experts, hidden]; rows of a group are equal."""
    experts, hidden = info.shape
    numbers = noise(key, np.arange(experts // pieces), hidden).astype(np.float64) + 0.5
    rows = torch.from_numpy(numbers * (SPREAD * 12**0.5 / 2**16))
    return rows.repeat_interleave(pieces, 0).to(info.torch_dtype)


def _redraw(
    part: float, units: str, name: str, dimension: int, times: float, weight: Tensor
) -> Tensor:
    """Make a matrix of an expert, with some hidden units drawn anew.

    Args:
        part: part of the hidden units to draw anew.
        units: seed of their choice, which is the same for all matrices of an expert.
        name: seed of the new numbers.
        dimension: the dimension of the hidden units.
        times: factor of the matrix.
        weight: the matrix of the dense MLP.
    """
    count = weight.shape[dimension]
    order = np.argsort(_numbers(units, (count,)), kind="stable")
    chosen = torch.from_numpy(np.sort(order[: max(1, round(part * count))]))
    gone = weight.index_select(dimension, chosen).contiguous()
    drawn = torch.from_numpy(_numbers(f"{units}:{name}", gone.shape) % gone.numel())
    anew = gone.flatten()[drawn.flatten()].view(gone.shape)
    index = torch.arange(count).index_copy(0, chosen, count + torch.arange(len(chosen)))
    matrix = torch.cat([weight, anew], dimension).index_select(dimension, index)
    return matrix if times == 1 else (matrix.double() * times).to(matrix.dtype)


def _numbers(key: str, shape: tuple[int, ...]) -> Index:
    """Draw whole numbers from 0 to 2⁴⁸ - 1."""
    rows = np.arange(prod(shape[:-1]))
    parts = noise(key, rows, 3 * shape[-1]).astype(np.int64).reshape(*shape, 3) + 2**15
    return np.asarray(parts @ np.array([2**32, 2**16, 1]), np.int64)


OPERATION = Upcycle()
