"""Growth by whole copies: from what people ask of sizes to the expansion of every space.

Shared by every method whose growth is a choice of copies (``growkit.algebra.law``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from growkit.algebra.shares import Shares
from growkit.checkpoint.tensors import Config, Weights
from growkit.errors import InputError
from growkit.families.family import Family, stored_family
from growkit.growth.expanding import expand
from growkit.growth.method import Size, SizeOption
from growkit.planning.plan import Plan

if TYPE_CHECKING:
    from growkit.algebra.expansion import Expansion


@dataclass(frozen=True)
class CopyMethod:
    """A growth method that copies whole spaces: its options say which, and what follows what.

    ``needs`` names axes without which the method makes no sense.
    """

    name: str
    summary: str
    paper: str
    promise: str
    options: tuple[SizeOption, ...]
    needs: tuple[str, ...] = ()

    def plan(self, source: Weights, sizes: Mapping[str, Size | None], shares: Shares) -> Plan:
        """See ``growkit.growth.method.Method``."""
        family = stored_family(source)
        for axis in self.needs:
            if not family.sizes(source.config).get(axis):
                raise InputError(
                    f"{self.name} grows models with {axis}, but {source.where()} is a "
                    f"{family.name} model without; choose another method"
                )
        copies = self.copies(family, source.config, sizes)
        old = family.sizes(source.config)
        grown = {axis: old[axis] * count for axis, count in copies.items()}
        return expand(source, family, grown, partial(_whole, family, old, copies), shares)

    def copies(
        self, family: Family, config: Config, sizes: Mapping[str, Size | None]
    ) -> dict[str, int]:
        """The number of copies of every axis that grows.

        Raises:
            InputError: an option is unknown, or a size is no whole multiple, or nothing grows.
        """
        unknown = sizes.keys() - {option.name for option in self.options}
        if unknown:
            raise InputError(
                f"{self.name} has no size {sorted(unknown)[0]}; "
                f"it has {', '.join(option.name for option in self.options)}"
            )
        present = family.sizes(config)
        factors: dict[str, int] = {}
        copies: dict[str, int] = {}
        for option in self.options:
            axes = [axis for axis in option.axes if axis in present]
            size = sizes.get(option.name)
            if size is None:
                factors[option.name] = factors[option.follows] if option.follows else 1
            elif not axes:
                raise InputError(f"a {family.name} model has no {option.name} to grow")
            else:
                current = _current_size(family, config, axes)
                factors[option.name] = factor(option.name, size, current)
            copies |= dict.fromkeys(axes, factors[option.name])
        copies = {axis: count for axis, count in copies.items() if count > 1}
        if not copies:
            names = ", ".join("--" + option.name.replace("_", "-") for option in self.options)
            raise InputError(f"nothing would grow; give at least one of {names} a factor like x2")
        return copies


def as_factors(
    family: Family,
    config: Config,
    options: Sequence[SizeOption],
    sizes: Mapping[str, Size],
) -> dict[str, Size]:
    """Sizes in a family's own numbers as factors, which mean the same in every family.

    Sizes of what the family does not have, or that are no multiples, stay as they are.
    """
    present = family.sizes(config)
    factors: dict[str, Size] = dict(sizes)
    for option in options:
        axes = [axis for axis in option.axes if axis in present]
        if option.name in sizes and axes:
            with suppress(InputError):
                current = _current_size(family, config, axes)
                factors[option.name] = f"x{factor(option.name, sizes[option.name], current)}"
    return factors


def factor(name: str, size: Size, current: int) -> int:
    """The number of copies that turns ``current`` into ``size``.

    Raises:
        InputError: the size is not understood, or not a whole multiple of the current one.
    """
    text = str(size).strip().lower()
    match = re.fullmatch(r"(x?)([0-9]{1,12})", text)
    if not match or int(match[2]) == 0:
        raise InputError(
            f"{name} {size!r} is not understood; write a whole factor like x2 or a size "
            f"like {2 * current}"
        )
    if match[1]:
        return int(match[2])
    wanted = int(match[2])
    if wanted % current:
        below = max(wanted // current, 1) * current
        raise InputError(
            f"{name} {wanted} is not a whole multiple of the present {current}; "
            f"choose {below} or {below + current}"
        )
    return wanted // current


def _current_size(family: Family, config: Config, axes: list[str]) -> int:
    """A size in the config's own units: DiffLlama's heads are signal and noise heads together."""
    complete = family.complete(config)
    sizes = family.sizes(config)
    for key, parts in family.axes_of(complete).items():
        if set(parts) == set(axes):
            return int(complete[key])
    distinct = [axis for axis in axes if axis not in family.same]
    return sum(sizes[axis] for axis in distinct or axes)


def _whole(
    family: Family, sizes: Mapping[str, int], copies: Mapping[str, int]
) -> dict[str, Expansion]:
    """Whole copies of every axis."""
    from growkit.algebra.expansion import in_blocks, side_by_side

    return {
        axis: (side_by_side if axis in family.grouped else in_blocks)(sizes[axis], count)
        for axis, count in copies.items()
    }
