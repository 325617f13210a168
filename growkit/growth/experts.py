"""More experts: those of a model with experts are copied, with their rows of the router.

Every expert gets c copies, and a token goes through c times as many. Copies get the same number, so
that the c·k largest belong to the k experts that were chosen before, each with all of its copies.
Together these weigh what the expert weighed:

- softmax over the chosen: w_i = exp l_i / Σ_chosen exp l_j. The sum has every term c times, a copy
  weighs w_i / c, and c copies w_i.
- softmax over all experts before some are chosen: likewise, with the sum over all.
- a sigmoid of each number, divided by the sum of the chosen: likewise. Without that division a copy
  weighs what the expert weighed, and what all weights are multiplied by is divided by c.
- groups, some of them chosen first: copies come in blocks, so that whole groups are copied,
  and c times as many are chosen.

Copies that are the same stay the same. As they are chosen together with equal weights, their last
matrices may be c times any parts that sum to the expert's: exact random splits let them part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from growkit.algebra.axes import Pattern, Role
from growkit.algebra.splits import Shares
from growkit.base.errors import InputError
from growkit.base.tensors import Config, Weights
from growkit.families.description import Tensor
from growkit.families.family import Family, stored_family
from growkit.families.sizes import MOST_EXPERTS
from growkit.growth.copying import SNR_DB, SYMMETRY, shares_of
from growkit.planning.operation import (
    Change,
    Operation,
    Option,
    SizeOption,
    Value,
    check_whole,
    parse_size,
)
from growkit.planning.plan import Plan, unused_tensors
from growkit.planning.transforms import Kept, Mapped, Section, Transform, row_maps

EXPERTS = "experts"
"""The axis of experts."""


def is_count(text: str) -> bool:
    """Whether a text is a positive number of things."""
    return bool(re.fullmatch(r"[1-9][0-9]{0,5}", text))


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


class MoreExperts(Operation):
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
        copies = wanted_experts(options[EXPERTS], present[EXPERTS], present["layers"])
        copies //= present[EXPERTS]
        shares = shares_of(options, seed)
        if shares.parting and copies & (copies - 1):
            raise InputError(
                f"{copies} copies of an expert part exactly only if their number is a power of "
                "two; choose one, or --symmetry keep for copies that stay the same"
            )
        config, follows = _config(source, family, copies, options.get("top_k"))
        unused = unused_tensors(source, family)
        found = list(places(family, config))
        if not any(each.expert is not None or EXPERTS in each.tensor.pattern for each in found):
            raise InputError(f"no layer of {source.where()} has experts to copy")
        made = {
            each.name: _copied(source, each, present[EXPERTS], copies, shares) for each in found
        }
        plan = Plan.made(source, family, config, made, unused=unused, copies={EXPERTS: copies})
        settled: dict[str, Value | None] = {
            "symmetry": options["symmetry"],
            "snr_db": shares.snr_db,
        }
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
    count = copies * sizes[EXPERTS]
    config = dict(family.resized(source.config, sizes | {EXPERTS: count}))
    chosen = complete.get(experts.top_k)
    if not isinstance(chosen, int) or not 1 <= chosen <= sizes[EXPERTS]:
        raise InputError(
            f"config.json in {source.where()} has {experts.top_k} {chosen!r}; a number from 1 to "
            f"{sizes[EXPERTS]} was expected"
        )
    config[experts.top_k] = int(top_k) if top_k else copies * chosen
    if config[experts.top_k] > count:
        raise InputError(f"top_k {top_k} of {count} experts cannot be chosen; leave it out")
    for key in experts.groups:
        if complete.get(key) is not None:
            config[key] = copies * complete[key]
    if experts.alone(complete):
        assert experts.scaling
        config[experts.scaling] = complete[experts.scaling] / copies
    return config, config[experts.top_k] == copies * chosen


def _copied(
    source: Weights, place: ExpertTensor, present: int, copies: int, shares: Shares
) -> Transform:
    """How a tensor of the model with more experts is made."""
    parting = shares.parting and place.is_last
    why = f"copies of experts, times {copies} and split" if parting else "copies of experts"
    copy, number = divmod(place.expert or 0, present)
    of = place.name if place.expert is None else place.of_expert(number)
    if place.expert is not None and not parting:
        return Kept(of, why=f"copy {copy + 1} of {copies} of an expert", among=copies)
    if place.expert is None and place.pattern.dimensions[0].axes != {EXPERTS}:
        return Kept(of)
    # Copies of all rows, or experts, in blocks: the same again, or parts of one.
    shape = source.tensors[of].shape
    role = Role.READ if parting else Role.WRITTEN
    maps = partial(row_maps, shape, (*range(shape[0]),) * copies, role, uneven=shares.uneven)
    # Rows of routers part with the experts that they belong to: one that is not chosen on a prompt
    # may have the gradient of its copies there.
    alone = place.pattern.axes(Role.WRITTEN) != {EXPERTS}
    whole = Mapped(of, maps, why, of, shares, copies if parting else 1.0, alone=alone)
    if place.expert is None:
        return whole
    begin = (copy * shape[0], *(0 for _ in shape[1:]))
    return Section(whole, begin, f"part {copy + 1} of {copies} of {why}")


def wanted_experts(size: str, present: int, layers: int) -> int:
    """The number of experts that an option asks for, before anything is made for each.

    Args:
        size: a factor or a number.
        present: the present number of experts; 1 for an MLP.
        layers: number of layers.

    Raises:
        InputError: the number is not understood, no multiple of the present one, or more than any
            model has.
    """
    wanted = parse_size(size, present)
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
            f"{experts} experts cannot be had by copying each of the present {present} equally "
            f"often, so that all copies of what is chosen are chosen; choose {choices}"
        )
    if experts * layers > MOST_EXPERTS:
        raise InputError(
            f"{experts:,} experts in each of {layers:,} layers are more than can be made; "
            f"choose at most {MOST_EXPERTS // layers:,}"
        )
    return experts


@dataclass(frozen=True)
class ExpertTensor:
    """A tensor of a model with experts.

    Attributes:
        name: of the tensor.
        tensor: its description.
        layer: of the tensor; None outside of the layers.
        expert: which one it belongs to; None if it is no single expert's.
    """

    name: str
    tensor: Tensor
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
        """Whether it belongs to the last step of an expert, and writes hidden states."""
        return "hidden" in self.pattern.axes(Role.WRITTEN)


def places(family: Family, config: Config) -> Iterator[ExpertTensor]:
    """Every tensor of a model with experts."""
    count = family.sizes(config)[EXPERTS]
    last, number = None, 0
    for name, tensor, layer in family.members(config):
        expert = None
        if "{expert}" in tensor.name:  # of all experts, one after the other
            number = (number + 1) % count if last == (tensor.name, layer) else 0
            last, expert = (tensor.name, layer), number
        yield ExpertTensor(name, tensor, layer, expert)


OPERATION = MoreExperts()
