"""Growth methods that copy axes: their shared options, and the way from sizes to plans.

A size gives an expansion of every axis that it grows, and the expansions give the transform of
every tensor (``expanding``). All these methods can also add tokens, or a head separate
from the embedding (``vocabulary``).
"""

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import chain

from growkit.algebra.splits import LEAST_SNR_DB, Shares
from growkit.base.errors import InputError
from growkit.base.options import Option, Value
from growkit.base.tensors import Config
from growkit.model.families.family import Family
from growkit.model.families.family_parts import MAX_SIZE, MultipleError
from growkit.model.model import Model
from growkit.operations.growth.expanding import BOUNDED, expand, place_copies
from growkit.operations.growth.new_tokens import NEW_TOKENS, UNTIE, VOCAB, plan_head, plan_tokens
from growkit.planning.operation import Change, Operation, SizeOption
from growkit.planning.plan import Plan, Planned

DEFAULT_SNR_DB = 10.0


SIZES_TRIED = 100
"""Limit of the sizes tried for a suggestion, in each direction."""


SNR_LIMITS = math.ceil(100 * LEAST_SNR_DB) / 100, 300


SYMMETRY = Option(
    "symmetry",
    "how weights are split among copies: at random (break), so that they diverge in training, or "
    "evenly (keep), so that they stay equal",
    ("break", "keep"),
)


MOMENTS = Option(
    "moments",
    "moments that an optimizer's state (--optimizer) has for copies: those of the original (copy), "
    "or none for all copies but the first (reset), so that even copies diverge too",
    ("copy", "reset"),
)


GROUPS = Option(
    "groups",
    "query heads that a copy of a KV head serves: copies of its whole group (whole), or of part of "
    "it (part), so that copies of the KV head diverge; auto is whole with --symmetry keep",
    ("auto", "whole", "part"),
    unrecorded="part",
)


PROMISE = Option(
    "promise",
    "whether the function may change: not at all (exact), or by rounding some tensors once, where "
    "that is impossible (bounded)",
    ("exact", "bounded"),
)


SNR_DB = Option(
    "snr_db",
    "signal-to-noise ratio of random splits, 4.78 to 300 dB: the higher, the more alike the parts; "
    f"{DEFAULT_SNR_DB:g} by default",
    form="DB",
    kind=float,
    limits=SNR_LIMITS,
)


def shares_of(options: Mapping[str, str], seed: int) -> Shares:
    """The shares of splits that ``SYMMETRY`` and ``SNR_DB`` choose."""
    symmetry, snr_db = options["symmetry"], float(options.get("snr_db", DEFAULT_SNR_DB))
    return Shares(snr_db if symmetry == "break" else None, seed)


@dataclass(frozen=True)
class CopyMethod(Operation):
    """A growth method that copies axes.

    Attributes:
        name: name on the command line.
        paper: address of the paper.
        sizes: options for the sizes, which name the axes to grow and the size to follow.
        needs: axes that a model must have.
    """

    name: str
    paper: str
    sizes: tuple[SizeOption, ...]
    needs: tuple[str, ...] = ()

    @property
    def options(self) -> tuple[Option, ...]:
        """See ``Operation``."""
        return (*self.sizes, VOCAB, NEW_TOKENS, UNTIE, PROMISE, SYMMETRY, GROUPS, SNR_DB, MOMENTS)

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """See ``Operation``."""
        old = family.sizes(config)
        if not (family.form and old.get("noise_heads")):
            return True  # a DIFF Transformer would not help
        return family.expresses(config, {**old, **self.grown(family, config, options)})

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """See ``Operation``; turns sizes into factors where it can."""
        factors = dict(options)
        complete, present = family.solved(config)
        for option in self.sizes:
            axes = _axes(family, present, option)
            if option.name in options and axes:
                with suppress(InputError):
                    current = _current_size(family, complete, present, option, axes)
                    factors[option.name] = f"x{option.factor(options[option.name], current)}"
        return factors

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``Operation``."""
        try:
            return self._plan(source, options, seed)
        except MultipleError as error:
            sizes = self._possible_sizes(source, options, seed)
            raise InputError(f"{error.problem}; {sizes}") from None

    def _plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        shares = shares_of(options, seed)
        groups = options.get("groups", "auto")
        if groups == "auto" and not shares.parting:
            groups = "whole"
        resets = options.get("moments") == "reset"
        settings: dict[str, Value | None] = {
            "groups": None if groups == "auto" else groups,
            "symmetry": options["symmetry"],
            "snr_db": shares.snr_db,
            "moments": "reset" if resets else None,
            "new_tokens": options["new_tokens"] if "vocab" in options else None,
        }
        plans: list[Plan] = []
        for prepare in (plan_head, plan_tokens):
            if plan := prepare(source, options):
                plans.append(plan)
                source = Planned(source, plan)
        lost = [plan.lost for plan in plans if plan.lost]
        family, old = source.family, source.sizes
        for axis in self.needs:
            if not old.get(axis):
                raise InputError(
                    f"{self.name} grows models with {axis}, but the {family.name} model in "
                    f"{source.where()} has none; choose another method"
                )
        grown = self.grown(family, source.config, options)
        if grown:
            rounding = options.get("promise") == "bounded"
            copies = partial(place_copies, source, grown, whole_groups=groups == "whole")
            plan = expand(source, grown, copies, shares, rounding=rounding, resets=resets)
            plans.append(plan)
            lost += [plan.lost] if plan.lost else []
            if rounded := list(plan.recomputed_sources):
                tensors = f"{len(rounded)} tensors" if len(rounded) > 1 else "a tensor"
                lost.append(f"one rounding of every element of {tensors} (first {rounded[0]})")
                return Change(plans, "bounded", "; ".join(lost), settings, by_rounding=True)
        if not plans:
            names = ", ".join("--" + option.name.replace("_", "-") for option in self.sizes)
            raise InputError(f"nothing would grow; give at least one of {names} a factor like x2")
        return Change(plans, "exact", "; ".join(lost), settings)

    def _possible_sizes(self, source: Model, options: Mapping[str, str], seed: int) -> str:
        """Suggest the nearest values of the first size that can be planned, with all others."""
        family, config = source.family, source.config
        complete, present = family.solved(config)
        option = next(size for size in self.sizes if size.name in options)
        scaled = {option.name}
        for size in self.sizes:
            scaled |= {size.name} if size.follows in scaled and size.name not in options else set()
        axes = (_axes(family, present, size) for size in self.sizes if size.name in scaled)
        own = _axes(family, present, option)
        current = _current_size(family, complete, present, option, own)
        wanted = int(current * option.factor(options[option.name], current))
        unit = current // math.gcd(current, *(present[axis] for axis in chain(*axes)))
        unchecked = replace(family, check=lambda config: None)  # a check may build models

        def possible(size: int, promise: str) -> bool:
            trial = {**options, option.name: str(size), "promise": promise}
            with suppress(InputError):
                grown = self.grown(family, config, trial)
                if unchecked.expresses(config, {**present, **grown}):
                    self._plan(source, trial, seed)
                    return True
            return False

        below = range((wanted - 1) // unit * unit, current, -unit)
        above = range((wanted // unit + 1) * unit, MAX_SIZE, unit)
        choices: dict[int, str] = {}
        asked = options.get("promise", "exact")
        for promise in dict.fromkeys((asked, "bounded")):
            allowing = "" if promise == asked else f" with {BOUNDED}"
            for sizes in (below, above):
                tried = (size for size in sizes[:SIZES_TRIED] if possible(size, promise))
                if near := next(tried, None):
                    choices.setdefault(near, f"{option.name} {near}{allowing}")
        if not choices:
            return f"no {option.name} near it fits the other sizes; let them grow as well"
        return f"choose {' or '.join(choices.values())}"

    def grown(self, family: Family, config: Config, options: Mapping[str, str]) -> dict[str, int]:
        """Compute the new size of every axis that grows.

        Raises:
            InputError: a size is impossible.
        """
        complete, present = family.solved(config)
        ratios: dict[str, Fraction] = {}
        grown: dict[str, int] = {}
        for option in self.sizes:
            axes = _axes(family, present, option)
            size = options.get(option.name)
            ratio = ratios[option.follows] if option.follows else Fraction(1)
            if size is not None:
                if not axes:
                    raise InputError(f"{family.one} has no {option.name} to grow")
                named = {axis: present[axis] for axis in axes if axis in option.axes}
                current = _current_size(family, complete, present, option, axes)
                ratio = option.factor(size, current, named)
            # A size that follows another one stays if it cannot grow, or not to a whole number.
            stay = family.fixed(complete) if size is None else ()
            sizes = {axis: present[axis] * ratio for axis in axes if axis not in stay}
            integers = {axis: int(new) for axis, new in sizes.items() if new.denominator == 1}
            grown |= {axis: new for axis, new in integers.items() if new != present[axis]}
            ratios[option.name] = ratio if len(integers) == len(axes) else Fraction(1)
        return grown


def _axes(family: Family, sizes: Mapping[str, int], option: SizeOption) -> list[str]:
    """The axes of a model that an option grows: those that it names, and those of their kind."""
    return [axis for axis in sizes if family.kinds.get(axis, axis) in option.axes]


def _current_size(
    family: Family,
    complete: Config,
    sizes: Mapping[str, int],
    option: SizeOption,
    axes: list[str],
) -> int:
    """The current size in units of the config: DiffLlama counts signal and noise heads together.

    If an option's axes have different sizes, such as two widths of experts, those that the option
    names count.
    """
    axes = [axis for axis in axes if axis in option.axes] or axes[:1]
    for key, parts in family.axes_of(complete).items():
        if set(parts) == set(axes):
            return int(complete[key])
    distinct = [axis for axis in axes if axis not in family.same]
    return sum(sizes[axis] for axis in distinct or axes)
