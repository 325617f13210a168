"""Operations: what can be done to a checkpoint, growths and conversions alike."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import cast

from growkit.base.errors import InputError
from growkit.base.names import perhaps
from growkit.base.registry import members
from growkit.base.tensors import Config, Weights
from growkit.families.family import Family, families
from growkit.planning.plan import Plan
from growkit.results.operation import RankTried

PROMISES = ("exact", "bounded", "different")
"""What an operation may promise of the function; the weakest of several steps is last."""

Value = str | int | float | list[int]
"""An option's value as users write it."""

KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    list: "a list",
    bool: "true or false",
}


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
        kinds: the types that it may have in recipes and in Python, where all is text on the
            command line.
    """

    name: str
    help: str
    values: tuple[str, ...] = ()
    form: str = ""
    accepts: Callable[[str], bool] = lambda text: True
    needed: bool = False
    kinds: tuple[type, ...] = (str, int, float)

    def read(self, value: Value | None) -> str | None:
        """The value that was meant; None if there is none.

        Raises:
            InputError: it cannot be used, or is missing.
        """
        if value is None:
            if self.needed:
                raise InputError(f"{self.name} is missing; give {self.help} ({self.form})")
            return self.values[0] if self.values else None
        self.check_kind(value, self.name)
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

    def check_kind(self, value: object, where: str, shown: Callable[[object], str] = repr) -> None:
        """Refuse a value of a kind that it cannot have.

        Args:
            value: as written in a recipe or in Python.
            where: what it is, for the message.
            shown: how values are written there.

        Raises:
            InputError: it is of another kind.
        """
        if not isinstance(value, self.kinds) or isinstance(value, bool) != (bool in self.kinds):
            raise InputError(f"{where} is {shown(value)}; {self.expected} was expected")

    @property
    def expected(self) -> str:
        """The kinds of its values, in words."""
        return " or ".join(KINDS[kind] for kind in self.kinds)


@dataclass(frozen=True)
class Switch(Option):
    """An option without a value: it is on where it is given."""

    kinds: tuple[type, ...] = (bool,)

    def read(self, value: Value | None) -> str | None:
        """See ``Option``."""
        if value is not None:
            self.check_kind(value, self.name)
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
    kinds: tuple[type, ...] = (str, int)

    @property
    def expected(self) -> str:
        """See ``Option``."""
        return "a factor like x2, x1.5 or x3/2, or a size"


@dataclass(frozen=True)
class Row:
    """One line of the table of promises.

    Attributes:
        source: what it starts from.
        target: what it makes.
        promise: of the function.
        how: in a few words.
    """

    source: str
    target: str
    promise: str
    how: str


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

    @property
    def rows(self) -> tuple[Row, ...]:
        """Its promises, for the table in ``docs/conversions.md``."""
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


def complete(
    operation: Operation,
    options: Mapping[str, Value],
    having: Callable[[str, Collection[str]], str] = lambda option, known: "",
) -> dict[str, str]:
    """The options of an operation with their defaults.

    Args:
        operation: it.
        options: those that were given.
        having: of an option that is none of those that it has, what to choose for it; empty if
            nothing has it.

    Raises:
        InputError: there is no such option or value; lists those that exist.
    """
    known = {option.name: option for option in operation.options}
    for name in options:
        if name not in known:
            other = having(name, known)
            hint = (
                f"; {other}"
                if other
                else perhaps(name, known, config_key_aliases(operation.options))
            )
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


def size_factor(name: str, size: str, current: int) -> Fraction:
    """By what ``current`` is multiplied to become ``size``.

    Raises:
        InputError: the size is not understood, or smaller than the current one.
    """
    wanted = parse_size(size, current)
    digits = size.strip().lower().lstrip("x×")
    if wanted is None and digits.isdecimal():
        raise InputError(
            f"{name} {size} is too large; a number of more than 12 digits is none that a size has"
        )
    if not wanted:
        raise InputError(
            f"{name} {size!r} is not understood; write a factor like x2, x1.5 or x3/2, or a size "
            f"like {2 * current}"
        )
    if wanted < current:
        text = size.strip()
        meant = f", or x{text} for a factor" if text.isdigit() and 1 < int(text) < 10 else ""
        raise InputError(
            f"{name} {size} is less than the present {current}, and nothing is taken away; "
            f"choose {current} or more{meant}"
        )
    return wanted / current


def _decimal(number: Fraction) -> str:
    """A number that is not whole, with as many digits as show that."""
    every = (f"{float(number):.{digits}g}" for digits in range(6, 18))
    shown = (text for text in every if "e" not in text and not float(text).is_integer())
    return next(shown, str(number))


def check_whole(name: str, size: str, sizes: Mapping[str, Fraction]) -> None:
    """Refuse a factor that does not make whole numbers.

    Args:
        name: of the option.
        size: its value.
        sizes: of axes, as they would become.

    Raises:
        InputError: names the axis.
    """
    for axis, new in sizes.items():
        if new.denominator != 1:
            raise InputError(
                f"{name} {size} would make {axis} {_decimal(new)}; choose a size or a factor that "
                "makes it a whole number"
            )
