"""Exact splits: several numbers of a storage format that sum to a given one, bit for bit.

Two parts of w come from three rounded operations, with any u in [-½, ½]:

    first = w · (½ + u)        between 0 and w, because rounding is monotone
    second = w - first
    first = w - second

If the first lies in [w/2, w], Sterbenz' lemma makes the second exact, and the last line repeats the
first. If it lies in [0, w/2], the second lies in [w/2, w], and the same lemma makes the last line
exact. In the subnormal range every difference is exact. Either way ``first + second = w`` in real
arithmetic: with a random u, which lets the copies part, and with u = 0, plain halves, even where
w/2 has no representation. More parts come from splitting the parts again: three are ¼, ¼, ½.
"""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

DRAWS = 32
"""How often an element is drawn again whose parts are equal."""

_ARITHMETIC = {torch.float32: torch.float32, torch.float64: torch.float64}


def split(weight: Tensor, parts: int, amplitude: float, generator: torch.Generator) -> list[Tensor]:
    """Split every element into ``parts`` numbers of the same dtype that sum to it exactly.

    Args:
        weight: any shape, any floating dtype.
        parts: at least 1. Two parts are about ½ each, three ¼, ¼, ½, four ¼ each.
        amplitude: largest |u|, in [0, ½]; 0 for plain halves.
        generator: source of u.

    Returns:
        ``parts`` tensors of the shape and dtype of ``weight``.
    """
    if parts == 1:
        return [weight]
    arithmetic = _ARITHMETIC.get(weight.dtype, torch.float32)
    exact = weight.to(arithmetic)
    if amplitude:
        share = torch.empty_like(exact)
        share.uniform_(0.5 - amplitude, 0.5 + amplitude, generator=generator)
        first = share.mul_(exact).to(weight.dtype)
    else:
        first = (exact * 0.5).to(weight.dtype)
    second = (exact - first.to(arithmetic)).to(weight.dtype)
    first = (exact - second.to(arithmetic)).to(weight.dtype)
    left = (parts + 1) // 2
    return [
        *split(first, left, amplitude, generator),
        *split(second, parts - left, amplitude, generator),
    ]


def split_apart(
    weight: Tensor, parts: int, amplitude: float, generator: torch.Generator
) -> list[Tensor]:
    """Split a vector so that the parts of an element differ, where its dtype allows it.

    In a vector one number is all that tells two copies apart. In a short format two parts may be
    drawn equal, and such elements are drawn again; each split is exact, whichever draw it is from.
    See ``split`` for the arguments.
    """
    drawn = split(weight, parts, amplitude, generator)
    for _ in range(DRAWS if amplitude else 0):
        tied = torch.zeros_like(weight, dtype=torch.bool)
        for first, second in combinations(drawn, 2):
            tied |= first.eq(second) & first.ne(0)
        if not bool(tied.any()):
            break
        again = split(weight, parts, amplitude, generator)
        drawn = [torch.where(tied, new, old) for new, old in zip(again, drawn, strict=True)]
    return drawn


def join(parts: list[Tensor]) -> Tensor:
    """Undo a split: add its parts in the order in which they were taken apart.

    Args:
        parts: what ``split`` returned.

    Returns:
        The weight, in the dtype of the parts; NaN where a sum has to be rounded, which no sum of
        parts that ``split`` returned has.
    """
    if len(parts) == 1:
        return parts[0]
    left = (len(parts) + 1) // 2
    dtype = parts[0].dtype
    arithmetic = _ARITHMETIC.get(dtype, torch.float32)
    first, second = join(parts[:left]).to(arithmetic), join(parts[left:]).to(arithmetic)
    total = first + second
    # What the sum is off by, exactly (Knuth, The Art of Computer Programming 2, 4.2.2).
    rest = total - first
    off = (first - (total - rest)) + (second - rest)
    exact = (off == 0) & (total.to(dtype).to(arithmetic) == total)
    return total.masked_fill_(~exact, torch.nan).to(dtype)
