"""The class of options, which commands, recipes, Python and documents read.

An option is declared once, in the file of the operation that has it.

``docs/reference/reference.md`` lists them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar, get_args, get_type_hints

from growkit.base.errors import InputError
from growkit.base.names import perhaps

Value = str | int | float | list[int]
"""The value of an operation's option, as users write it."""

Limits = tuple[float | None, float]
"""Smallest and largest value of a number; a smallest value of None means more than 0."""

MAX_COUNT = 999_999
"""Largest number of anything that an operation makes."""

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=type)


@dataclass(frozen=True)
class Option:
    """An option, the same on the command line, in recipes and in Python.

    Attributes:
        name: name in recipes and in Python, e.g. ``kv_heads`` (``--kv-heads``).
        help: one line for ``--help``.
        values: the allowed values, the default of an operation first; empty for a free value.
        form: placeholder of a free value, e.g. ``N``.
        kind: type of a value; ``bool`` for a switch.
        limits: limits of a number.
        accepts: whether a free value is valid; it may raise a more precise ``InputError``.
        example: a value that is possible in every family, if a free value is required; else None.
        unrecorded: the former default, which a manifest means that does not record the option.
    """

    name: str
    help: str
    values: Collection[str] = ()
    form: str = ""
    kind: Any = str
    limits: Limits | None = None
    accepts: Callable[[str], bool] = lambda text: True
    example: str | int | None = None
    unrecorded: str | None = None

    def check(self, value: Any) -> None:
        """Refuse a value that is not allowed, or is beyond the limits.

        Raises:
            InputError: the message names the option and what is allowed.
        """
        if self.values and value not in self.values:
            raise InputError(
                f"{self.name} {value!r} is not known; choose from {', '.join(self.values)}"
                f"{perhaps(value, self.values, {'gpu': 'cuda'})}"
            )
        if self.limits:
            check_number(self.name, value, self.limits, whole=self.kind is int)

    def read(self, value: Value | None) -> str | None:
        """Parse the value of an operation's option; None for no value.

        Raises:
            InputError: the value is invalid, or is required but missing.
        """
        if self.kind is bool:
            if not isinstance(value, bool | None):
                raise InputError(f"{self.name} is {value!r}; true or false was expected")
            return "on" if value else None
        if value is None:
            if self.example is not None:
                raise InputError(f"{self.name} is missing; give it as {self.form}: {self.help}")
            return next(iter(self.values), None)
        if isinstance(value, bool) or not isinstance(value, str | int | float | list):
            raise InputError(f"{self.name} is {value!r}; text or a number was expected")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        plain = text.replace("-", "_")
        text = next((choice for choice in self.values if choice.replace("-", "_") == plain), text)
        try:
            self.check(self.kind(text))
        except ValueError as error:
            if isinstance(error, InputError):
                raise
        else:
            if self.accepts(text):
                return text
        raise InputError(f"{self.name} is {text!r}; give {self.help} ({self.form})")


def option(
    default: Any,
    help: str,  # noqa: A002
    form: str = "",
    values: Collection[str] = (),
    limits: Limits | None = None,
) -> Any:
    """A field of a dataclass that is an option; see ``Option``."""
    declared = Option("", help, values, form, limits=limits)
    return field(default=default, metadata={"option": declared})


def documented(kind: T) -> T:
    """Append the help texts of a dataclass's options to the attributes in its docstring."""
    text = inspect.cleandoc(kind.__doc__ or "")
    text += "" if "\nAttributes:\n" in text else "\n\nAttributes:"
    for attribute in fields(kind):
        if "option" in attribute.metadata:
            text += f"\n    {attribute.name}: {attribute.metadata['option'].help}"
    kind.__doc__ = text
    return kind


def options_of(kind: type) -> dict[str, Option]:
    """The options that the fields of a dataclass declare, by name."""
    hints = get_type_hints(kind)
    declared = {
        member.name: member.metadata["option"]
        for member in fields(kind)
        if "option" in member.metadata
    }
    return {
        name: replace(entry, name=name, kind=kind_of(hints[name]))
        for name, entry in declared.items()
    }


def kind_of(hint: Any) -> Any:
    """The type of a value: ``float`` for ``float | None`` and for ``tuple[float, ...]``."""
    return next(iter(get_args(hint)), hint)


def check_options(settings: Any) -> None:
    """Refuse fields beyond their limits, or with a value outside the allowed ones.

    Raises:
        InputError: an option is invalid; see ``Option.check``.
    """
    for name, declared in options_of(type(settings)).items():
        value = getattr(settings, name)
        if value is not None or getattr(type(settings), name) is not None:
            for entry in value if isinstance(value, tuple) else (value,):
                declared.check(entry)


def check_number(name: str, value: Any, limits: Limits, *, whole: bool) -> None:
    """Refuse a value that is not a number, or is beyond its limits.

    Raises:
        InputError: the value is invalid; the message names it and its limits.
    """
    least, highest = limits
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise InputError(f"{name} is {value!r}; a {'whole ' if whole else ''}number was expected")
    if (
        not (value > 0 if least is None else least <= value) or not value <= highest
    ):  # also for a NaN
        shown = "," if whole else "g"
        first = "more than 0, at most" if least is None else f"{least:{shown}} to"
        raise InputError(f"{name} {value} cannot be used; choose {first} {highest:{shown}}")


def takes(*kinds: type) -> Callable[[F], F]:
    """Show the options of dataclasses in the signature of a function that takes ``**options``."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        *named, rest = signature.parameters.values()
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(kind, name),
                annotation=get_type_hints(kind)[name],
            )
            for kind in kinds
            for name in options_of(kind)
        ]
        function.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*named, *more, rest]
        )
        return function

    return decorate
