"""What tensors are multiplied by, where a model class computes with means and sizes of a space.

A norm takes the mean over a space. Copies of everything leave it as it is; zeros beside everything
make it smaller, and what comes out larger: the weight takes that back, and what is added to the
mean (eps, a key of the config) becomes smaller in proportion. Powers of two are exact, so zeros
that make a space four times as large round nothing. Uneven copies change a mean in a way that
depends on what goes in, which no weight takes back. Other numbers of zeros round the weights of
norms once, which only the promise *bounded* allows.

A class may also multiply tensors by a number that it computes from sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from growkit.algebra.axes import Pattern, Role
from growkit.base.errors import InputError
from growkit.checkpoint.tensors import Config
from growkit.families.description import Norm, Tensor
from growkit.families.family import Family

if TYPE_CHECKING:
    from growkit.algebra.expansion import Expansion


BOUNDED = "--promise bounded"
"""How people allow that tensors are rounded once."""


class Factors:
    """The factors of a growth.

    Args:
        family: of the model.
        old: size of every axis in the source.
        new: likewise in the target.
        expansions: of every axis that grows.
        rounding: whether tensors may be rounded once.
    """

    def __init__(
        self,
        family: Family,
        old: Mapping[str, int],
        new: Mapping[str, int],
        expansions: Mapping[str, Expansion],
        *,
        rounding: bool = False,
    ) -> None:
        self._family = family
        self._old, self._new, self._expansions = old, new, expansions
        self._rounding = rounding

    def of(self, tensor: Tensor) -> tuple[float, bool]:
        """What a tensor is multiplied by, and whether that rounds.

        Raises:
            InputError: it would round, but must not; or there is no such number.
        """
        factor = math.sqrt(self._mean(tensor.norm)) if tensor.norm else 1.0
        if tensor.scale:
            factor *= tensor.scale(self._old) / tensor.scale(self._new)
        by_two = math.frexp(factor)[0] == 0.5
        fits = not tensor.offset or 1 <= factor <= self._copies_read(tensor)
        if self._rounding or (by_two and fits):
            return factor, not (by_two and fits)
        grows = self._grows(tensor)
        what = f"{tensor.name} of a {self._family.name} model"
        if not by_two:
            whole = "" if tensor.scale else f", by whole copies{self._multiples(tensor)}"
            raise InputError(
                f"{what} would be multiplied by {factor:.6g}, which rounds; {grows} can grow by "
                f"powers of four{whole}, or as asked with {BOUNDED}"
            )
        raise InputError(
            f"{what}, to which its class adds {tensor.offset:g}, would be multiplied by "
            f"{factor:g}, which rounds; {grows} can grow by whole copies, or as asked with "
            f"{BOUNDED}"
        )

    def _copies_read(self, tensor: Tensor) -> float:
        """How many copies of everything are read, of which some could be read as a whole."""
        read = Pattern.parse(tensor.pattern).axes(Role.READ) & self._expansions.keys()
        return math.prod(int(self._expansions[axis].counts.min()) for axis in read)

    def config(self, source: Config, config: Config) -> Config:
        """The target's config with what its norms add to the means.

        Args:
            source: the source's config.
            config: the target's, in which sizes have been set.

        Raises:
            InputError: there is no such config.
        """
        before = self._family.complete(source)
        shrunk: dict[str, dict[float, str]] = {}
        for norm in self._norms(before):
            mean = self._mean(norm)
            if norm.eps is None and mean != 1:
                raise self._refusal(norm.over, "what their class adds to the mean is fixed")
            if norm.eps is not None:
                shrunk.setdefault(norm.eps, {})[mean] = norm.over
        changed = {key: means for key, means in shrunk.items() if set(means) != {1.0}}
        if not changed:
            return config
        for key, means in changed.items():
            if self._rounding and len(means) == 2:  # where nothing grows, eps is next to nothing
                means.pop(1.0, None)
            if len(means) > 1:
                raise self._refusal(
                    " and ".join(means.values()), f"{key} serves norms over both, that change apart"
                )
            if type(before[key]) not in (int, float):
                raise InputError(
                    f"config.json of a {self._family.name} model has {key} {before[key]!r}; a "
                    "number was expected"
                )
            config = {**config, key: before[key] * next(iter(means))}
        # What the class would derive from that stays what it was.
        after = self._family.complete(config)
        derived = {k: before[k] for k in self._family.defaults if before[k] != after[k]}
        return config | {k: value for k, value in derived.items() if k not in config}

    def _norms(self, complete: Config) -> Iterator[Norm]:
        for tensor in self._family.tensors:
            if tensor.norm and tensor.when(complete):
                yield tensor.norm
        yield from self._family.norms

    def _mean(self, norm: Norm) -> float:
        """The mean square of a space in the target, as a part of that in the source."""
        expansion = self._expansions.get(norm.over)
        if expansion is None or expansion.copies:
            return 1.0
        if expansion.counts.min() != expansion.counts.max():
            raise self._refusal(norm.over, "uneven copies do not keep it")
        if norm.centred:
            raise self._refusal(norm.over, "and take away the mean, which zeros do not keep")
        return float(expansion.counts.sum()) / len(expansion.source)

    def _multiples(self, tensor: Tensor) -> str:
        """The whole multiples that are nearest to what was asked for, the present size aside."""
        axis = tensor.norm.over if tensor.norm else ""
        old, new = self._old.get(axis, 1), self._new.get(axis, 1)
        least = new // old * old
        near = [str(size) for size in (least, least + old) if size > old]
        return f" (to {' or '.join(near)})" if new > least else ""

    def _grows(self, tensor: Tensor) -> str:
        grown = sorted(axis for axis in self._expansions if axis in tensor.pattern)
        return " and ".join(grown)

    def _refusal(self, axis: str, why: str) -> InputError:
        return InputError(
            f"{axis} cannot grow like this: norms of a {self._family.name} model take a mean over "
            f"it, {why}; choose whole copies, or leave it as it is"
        )
