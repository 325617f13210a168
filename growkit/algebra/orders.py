"""Storage orders: how a layout arranges the rows that others write head by head.

An order says for every row, as it is stored, where it stands when rows are written canonically:
all signal heads, then all noise heads, then (if it has them) halves rotated by RoPE side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

Order = Callable[[Mapping[str, int]], list[int]]
"""From the size of every axis to the canonical row of every stored row."""


def in_groups(signal: str, noise: str, *width: str, interleaved: bool = False) -> Order:
    """Each noise head right after its signal heads: [s, n, s, n, …] or [s, s, s, n, …].

    Args:
        signal: axis of the signal heads, of which each noise head has the same number.
        noise: axis of the noise heads.
        *width: axes of the rows of a head.
        interleaved: whether RoPE turns neighbours inside a head, rather than halves.
    """

    def order(sizes: Mapping[str, int]) -> list[int]:
        signals, noises = sizes[signal], sizes[noise]
        ratio = signals // noises
        heads = [
            head
            for group in range(noises)
            for head in (*range(group * ratio, (group + 1) * ratio), signals + group)
        ]
        return _rows(heads, prod(sizes[axis] for axis in width), interleaved)

    return order


def head_by_head(heads: str, *width: str, interleaved: bool = False) -> Order:
    """Heads in their canonical order; see ``in_groups`` for the rest."""

    def order(sizes: Mapping[str, int]) -> list[int]:
        return _rows(list(range(sizes[heads])), prod(sizes[axis] for axis in width), interleaved)

    return order


def in_halves(heads: str, half: str, *width: str) -> Order:
    """The first half of every head, then the second half of every head."""

    def order(sizes: Mapping[str, int]) -> list[int]:
        count, halves = sizes[heads], sizes[half]
        blocks = [head * halves + part for part in range(halves) for head in range(count)]
        return _rows(blocks, prod(sizes[axis] for axis in width), interleaved=False)

    return order


def with_keys_and_values(heads: str, kv_heads: str, *width: str) -> Order:
    """The query heads of a group, then the key and the value that serve them, group by group.

    Canonically all queries stand first, then all keys, then all values.
    """

    def order(sizes: Mapping[str, int]) -> list[int]:
        queries, groups = sizes[heads], sizes[kv_heads]
        each = queries // groups
        stored = [
            head
            for group in range(groups)
            for head in (
                *range(group * each, (group + 1) * each),
                queries + group,
                queries + groups + group,
            )
        ]
        return _rows(stored, prod(sizes[axis] for axis in width), interleaved=False)

    return order


def _rows(heads: list[int], width: int, interleaved: bool) -> list[int]:
    """The rows of heads; neighbours that RoPE turns as pairs come from halves."""
    inside = list(range(width))
    if interleaved:
        inside = [part * (width // 2) + pair for pair in range(width // 2) for part in range(2)]
    return [head * width + row for head in heads for row in inside]
