"""More tokens: new rows of the embedding and of the head, the old ones as they are.

Logits of the old tokens do not change. The softmax does: what it gives to new tokens, it takes from
the old ones. With the mean of all rows, the logit of a new token is the mean of all logits, so that
it is never the largest. With zero it is zero, which may well be more than all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from growkit.algebra.axes import Pattern
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import TensorInfo, Weights
from growkit.families.family import stored_family
from growkit.families.sizes import MOST_SIZE
from growkit.growth.sizes import check_whole, factor
from growkit.planning.operation import Option, SizeOption
from growkit.planning.plan import Plan, Rule, taken_over, unused_tensors
from growkit.planning.transform import Slices
from growkit.planning.transforms import Mapped

if TYPE_CHECKING:
    from torch import Tensor

    from growkit.algebra.expansion import IndexMap
    from growkit.algebra.law import Rows

VOCAB = SizeOption("vocab", "vocabulary; logits of the old tokens stay the same", axes=("vocab",))
NEW_TOKENS = Option(
    "new_tokens",
    "what embedding and head hold for new tokens: the mean of all others, or zero",
    ("mean", "zero"),
    kinds=(str,),
)

AT_A_TIME = 1024
"""Rows that are added up at a time; other numbers may give other last bits."""


def with_vocabulary(source: Weights, options: Mapping[str, str]) -> Plan | None:
    """Plan new rows, if they are asked for.

    Raises:
        InputError: there cannot be so many.
    """
    if "vocab" not in options:
        return None
    family = stored_family(source)
    sizes = family.sizes(source.config)
    old = sizes["vocab"]
    size = old * factor("vocab", options["vocab"], old)
    check_whole("vocab", options["vocab"], {"vocab": size})
    new = int(size)
    if new > MOST_SIZE:
        raise InputError(f"vocab {new:,} is more than {MOST_SIZE:,}; choose a smaller size")
    if new == old:
        return None
    dropped, duplicates = unused_tensors(source, family)
    grown = {**sizes, "vocab": new}
    config = family.resized(source.config, grown)
    mean = options["new_tokens"] == "mean"
    why = f"{new - old} new tokens, at {'the mean' if mean else 'zero'}"
    rules = []
    for name, tensor, _ in family.members(source.config):
        pattern, info = Pattern.parse(tensor.pattern), source.tensors[name]
        if not any("vocab" in each.axes for each in pattern.dimensions):
            rules.append(taken_over(name, info))
            continue
        assert pattern.dimensions[0].axes == {"vocab"}, "rows stand for tokens"
        maps = partial(_maps, pattern.notation, tuple(sizes.items()), new)
        made = MoreRows(name, maps, why, mean=mean)
        rules.append(Rule(name, TensorInfo(pattern.shape(grown), info.dtype), made))
    plan = Plan(
        config,
        tuple(rules),
        {},
        dropped=dropped,
        duplicates=duplicates,
        lost=f"{new - old} new tokens share the softmax: logits of the {old} old ones stay, their "
        "probabilities do not",
    )
    plan.check(source, family.patterns(config), family.sizes(config))
    return plan


@lru_cache(maxsize=8)
def _maps(notation: str, sizes: tuple[tuple[str, int], ...], new: int) -> tuple[IndexMap, ...]:
    from growkit.algebra.expansion import index_map, padded

    before = dict(sizes)
    grown = {"vocab": padded(before["vocab"], new)}
    return tuple(index_map(each, before, grown) for each in Pattern.parse(notation).dimensions)


@dataclass(frozen=True, eq=False)
class MoreRows(Mapped):
    """A tensor with more rows: zeros, or each the mean of those that it had, rounded once.

    Attributes:
        mean: whether they are the mean.
        found: the mean, once it was needed: the whole tensor is read for it.
    """

    mean: bool = False
    found: dict[str, Tensor] = field(default_factory=dict)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        made = super().part(source, where)
        rows, *others = where
        if self.mean and rows.stop > self._old:
            if self.source not in self.found:
                self.found[self.source] = _mean(partial(source.read, self.source), self._old)
            made[max(self._old - rows.start, 0) :] = self.found[self.source][tuple(others)]
        return made

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``; with the first rows, the new ones are looked at.

        A gradient has rows for tokens that occur alone, and none of these are new.
        """
        if of.start == 0 and len(rows(slice(self._old, self._old + 1))):
            expected = _mean(rows, self._old).double() if self.mean else 0.0
            for begin in range(self._old, len(self.maps[0]), AT_A_TIME):
                new = rows(slice(begin, min(begin + AT_A_TIME, len(self.maps[0]))))
                if not bool((new.double() == expected).all()):
                    return None
        return rows(of)

    @property
    def _old(self) -> int:
        return self.maps[0].size


def _mean(rows: Rows, count: int) -> Tensor:
    """The mean of rows, with the same bits on every machine."""
    total, dtype = None, None
    for begin in range(0, count, AT_A_TIME):
        some = rows(slice(begin, min(begin + AT_A_TIME, count)))
        added, dtype = _added(some.double()), some.dtype
        total = added if total is None else total + added
    assert total is not None
    return (total / count).to(dtype)


def _added(rows: Tensor) -> Tensor:
    """The sum of rows, in an order that is not left to torch."""
    import torch

    while len(rows) > 1:
        half = len(rows) // 2
        rows = torch.cat([rows[:half] + rows[half : 2 * half], rows[2 * half :]])
    return rows[0]
