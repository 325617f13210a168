"""Operations: what can be done to a checkpoint, growths and conversions alike."""

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import cast

from growkit.base.errors import InputError
from growkit.base.lazy import members
from growkit.base.names import did_you_mean, perhaps
from growkit.base.tensors import Config, Weights
from growkit.families.family import Family, families
from growkit.planning.plan import Plan
from growkit.results.operation import RankTried

PROMISES = ("exact", "bounded", "different")
"""What an operation may promise of the function; the weakest of several steps is last."""

Value = str | int | float | list[int]
"""An option's value as users write it."""


@dataclass(frozen=True)
class Option:
    """An option of an operation, the same on the command line, in recipes and in Python.

    Attributes:
        name: as in recipes and in Python, e.g. ``kv_heads`` (``--kv-heads``).
        help: one line for ``--help``.
        values: what it may be, the first by default; empty for one that is written freely.
        form: what a freely written value looks like, e.g. ``N``.
        accepts: whether a freely written value is one; it may raise a more precise
            ``InputError``.
        needed: whether a freely written value must be given; else it may be left out.
    """

    name: str
    help: str
    values: tuple[str, ...] = ()
    form: str = ""
    accepts: Callable[[str], bool] = lambda text: True
    needed: bool = False

    def read(self, value: Value | None) -> str | None:
        """The value that was meant; None if there is none.

        Raises:
            InputError: it cannot be used, or is missing.
        """
        if value is None:
            if self.needed:
                raise InputError(f"{self.name} is missing; give {self.help} ({self.form})")
            return self.values[0] if self.values else None
        if isinstance(value, bool) or not isinstance(value, str | int | float | list):
            raise InputError(f"{self.name} is {value!r}; text or a number was expected")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if self.values:
            for known in self.values:
                if text.replace("-", "_") == known.replace("-", "_"):
                    return known
            raise InputError(
                f"{self.name} {text!r} is not known; choose {' or '.join(self.values)}"
                f"{perhaps(text, self.values)}"
            )
        if not self.accepts(text):
            raise InputError(f"{self.name} is {text!r}; give {self.help} ({self.form})")
        return text


@dataclass(frozen=True)
class Switch(Option):
    """An option without a value: it is on where it is given."""

    def read(self, value: Value | None) -> str | None:
        """See ``Option``."""
        if not isinstance(value, bool | None):
            raise InputError(f"{self.name} is {value!r}; true or false was expected")
        return "on" if value else None


@dataclass(frozen=True)
class SizeOption(Option):
    """A size that a growth can change: a factor, or a number (``growkit.planning.operation``).

    Attributes:
        axes: the axes it copies, in whichever family has them.
        follows: the option whose factor it takes when it is left out; None if it then stays.
    """

    axes: tuple[str, ...] = ()
    follows: str | None = None
    form: str = "xN|SIZE"

    def factor(self, size: str, current: int, sizes: Mapping[str, int] | None = None) -> Fraction:
        """By what ``current`` is multiplied to become ``size``.

        Args:
            size: as users write it.
            current: the size in its unit.
            sizes: of axes that the factor must make whole numbers; by default the current one.

        Raises:
            InputError: the size is not understood, or smaller than the current one; or an axis
                would have no whole number.
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
                f"{self.name} {size} is less than the present {current}, and nothing is taken "
                f"away; choose {current} or more{meant}"
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
    """What an operation will do to a checkpoint.

    Attributes:
        plans: from the checkpoint on, one after the other.
        promise: one of ``PROMISES``.
        lost: what is lost, in one line; empty if nothing is.
        settled: options that were found out or left to their defaults, as they would be given to
            get the same again; None for those that have served.
        by_rounding: whether nothing but rounding is lost, so that the target is held to what
            rounding does to the source itself.
        ranks: the ranks that were tried, and what they cost, where one was searched for.
        warnings: what should be known before the outcome is used.
    """

    plans: list[Plan]
    promise: str = "exact"
    lost: str = ""
    settled: Mapping[str, Value | None] = field(default_factory=dict)
    by_rounding: bool = False
    ranks: Sequence[RankTried] = ()
    warnings: Sequence[str] = ()


class Operation(ABC):
    """What the file of a growth or of a conversion defines.

    Attributes:
        name: as on the command line.
        paper: name and address of the source.
    """

    name: str
    paper: str

    @property
    def options(self) -> tuple[Option, ...]:
        """Its options; a size comes after the one that it follows."""
        return ()

    def expresses(self, family: Family, config: Config, options: Mapping[str, str]) -> bool:
        """Whether a family can hold what this makes of one of its models.

        What it cannot hold is made of the DIFF Transformer that the model is, if it is one.

        Raises:
            InputError: an option cannot be used with such a model.
        """
        return True

    def portable(
        self, family: Family, config: Config, options: Mapping[str, str]
    ) -> Mapping[str, str]:
        """The options in words that mean the same in every family: factors, say, not sizes."""
        return options

    @abstractmethod
    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """Plan the operation, from headers (and the few numbers that decide on a promise).

        Args:
            source: the checkpoint, of a family that expresses the outcome.
            options: a value for each option that has one.
            seed: of everything random.

        Raises:
            InputError: it cannot be done, and why.
        """


PACKAGES = {"grow": "growkit.growth", "convert": "growkit.conversions"}
"""The package of each verb's operations."""


def operations(verb: str) -> dict[str, Operation]:
    """The operations of a verb, by their name on the command line.

    A module defines ``OPERATION``, or a function ``operations`` that gives several.
    """
    found = cast("list[Operation]", list(members(PACKAGES[verb], "OPERATION").values()))
    for several in members(PACKAGES[verb], "operations").values():
        found += cast("Callable[[], list[Operation]]", several)()
    return {operation.name: operation for operation in found}


def operation_of(verb: str, name: str) -> Operation:
    """The operation of this name.

    Raises:
        InputError: there is none; names the nearest, or lists all.
    """
    known = operations(verb)
    if name in known:
        return known[name]
    for other in PACKAGES:
        if name in operations(other):
            raise InputError(f"{name} is not for {verb}; use growkit {other}")
    kind = "growth method" if verb == "grow" else "conversion to"
    raise InputError(f"there is no {kind} {name!r}; {did_you_mean(name, sorted(known))}")


def config_key_aliases(options: Iterable[Option]) -> dict[str, str]:
    """What configs call the sizes that options grow, and the names of the options."""
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
    """Which operations have an option, as what to choose for it; empty if none has.

    Args:
        option: its name, or the config key of the size that it changes.
        known: the options of the operation that lacks it.
    """
    every = {verb: operations(verb).values() for verb in PACKAGES}
    options = [each for found in every.values() for one in found for each in one.options]
    name = config_key_aliases(options).get(option, option)
    if name in known:
        return ""
    ways = []
    for verb, way in (("grow", "the growth method"), ("convert", "the conversion to")):
        named = [one.name for one in every[verb] if name in (each.name for each in one.options)]
        ways += [f"{way} {' or '.join(named)}"] if named else []
    return f"; for {name} choose {' or '.join(ways)}" if ways else ""


def complete(operation: Operation, options: Mapping[str, Value]) -> dict[str, str]:
    """The options of an operation with their defaults.

    Raises:
        InputError: there is no such option or value; lists those that exist.
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


def is_within(
    text: str, above: float = -math.inf, least: float = -math.inf, most: float = math.inf
) -> bool:
    """Whether a text is a finite number within bounds."""
    try:
        return above < float(text) < math.inf and least <= float(text) <= most
    except ValueError:
        return False


def parse_size(size: str, current: int) -> Fraction | None:
    """What ``current`` is to become; None if the size is not understood.

    Only a factor may have a point or a slash, and nothing is divided by zero.
    """
    match = _SIZE.fullmatch(size.strip().lower())
    if not match:
        return None
    sign, whole, decimals, divisor = match.groups()
    if not sign:
        return None if decimals or divisor else Fraction(whole)
    if divisor:
        return current * Fraction(int(whole), int(divisor)) if int(divisor) else None
    return current * Fraction(f"{whole}.{decimals or 0}")
