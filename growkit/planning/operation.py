"""Operations on a checkpoint: growths and conversions, with their options."""

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.util import find_spec

from growkit.base.errors import InputError
from growkit.base.lazy import registered
from growkit.base.names import did_you_mean, perhaps
from growkit.base.options import Option, Value
from growkit.base.tensors import Config
from growkit.model.checkpoint.format import Format
from growkit.model.families.family import Family, families
from growkit.model.model import Model
from growkit.planning.plan import Plan
from growkit.results.growth_result import RankTried

PROMISES = ("exact", "bounded", "different")
"""Promises on the function, from the strongest to the weakest."""


@dataclass(frozen=True)
class SizeOption(Option):
    """A size that a growth can change, as a factor or as a number.

    Attributes:
        axes: the axes that it grows, in families that have them.
        follows: the option whose factor is its default; None if the default is no change.
    """

    axes: tuple[str, ...] = ()
    follows: str | None = None
    form: str = "xN|SIZE"

    def factor(self, size: str, current: int, sizes: Mapping[str, int] | None = None) -> Fraction:
        """The factor from ``current`` to ``size``.

        Args:
            size: the new size, as users write it.
            current: the current size.
            sizes: sizes of axes that must remain whole numbers; None for ``current`` itself.

        Raises:
            InputError: the size is not understood, or is smaller than the current one; or an axis
                would not be a whole number.
        """
        wanted = parse_size(size, current)
        if not wanted:
            raise InputError(
                f"{self.name} {size!r} is not understood; write a factor like x2, x1.5 or x3/2, or "
                f"a size like {2 * current}"
            )
        if wanted < current:
            text = size.strip()
            meant = f", or x{text} for a factor" if text.isdigit() and 1 < int(text) < 10 else ""
            raise InputError(
                f"{self.name} {size} is less than the present {current}, but sizes can only grow; "
                f"choose {current} or more{meant}"
            )
        ratio = wanted / current
        for axis, present in (sizes or {self.name: current}).items():
            if (new := present * ratio).denominator != 1:
                raise InputError(
                    f"{self.name} {size} would make {axis} {float(new):.10g}; choose a size or a "
                    "factor that makes it a whole number"
                )
        return ratio


@dataclass(frozen=True)
class Change:
    """The planned changes of an operation.

    Attributes:
        plans: plans to apply to the checkpoint, in order.
        promise: one of ``PROMISES``.
        lost: the loss, in one line; empty if nothing is lost.
        settled: values that were searched for, or are defaults, so that a repeated run gives the
            same result; None for options that the repeated run does not need.
        by_rounding: whether only rounding changes the function, so that the source's own rounding
            error is the limit.
        by_ties: whether the function changes only for tokens of which a short dtype gives two
            experts equal router logits, so that it is exact in strict float64.
        ranks: the ranks that a search tried, with their costs.
        warnings: warnings for users of the result.
    """

    plans: list[Plan]
    promise: str = "exact"
    lost: str = ""
    settled: Mapping[str, Value | None] = field(default_factory=dict)
    by_rounding: bool = False
    by_ties: bool = False
    ranks: Sequence[RankTried] = ()
    warnings: Sequence[str] = ()


class Operation(ABC):
    """A growth method or a conversion.

    Attributes:
        name: name on the command line.
        paper: name and address of the paper.
        file_format: the format of the files that it writes; None for that of the recipe.
    """

    name: str
    paper: str
    file_format: Format | None = None

    @property
    def options(self) -> tuple[Option, ...]:
        """The options; a size comes after the size that it follows."""
        return ()

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """Whether a family can express the result for one of its models.

        Otherwise the model is first turned into one of a class of growkit's own, if one runs it.

        Raises:
            InputError: an option cannot be used with such a model.
        """
        return True

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Convert options to values that mean the same in every family, e.g. sizes to factors."""
        return options

    @abstractmethod
    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """Plan the operation from headers (and from the few tensors on which a promise depends).

        Args:
            source: the checkpoint, of a family that can express the result.
            options: values of options.
            seed: seed of everything random.

        Raises:
            InputError: the operation is impossible; the message has the reason.
        """


PACKAGES = {"grow": "growth", "convert": "conversions", "shrink": "reductions"}
"""The package of each verb's operations, and its name in the extras."""

KINDS = {"grow": "growth method", "convert": "conversion to", "shrink": "method of shrinking"}
"""What the operations of each verb are, before the name of one."""


def operations(verb: str) -> dict[str, Operation]:
    """The operations of a verb, by name on the command line, in alphabetical order.

    A module defines ``OPERATION``: an operation, or a function that lists several.
    """
    kind = PACKAGES[verb]
    core = [name for name in [f"growkit.operations.{kind}"] if find_spec(name)]
    defined = registered(kind, "OPERATION", *core).values()
    listed = [one for entry in defined for one in (entry() if callable(entry) else [entry])]
    return {one.name: one for one in sorted(listed, key=lambda one: one.name)}


def operation_of(verb: str, name: str) -> Operation:
    """Find an operation by name.

    Raises:
        InputError: there is none; the message suggests the nearest name, or lists all.
    """
    known = operations(verb)
    if name in known:
        return known[name]
    for other in PACKAGES:
        if name in operations(other):
            raise InputError(f"{name} is not for {verb}; use growkit {other}")
    raise InputError(f"there is no {KINDS[verb]} {name!r}; {did_you_mean(name, known)}")


def config_key_aliases(options: Iterable[Option]) -> dict[str, str]:
    """The config keys of sizes that options grow, with the name of the option for each."""
    votes = Counter(
        (key, option.name)
        for option in options
        if isinstance(option, SizeOption)
        for family in families().values()
        for key, axes in family.axes.items()
        if not callable(axes) and set(axes) & set(option.axes)
    )
    return {key: name for (key, name), _ in reversed(votes.most_common())}


def _other_operations(option: str, known: Collection[str]) -> str:
    """Suggest operations that have an option; empty if there are none.

    Args:
        option: name of the option, or the config key of its size.
        known: options of the operation that lacks it.
    """
    every = {verb: operations(verb).values() for verb in PACKAGES}
    options = [option for methods in every.values() for one in methods for option in one.options]
    name = config_key_aliases(options).get(option, option)
    if name in known:
        return ""
    ways = []
    for verb, kind in KINDS.items():
        named = [one.name for one in every[verb] if name in (option.name for option in one.options)]
        ways += [f"the {kind} {' or '.join(named)}"] if named else []
    return f"; for {name} choose {' or '.join(ways)}" if ways else ""


def complete(operation: Operation, options: Mapping[str, Value]) -> dict[str, str]:
    """Complete the options of an operation with their defaults.

    Raises:
        InputError: there is no such option or value; the message lists the valid ones.
    """
    known = {option.name: option for option in operation.options}
    for name in options:
        if name not in known:
            aliases = config_key_aliases(operation.options)
            hint = _other_operations(name, known) or perhaps(name, known, aliases)
            has = f"; it has {', '.join(known)}" if known else ", nor any other"
            raise InputError(f"{operation.name} has no option {name}{has}{hint}")
    read = {name: option.read(options.get(name)) for name, option in known.items()}
    return {name: value for name, value in read.items() if value is not None}


_SIZE = re.compile(r"([x×]?)([0-9]{1,12})(?:\.([0-9]{1,12})|/([0-9]{1,12}))?")


def parse_size(size: str, current: int) -> Fraction | None:
    """Parse a size or a factor of ``current``; None if it is not understood.

    Only a factor may have a point or a slash, and a divisor must not be zero.
    """
    match = _SIZE.fullmatch(size.strip().lower())
    if not match:
        return None
    sign, integer, decimals, divisor = match.groups()
    if not sign:
        return None if decimals or divisor else Fraction(integer)
    if divisor:
        return current * Fraction(int(integer), int(divisor)) if int(divisor) else None
    return current * Fraction(f"{integer}.{decimals or 0}")
