"""More experts: those of a model with experts are copied, with their rows of the router.

Every expert gets c copies, and a token goes through c times as many. Copies get the same number, so
that the c·k largest belong to the k experts that were chosen before, each with all of its copies.
Together these weigh what the expert weighed:

- softmax over the chosen: w_i = exp l_i / Σ_chosen exp l_j. The sum has every term c times, a copy
  weighs w_i / c, and c copies w_i.
- softmax over all experts, of which some are chosen: likewise, with the sum over all.
- a sigmoid of each number, divided by the sum of the chosen: likewise. Without that division a copy
  weighs what the expert weighed, and what all weights are multiplied by is divided by c.
- groups, of which some are chosen first: copies stand in blocks, so that whole groups are copied,
  and c times as many are chosen.

Copies that are the same stay the same. As they are chosen together with equal weights, their last
matrices may be c times any parts that sum to the expert's: exact random splits let them part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from growkit.algebra.axes import Pattern, Role
from growkit.algebra.shares import Shares
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config, TensorInfo, Weights
from growkit.families.description import Tensor as Described
from growkit.families.family import Family, stored_family
from growkit.families.sizes import MOST_EXPERTS
from growkit.growth.copying import DEFAULT_SNR_DB, SNR_DB, SYMMETRY
from growkit.planning.operation import Change, Option, Row, SizeOption, Value, check_whole, parsed
from growkit.planning.plan import Plan, Rule, unused_tensors
from growkit.planning.transforms import Kept, Mapped, Section, Transform

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.expansion import IndexMap


def is_count(text: str) -> bool:
    """Whether a text is a number of things that there are."""
    return bool(re.fullmatch(r"[1-9][0-9]{0,5}", text))


EXPERTS = "experts"
"""The axis of experts."""

NUMBER = SizeOption(
    EXPERTS,
    "how many experts each layer gets; the method experts makes a multiple of those there are",
    axes=(EXPERTS,),
    needed=True,
)
TOP_K = Option(
    "top_k",
    "experts that a token goes through; by default two groups of pieces under upcycle; under "
    "experts, multiplied by the same factor",
    form="N",
    accepts=is_count,
    kinds=(str, int),
)


class WithExperts:
    """What every method that makes experts says of itself."""

    rows: tuple[Row, ...] = ()

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``growkit.planning.operation.Operation``."""
        return True

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """See ``growkit.planning.operation.Operation``."""
        return options


def asked_for(size: str, present: int, layers: int) -> int:
    """The number of experts that is meant, before anything is made for each.

    Args:
        size: a factor or a number.
        present: the number of experts that there are; 1 for an MLP.
        layers: number of layers.

    Raises:
        InputError: the number is not understood, no multiple of those that there are, or more than
            any model has.
    """
    wanted = parsed(size, present)
    if not wanted:
        raise InputError(
            f"experts {size!r} is not understood; write a whole factor like x2 or a number like "
            f"{8 * present}"
        )
    check_whole(EXPERTS, size, {EXPERTS: wanted})
    experts = int(wanted)
    if experts == present:
        raise InputError(f"{experts} experts are no more than there are; choose {2 * experts}")
    if experts % present:
        below = max(experts // present * present, present)
        choices = " or ".join(str(each) for each in (below, below + present) if each > present)
        raise InputError(
            f"{experts} experts cannot be had by copying each of the present {present} as often as "
            f"the others, so that all copies of what is chosen are chosen; choose {choices}"
        )
    if experts * layers > MOST_EXPERTS:
        raise InputError(
            f"{experts:,} experts in each of {layers:,} layers are more than can be made; "
            f"choose at most {MOST_EXPERTS // layers:,}"
        )
    return experts


@dataclass(frozen=True)
class Place:
    """A tensor of a model with experts.

    Attributes:
        name: of the tensor.
        tensor: its description.
        layer: of the tensor; None outside of the layers.
        expert: which one it belongs to; None if it is no single expert's.
    """

    name: str
    tensor: Described
    layer: int | None
    expert: int | None

    @property
    def pattern(self) -> Pattern:
        """What the tensor reads and writes."""
        return Pattern.parse(self.tensor.pattern)

    def of_expert(self, expert: int) -> str:
        """The name of the same tensor of another expert."""
        return self.tensor.name.format(layer=self.layer, expert=expert)

    @property
    def is_last(self) -> bool:
        """Whether a tensor of an expert belongs to what it does last, and writes hidden states."""
        return "hidden" in self.pattern.axes(Role.WRITTEN)


def places(family: Family, config: Config) -> Iterator[Place]:
    """Every tensor of a model with experts."""
    count = family.sizes(config)[EXPERTS]
    last, number = None, 0
    for name, tensor, layer in family.members(config):
        expert = None
        if "{expert}" in tensor.name:  # of which all experts stand side by side
            number = (number + 1) % count if last == (tensor.name, layer) else 0
            last, expert = (tensor.name, layer), number
        yield Place(name, tensor, layer, expert)


class MoreExperts(WithExperts):
    """See the module."""

    name = "experts"
    paper = "https://arxiv.org/abs/2212.05055"
    options: tuple[Option, ...] = (NUMBER, TOP_K, SYMMETRY, SNR_DB)

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        family = stored_family(source)
        if family.experts is None:
            raise InputError(
                f"the {family.name} model in {source.where()} has no experts to copy; "
                "--method upcycle makes experts of its MLP"
            )
        present = family.sizes(source.config)
        wanted = asked_for(options[EXPERTS], present[EXPERTS], present["layers"])
        copies = wanted // present[EXPERTS]
        symmetry = options["symmetry"]
        snr_db = float(options.get("snr_db", DEFAULT_SNR_DB)) if symmetry == "break" else None
        shares = Shares(snr_db, seed, symmetry == "uneven")
        if shares.parting and copies & (copies - 1):
            raise InputError(
                f"{copies} copies of an expert part exactly only if their number is a power of "
                "two; choose one, or --symmetry keep for copies that stay the same"
            )
        config, follows = _config(source, family, copies, options.get("top_k"))
        plan = _Copying(source, family, present, copies, shares).plan(config)
        settled: dict[str, Value | None] = {"symmetry": symmetry, "snr_db": snr_db}
        if follows:
            return Change([plan], settled=settled)
        lost = "copies of some experts are chosen in the place of others, since top_k was given"
        return Change([plan], "different", lost, settled)


def _config(source: Weights, family: Family, copies: int, top_k: str | None) -> tuple[Config, bool]:
    """The config with more experts, and whether all copies are chosen together.

    Raises:
        InputError: the model does not say how many experts a token goes through.
    """
    experts, complete = family.experts, family.complete(source.config)
    assert experts
    sizes = family.sizes(source.config)
    config = dict(family.resized(source.config, sizes | {EXPERTS: copies * sizes[EXPERTS]}))
    chosen = complete.get(experts.top_k)
    if not isinstance(chosen, int) or not 1 <= chosen <= sizes[EXPERTS]:
        raise InputError(
            f"config.json in {source.where()} has {experts.top_k} {chosen!r}; a number from 1 to "
            f"{sizes[EXPERTS]} was expected"
        )
    config[experts.top_k] = int(top_k) if top_k else copies * chosen
    if config[experts.top_k] > copies * sizes[EXPERTS]:
        raise InputError(
            f"top_k {top_k} of {copies * sizes[EXPERTS]} experts cannot be chosen; leave it out"
        )
    for key in experts.groups:
        if complete.get(key) is not None:
            config[key] = copies * complete[key]
    if experts.alone(complete):
        assert experts.scaling
        config[experts.scaling] = complete[experts.scaling] / copies
    return config, config[experts.top_k] == copies * chosen


@dataclass(frozen=True)
class _Copying:
    """How every tensor is made."""

    source: Weights
    family: Family
    present: Mapping[str, int]
    copies: int
    shares: Shares

    def plan(self, config: Config) -> Plan:
        """All rules."""
        dropped, duplicates = unused_tensors(self.source, self.family)
        sizes = self.family.sizes(config)
        rules = []
        found = list(places(self.family, config))
        if not any(each.expert is not None or EXPERTS in each.tensor.pattern for each in found):
            raise InputError(f"no layer of {self.source.where()} has experts to copy")
        for place in found:
            transform = self._made(place)
            (of,) = transform.sources
            info = TensorInfo(place.pattern.shape(sizes), self.source.tensors[of].dtype)
            rules.append(Rule(place.name, info, transform))
        plan = Plan(
            config=config,
            rules=tuple(rules),
            copies={EXPERTS: self.copies},
            dropped=dropped,
            duplicates=duplicates,
        )
        plan.check(self.source, self.family.patterns(config), sizes)
        return plan

    def _made(self, place: Place) -> Transform:
        parting = self.shares.parting and place.is_last
        why = (
            f"copies of experts, times {self.copies} and split" if parting else "copies of experts"
        )
        times = float(self.copies) if parting else 1.0
        if place.expert is not None:
            copy, number = divmod(place.expert, self.present[EXPERTS])
            of = place.of_expert(number)
            if not parting:
                why = f"copy {copy + 1} of {self.copies} of an expert"
                return Kept(of, why=why, among=self.copies)
            shape = self.source.tensors[of].shape
            whole = Mapped(of, self._maps(shape, parting), why, of, self.shares, times)
            begin = (copy * shape[0], *(0 for _ in shape[1:]))
            return Section(whole, begin, f"part {copy + 1} of {self.copies} of {why}")
        if place.pattern.dimensions[0].axes != {EXPERTS}:
            return Kept(place.name)
        maps = self._maps(self.source.tensors[place.name].shape, parting)
        kind = _OfRouter if place.pattern.axes(Role.WRITTEN) == {EXPERTS} else Mapped
        return kind(place.name, maps, why, place.name, self.shares, times)

    def _maps(self, shape: tuple[int, ...], parting: bool) -> Callable[[], tuple[IndexMap, ...]]:
        """Copies of all rows, or experts, in blocks: the same again, or parts of one."""
        role = Role.READ if parting else Role.WRITTEN
        return partial(_in_blocks, shape, role, self.copies, uneven=self.shares.uneven)


class _OfRouter(Mapped):
    """Copies that part with the experts they belong to.

    One that is not chosen on a prompt may have the gradient of its copies there.
    """

    def copies(self, tensor: Tensor) -> Iterator[list[Tensor]]:
        """Nothing is asked of them alone."""
        return iter(())


@lru_cache(maxsize=64)  # layers are alike
def _in_blocks(
    shape: tuple[int, ...], role: Role, copies: int, *, uneven: bool
) -> tuple[IndexMap, ...]:
    """The maps of a tensor whose first dimension is copied, in blocks."""
    from growkit.algebra.expansion import IndexMap, in_blocks

    numbers = (copies, *(1 for _ in shape[1:]))
    made = (in_blocks(size, number) for size, number in zip(shape, numbers, strict=True))
    roles = (role, *(Role.WRITTEN for _ in shape[1:]))
    return tuple(
        IndexMap(role, each.size, each.source, each.share, uneven=uneven)
        for role, each in zip(roles, made, strict=True)
    )


OPERATION = MoreExperts()
