"""Growth methods, one file each.

A method's file defines ``METHOD``; being in this package is what registers it, with its options on
the command line, in recipes and in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from growkit.errors import InputError
from growkit.registry import members

if TYPE_CHECKING:
    from growkit.algebra.shares import Shares
    from growkit.checkpoint.tensors import Weights
    from growkit.planning.plan import Plan

Size = str | int
"""A factor like ``"x2"``, or a size like ``2048`` or ``"2048"``."""


@dataclass(frozen=True)
class SizeOption:
    """A size that a method can change.

    Attributes:
        name: the option's name, e.g. ``kv_heads`` (``--kv-heads``).
        axes: the axes it copies, in whichever family has them.
        help: one line for ``--help``.
        follows: the option whose factor it takes when it is left out; None if it then stays.
    """

    name: str
    axes: tuple[str, ...]
    help: str
    follows: str | None = None


class Method(Protocol):
    """What a growth method's file defines."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def summary(self) -> str:
        """One line for people."""
        ...

    @property
    def paper(self) -> str:
        """Address of the source."""
        ...

    @property
    def promise(self) -> str:
        """``exact``: the grown model computes the same function."""
        ...

    @property
    def options(self) -> tuple[SizeOption, ...]:
        """The sizes it can change, each after the one it follows."""
        ...

    def plan(self, source: Weights, sizes: Mapping[str, Size | None], shares: Shares) -> Plan:
        """Plan the growth of a checkpoint, from its headers.

        Args:
            source: the checkpoint.
            sizes: a factor or size for each option; those left out follow.
            shares: how weights are split over copies.

        Raises:
            InputError: a size cannot be had, or the checkpoint is not what its config says.
        """
        ...


def methods() -> dict[str, Method]:
    """All growth methods, by their name on the command line."""
    found = cast("list[Method]", list(members("growkit.growth", "METHOD").values()))
    return {method.name: method for method in found}


def method_of(name: str) -> Method:
    """The method of this name.

    Raises:
        InputError: there is none; lists those that there are.
    """
    known = methods()
    if name not in known:
        raise InputError(f"there is no growth method {name!r}; there is {', '.join(sorted(known))}")
    return known[name]
