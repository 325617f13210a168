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

from growkit.algebra.shares import LEAST_SNR_DB, Shares
from growkit.checkpoint.tensors import Config, Weights
from growkit.errors import InputError
from growkit.families.family import Family, stored_family
from growkit.growth.expanding import expand
from growkit.planning.operation import Change, Option, Row, SizeOption
from growkit.planning.plan import Plan

if TYPE_CHECKING:
    from growkit.algebra.expansion import Expansion


DEFAULT_SNR_DB = 10.0
MOST_SNR_DB = 300


def _is_snr(text: str) -> bool:
    try:
        snr_db = float(text)
    except ValueError:
        raise InputError(f"snr_db {text!r} is not a number of decibels") from None
    if not LEAST_SNR_DB <= snr_db <= MOST_SNR_DB:
        raise InputError(
            f"snr_db {text} is out of range; exact splits exist from 4.78 dB upwards, "
            f"and beyond {MOST_SNR_DB} dB there is no noise left"
        )
    return True


SYMMETRY = Option(
    "symmetry",
    "how weights are split among copies: at random (break), so that these can part in training, or "
    "evenly (keep), as HyperCloning was published, so that they stay equal",
    ("break", "keep"),
    kinds=(str,),
)
SNR_DB = Option(
    "snr_db",
    "how even random splits are, as a signal-to-noise ratio in dB: the higher, the more alike the "
    f"parts; {DEFAULT_SNR_DB:g} without",
    form="DB",
    accepts=_is_snr,
    kinds=(str, int, float),
)


@dataclass(frozen=True)
class CopyMethod:
    """A growth method that copies whole spaces: its sizes say which, and what follows what.

    ``needs`` names axes without which the method makes no sense.
    """

    name: str
    paper: str
    sizes: tuple[SizeOption, ...]
    needs: tuple[str, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def options(self) -> tuple[Option, ...]:
        """See ``growkit.planning.operation.Operation``."""
        return (*self.sizes, SYMMETRY, SNR_DB)

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``growkit.planning.operation.Operation``."""
        old = family.sizes(config)
        if not old.get("noise_heads"):
            return True  # nothing that the DIFF Transformer could do for it
        copies = self.copies(family, config, options)
        new = {axis: size * copies.get(axis, 1) for axis, size in old.items()}
        return family.expresses(config, new)

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """See ``growkit.planning.operation.Operation``."""
        return as_factors(family, config, self.sizes, options)

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        snr_db = float(options.get("snr_db", DEFAULT_SNR_DB))
        parting = options["symmetry"] == "break"
        settled = {"symmetry": options["symmetry"], "snr_db": snr_db if parting else None}
        shares = Shares(snr_db if parting else None, seed)
        return Change([self._plan(source, options, shares)], settled=settled)

    def _plan(self, source: Weights, options: Mapping[str, str], shares: Shares) -> Plan:
        family = stored_family(source)
        for axis in self.needs:
            if not family.sizes(source.config).get(axis):
                raise InputError(
                    f"{self.name} grows models with {axis}, but {source.where()} is a "
                    f"{family.name} model without; choose another method"
                )
        copies = self.copies(family, source.config, options)
        old = family.sizes(source.config)
        grown = {axis: old[axis] * count for axis, count in copies.items()}
        return expand(source, family, grown, partial(_whole, family, old, copies), shares)

    def copies(self, family: Family, config: Config, options: Mapping[str, str]) -> dict[str, int]:
        """The number of copies of every axis that grows.

        Raises:
            InputError: a size is no whole multiple, or nothing grows.
        """
        present = family.sizes(config)
        factors: dict[str, int] = {}
        copies: dict[str, int] = {}
        for option in self.sizes:
            axes = _axes(family, present, option)
            size = options.get(option.name)
            if size is None:
                factors[option.name] = factors[option.follows] if option.follows else 1
            elif not axes:
                raise InputError(f"a {family.name} model has no {option.name} to grow")
            else:
                current = _current_size(family, config, option, axes)
                factors[option.name] = factor(option.name, size, current)
            copies |= dict.fromkeys(axes, factors[option.name])
        copies = {axis: count for axis, count in copies.items() if count > 1}
        if not copies:
            names = ", ".join("--" + option.name.replace("_", "-") for option in self.sizes)
            raise InputError(f"nothing would grow; give at least one of {names} a factor like x2")
        return copies


def as_factors(
    family: Family,
    config: Config,
    sizes: Sequence[SizeOption],
    options: Mapping[str, str],
) -> dict[str, str]:
    """Sizes in a family's own numbers as factors, which mean the same in every family.

    Sizes of what the family does not have, or that are no multiples, stay as they are.
    """
    present = family.sizes(config)
    factors = dict(options)
    for option in sizes:
        axes = _axes(family, present, option)
        if option.name in options and axes:
            with suppress(InputError):
                current = _current_size(family, config, option, axes)
                factors[option.name] = f"x{factor(option.name, options[option.name], current)}"
    return factors


def factor(name: str, size: str, current: int) -> int:
    """The number of copies that turns ``current`` into ``size``.

    Raises:
        InputError: the size is not understood, or not a whole multiple of the current one.
    """
    text = size.strip().lower()
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
        meant = f", or write x{wanted} for a factor" if 1 < wanted < min(10, current) else ""
        raise InputError(
            f"{name} {wanted} is not a whole multiple of the present {current}; "
            f"choose {below} or {below + current}{meant}"
        )
    return wanted // current


def _axes(family: Family, present: Mapping[str, int], option: SizeOption) -> list[str]:
    """The axes of a model that an option grows: those it names, and those that grow with them."""
    return [axis for axis in present if family.kinds.get(axis, axis) in option.axes]


def _current_size(family: Family, config: Config, option: SizeOption, axes: list[str]) -> int:
    """A size in the config's own units: DiffLlama's heads are signal and noise heads together.

    Where experts are as wide as they like, it is that of what the option names.
    """
    axes = [axis for axis in axes if axis in option.axes] or axes[:1]
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
