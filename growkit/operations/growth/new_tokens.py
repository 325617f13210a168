"""New tokens, and a head separate from the embedding.

Logits of the old tokens do not change. The softmax does: it takes the probability of new tokens
from the old ones. If new rows are the mean of all old rows, the logit of a new token is the mean of
all old logits, so it is never the largest. If new rows are zero, it is zero, and may be the
largest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from growkit.algebra.expansion import NOTHING
from growkit.algebra.growth_law import Rows
from growkit.base.axes import Role
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.options import Option
from growkit.base.tensors import Weights
from growkit.model.families.family_parts import MAX_SIZE
from growkit.model.model import Model
from growkit.planning.operation import SizeOption
from growkit.planning.plan import Plan
from growkit.planning.transforms import Kept, Mapped, Slices, Transform, row_maps

AT_A_TIME = 1024
"""Rows that are summed at a time; another number may change the last bits."""

VOCAB = SizeOption("vocab", "vocabulary; logits of the old tokens stay the same", axes=("vocab",))
NEW_TOKENS = Option(
    "new_tokens",
    "rows of embedding and head for new tokens: the mean of all old rows, or zero",
    ("mean", "zero"),
)
UNTIE = Option(
    "untie", "give a model whose output head is its embedding a separate head", kind=bool
)


def plan_head(source: Model, options: Mapping[str, str]) -> Plan | None:
    """Plan a separate head; None if ``UNTIE`` is not set.

    Raises:
        InputError: the model already has one, or no tensor is its embedding alone.
    """
    if "untie" not in options:
        return None
    family = source.family
    if not source.complete.get("tie_word_embeddings"):
        raise InputError(f"{source.where()} already has a separate head; leave out --untie")
    before = family.patterns(source.config)
    config = {**source.config, "tie_word_embeddings": False}
    named = [name for name, pattern in before.items() if "vocab" in pattern.axes(Role.READ)]
    if len(named) != 1:
        raise InputError(
            f"the head of {source.where()} cannot be separate, since no tensor of it is the "
            "embedding of its tokens alone; leave out --untie"
        )
    (embedding,) = named
    transforms = {
        name: Kept(name)
        if name in before
        else Kept(family.duplicates.get(name, embedding), why="what it was tied to, as it is")
        for name in family.patterns(config)
    }
    return Plan.checked(source, config, transforms)


def plan_tokens(source: Model, options: Mapping[str, str]) -> Plan | None:
    """Plan the rows of new tokens; None if ``VOCAB`` asks for none.

    Raises:
        InputError: the vocabulary would be too large.
    """
    if "vocab" not in options:
        return None
    sizes, family = source.sizes, source.family
    old = sizes["vocab"]
    new = int(old * VOCAB.factor(options["vocab"], old))
    if new > MAX_SIZE:
        raise InputError(f"vocab {new:,} is more than {MAX_SIZE:,}; choose a smaller size")
    if new == old:
        return None
    rows = (*range(old), *[NOTHING] * (new - old))
    mean = options["new_tokens"] == "mean"
    why = f"{new - old} new tokens, at {'the mean' if mean else 'zero'}"
    # Embeddings for each layer have a table of their own, which some classes read for all tokens.
    tables = {axis for axis, size in sizes.items() if axis.startswith("vocab") and size == old}
    transforms: dict[str, Transform] = {}
    for member in family.members(source.config):
        name, first = member.name, member.pattern.dimensions[:1]
        transforms[name] = Kept(name)
        if first and first[0].axes & tables:
            maps = partial(row_maps, source.tensors[name].shape, rows, first[0].role)
            transforms[name] = MoreRows(name, maps, why, mean=mean)
    lost = (
        f"{new - old} new tokens share the softmax: logits of the {old} old ones stay, their "
        "probabilities do not"
    )
    config = family.resized(source.config, {**sizes, **dict.fromkeys(tables, new)})
    return Plan.checked(source, config, transforms, lost=lost)


@dataclass(frozen=True, eq=False)
class MoreRows(Mapped):
    """A tensor with new rows, which are zero or the mean of the old rows, rounded once.

    Attributes:
        mean: whether new rows are the mean.
        means: the mean of each source, computed from the whole tensor when it is first needed.
    """

    mean: bool = False
    means: dict[str, Tensor] = field(default_factory=dict)

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        block = super().part(source, where)
        rows, *others = where
        if self.mean and rows.stop > self._old:
            if self.source not in self.means:
                self.means[self.source] = _mean(partial(source.read, self.source), self._old)
            block[max(self._old - rows.start, 0) :] = self.means[self.source][tuple(others)]
        return block

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """See ``Transform``; reading the first rows also checks the new rows.

        A gradient has rows only for tokens that occur, and so none for new tokens.
        """
        if not nearest and of.start == 0 and len(rows(slice(self._old, self._old + 1))):
            expected = _mean(rows, self._old).double() if self.mean else 0.0
            for start in range(self._old, len(self.maps[0]), AT_A_TIME):
                new = rows(slice(start, min(start + AT_A_TIME, len(self.maps[0]))))
                if not bool((new.double() == expected).all()):
                    return None
        return rows(of)

    @property
    def _old(self) -> int:
        return self.maps[0].size


def _mean(rows: Rows, count: int) -> Tensor:
    """The mean of rows, with the same bits on every machine."""
    total, dtype = None, None
    for start in range(0, count, AT_A_TIME):
        block = rows(slice(start, min(start + AT_A_TIME, count)))
        dtype, block = block.dtype, block.double()
        while len(block) > 1:  # add in an order that does not depend on torch
            half = len(block) // 2
            block = torch.cat([block[:half] + block[half : 2 * half], block[2 * half :]])
        total = block[0] if total is None else total + block[0]
    assert total is not None
    return (total / count).to(dtype)
