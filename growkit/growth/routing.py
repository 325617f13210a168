"""Shared by growth into experts and of experts: numbers of experts, and where they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from growkit.algebra.axes import Pattern, Role
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config
from growkit.families.description import Tensor
from growkit.families.family import Family
from growkit.families.sizes import MOST_EXPERTS
from growkit.growth.sizes import check_whole, parsed
from growkit.planning.operation import Option, Row, SizeOption


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
