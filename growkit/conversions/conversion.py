"""Conversions between attention variants, one file each.

A conversion's file defines ``CONVERSION``; being in this package is what registers it, with its
options on the command line and in recipes. All of them work on DIFF Transformers; whatever can be
read as one (``growkit.conversions.layouts``) can be converted. Layouts themselves are conversions
as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from growkit.checkpoint.tensors import Config, Weights
from growkit.conversions.layouts import convert_layout, layout_names, read_layout
from growkit.errors import InputError
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import variant
from growkit.planning.plan import Plan, Planned
from growkit.registry import members

Value = str | int | float | list[int]
"""An option's value as people write it."""


@dataclass(frozen=True)
class Choice:
    """An option of a conversion.

    Attributes:
        name: as in recipes, e.g. ``gamma`` (``--gamma``).
        values: what it may be, the first by default; empty for one that is written freely.
        help: one line for ``--help``.
        form: what a freely written value looks like, e.g. ``N``.
        accepts: whether a freely written value is one.
        needed: whether a freely written value must be given; else it may be left out.
    """

    name: str
    values: tuple[str, ...]
    help: str
    form: str = ""
    accepts: Callable[[str], bool] = lambda value: True
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
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if self.values:
            for known in self.values:
                if text.replace("-", "_") == known.replace("-", "_"):
                    return known
            raise InputError(
                f"{self.name} {text!r} is not known; choose {' or '.join(self.values)}"
            )
        if not self.accepts(text):
            raise InputError(f"{self.name} is {text!r}; give {self.help} ({self.form})")
        return text


@dataclass(frozen=True)
class Row:
    """One line of the table of conversions."""

    source: str
    target: str
    promise: str
    how: str


@dataclass(frozen=True)
class Converted:
    """What a conversion will do to a checkpoint.

    Attributes:
        plans: from the checkpoint on, one after the other.
        promise: ``exact``, ``bounded`` or ``different``.
        lost: what is lost, in one line; empty if nothing is.
        settled: options that were found out, as they would be given to get the same again.
        kl_by_rank: what ranks cost that were tried on the way, nats per token.
    """

    plans: list[Plan]
    promise: str = "exact"
    lost: str = ""
    settled: Mapping[str, str] = field(default_factory=dict)
    kl_by_rank: Mapping[int, float] = field(default_factory=dict)


class Conversion(Protocol):
    """What a conversion's file defines."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def paper(self) -> str:
        """Address of the source."""
        ...

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Its options."""
        ...

    @property
    def rows(self) -> tuple[Row, ...]:
        """What it promises from where, for the table in the README."""
        ...

    def convert(self, source: Weights, options: Mapping[str, str]) -> Converted:
        """Plan the conversion of a DIFF Transformer.

        Args:
            source: a checkpoint in the layout of ``growkit.modeling``.
            options: a value for each choice that has one.

        Raises:
            InputError: it cannot be converted; says why.
        """
        ...


def conversions() -> dict[str, Conversion]:
    """All conversions of variants, by their name on the command line."""
    found = cast("list[Conversion]", list(members("growkit.conversions", "CONVERSION").values()))
    return {conversion.name: conversion for conversion in found}


def targets() -> list[str]:
    """Everything that a model can be converted to."""
    return sorted({*conversions(), *layout_names()})


def complete_options(target: str, options: Mapping[str, Value]) -> dict[str, str]:
    """The options of a conversion with their defaults.

    Raises:
        InputError: there is no such conversion, option or value; says which there are.
    """
    if target not in targets():
        raise InputError(f"there is no conversion to {target!r}; there is {', '.join(targets())}")
    conversion = conversions().get(target)
    choices = {choice.name: choice for choice in (conversion.choices if conversion else ())}
    for name in options:
        if name not in choices:
            raise InputError(
                f"a conversion to {target} has no option {name}; "
                f"it has {', '.join(choices) or 'none'}"
            )
    read = {name: choice.read(options.get(name)) for name, choice in choices.items()}
    return {name: value for name, value in read.items() if value is not None}


def convert(source: Weights, target: str, options: Mapping[str, Value]) -> Converted:
    """Plan a conversion, of a variant or of the layout alone.

    Raises:
        InputError: it is not known, or cannot be done.
    """
    complete = complete_options(target, options)
    conversion = conversions().get(target)
    if conversion is None:
        return Converted(convert_layout(source, layout_names()[target]))
    read = [] if source.config.get("model_type") in DIFF.model_types else [read_layout(source)]
    converted = conversion.convert(Planned(source, read[0]) if read else source, complete)
    return replace(converted, plans=[*read, *converted.plans])


def refuse(name: str, config: Config, why: str) -> InputError:
    """The error for a model that a conversion is not for."""
    return InputError(f"{variant(DIFF.complete(config))} cannot be converted to {name}: {why}")
