"""Relations between a source's tensor and the target's that are found by looking at both.

Unlike mistakes with a known form, which are repeated on the source's tensor, these have a factor,
an order or a rank of their own.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from growkit.base.limits import SPACING, within_each
from growkit.base.tensors import AT_ONCE, parts, same_numbers, widened
from growkit.model.model import Model

SKETCH = 64
"""Number of elements by which tensors, rows and columns are looked up before they are compared."""

ROWS, LARGEST_RANK, LEAST_PART = 512, 256, 0.8
"""Rows by which a rank is estimated, the largest of an adapter, and the least part of a difference,
in squares, that has this rank; the rest is rounding."""

NEGLIGIBLE = 0.1
"""Largest change of a row or column, relative to the largest one, that is not counted."""

GONE = 0.1
"""Largest part of a direction that rounding leaves of one that was removed."""

BY_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")


def shape_of(model: Model, name: str) -> tuple[int, ...]:
    """The shape of a tensor; empty if there is none."""
    return model.tensors[name].shape if name in model.tensors else ()


def pieces(model: Model, name: str, width: int = 1) -> list[list[slice]]:
    """Divide a tensor into parts with whole heads, whose width is given; the first is small.

    It is there once more in the next one: most tensors that differ do so in their first rows.
    """
    if not shape_of(model, name) or not model.tensors[name].elements:
        return [[]]
    (rows, *_), length = parts(model, name), model.tensors[name].shape[0]
    step = max(width, rows.stop // width * width)
    first = slice(0, min(width if len(shape_of(model, name)) < 3 else 1, length))
    return [[first], *([slice(at, min(at + step, length))] for at in range(0, length, step))]


def relation(before: Model, after: Model, name: str, sizes: Mapping[str, int]) -> str:
    """How a tensor of the target was made from the source's, as a phrase; empty if unknown."""
    return _factor(before, after, name, sizes) or next(
        (order for dim in (0, 1) if (order := _order(before, after, name, dim, sizes))), ""
    )


def _factor(before: Model, after: Model, name: str, sizes: Mapping[str, int]) -> str:
    """A factor of all numbers, or a number that was added to all, or both."""
    return _fit(before, after, name, sizes, False) or _fit(before, after, name, sizes, True)


def _fit(before: Model, after: Model, name: str, sizes: Mapping[str, int], added: bool) -> str:
    factor, more = 0.0, 0.0
    for where in pieces(after, name, sizes.get("head_dim") or 1):
        stored = after.read(name, *where)
        was, now = (widened(tensor).double() for tensor in (before.read(name, *where), stored))
        spacing = _spacing(stored)
        if not factor:
            one, other = (t - t.mean() * added for t in (was, now))
            factor = float((one * other).sum() / one.square().sum())
            factor = 1.0 if abs(factor - 1) <= 2 * spacing else factor
            more = float((now - factor * was).mean()) * added
        sizes_of = torch.stack([now.abs(), (factor * was).abs(), torch.full_like(now, abs(more))])
        limits = 2 * spacing * sizes_of.amax(0)
        if not within_each((now - factor * was - more).abs(), limits).all():
            return ""
        if not factor or (factor == 1 and abs(more) <= 2 * spacing * now.abs().mean()):
            return ""
    if factor == 1:
        return f"has {more:.4g} added"
    for key, size in sizes.items():
        for power, text in ((0.5, "√"), (-0.5, "1/√")):
            if not more and key in ("hidden", "head_dim") and abs(size**power / factor - 1) < 1e-2:
                return f"is multiplied by {factor:.4g}, {text}{size}"
    return f"is multiplied by {factor:.4g}" + (f", and has {more:.4g} added" if added else "")


def _order(before: Model, after: Model, name: str, dim: int, sizes: Mapping[str, int]) -> str:
    """Another order of the rows, or of the columns."""
    if len(shape_of(after, name)) != 2:
        return ""
    first = [None, slice(0, SKETCH)] if dim == 0 else [slice(0, SKETCH), None]
    keys = [widened(of.read(name, *first)).double().movedim(dim, 0) for of in (before, after)]
    numbers = torch.unique(torch.cat(keys), dim=0, return_inverse=True)[1].chunk(2)
    one, other = (number.argsort(stable=True) for number in numbers)
    if not numbers[0][one].equal(numbers[1][other]):
        return ""
    order = torch.empty_like(one)
    order[other] = one
    across = shape_of(after, name)[1 - dim]
    step = max(1, AT_ONCE // len(order))
    for start in range(0, across, step):
        where = [slice(start, start + step)] if dim else [None, slice(start, start + step)]
        was, now = (of.read(name, *where) for of in (before, after))
        if not same_numbers(was.index_select(dim, order), now):
            return ""
    return _order_in_words(order, "columns" if dim else "rows", name, sizes)


def _order_in_words(order: Tensor, what: str, name: str, sizes: Mapping[str, int]) -> str:
    places, width = torch.arange(len(order)), sizes.get("head_dim") or len(order) + 1
    if len(order) % width == 0 and any(kind in name for kind in BY_HEADS):
        heads = order.view(-1, width)
        if (heads - heads[:, :1]).equal(places[:width].expand_as(heads)):
            return "has its heads in another order"
    steps = (places - order) % len(order)
    if (steps == steps[0]).all():
        return f"has its {what} moved on by {int(steps[0])}"
    moved = int((steps != 0).nonzero()[0])
    return f"has its {what} in another order (first, {moved} is {int(order[moved])} of the source)"


def rank_of_change(before: Model, after: Model, name: str) -> int:
    """The rank of the difference of two matrices, but for rounding; 0 if it is not low.

    That of few rows or columns is not low: it could not be higher.
    """
    if len(shape_of(after, name)) != 2:
        return 0
    rows = slice(0, ROWS)
    was, stored = widened(before.read(name, rows)).double(), after.read(name, rows)
    now = widened(stored).double()
    noise = _spacing(stored) * now.square().mean().sqrt() * sum(size**0.5 for size in now.shape)
    squares = torch.linalg.eigvalsh((now - was) @ (now - was).T)
    large = squares[squares > noise**2]
    by_line = ((now - was).norm(dim=dim) for dim in (0, 1))
    lines = min(int((norms > NEGLIGIBLE * norms.max()).sum()) for norms in by_line)
    low = len(large) <= min(LARGEST_RANK, lines // 2) and 2 * (now != was).sum() > now.numel()
    return len(large) if low and large.sum() > LEAST_PART * squares.sum() else 0


def removes_direction(before: Model, after: Model, name: str) -> bool:
    """Whether a change of rank 1 removes one direction from the outputs, or from the inputs.

    Refusal in language models is mediated by a single direction, arXiv 2406.11717, section 4.1.
    """
    rows = slice(0, ROWS)
    was, now = (widened(model.read(name, rows)).double() for model in (before, after))
    across = torch.linalg.eigh((now - was).T @ (now - was)).eigenvectors[:, -1]
    left, right = torch.zeros(2, was.shape[1], dtype=torch.float64), torch.zeros(2)
    for part in parts(after, name):
        was, now = (widened(model.read(name, part)).double() for model in (before, after))
        along = (now - was) @ across
        left += torch.stack([along @ was, along @ now])
        right += torch.stack([(was @ across).square().sum(), (now @ across).square().sum()])
    (one, other), (inputs, others) = left.norm(dim=1), right.sqrt()
    return bool(other < GONE * one or others < GONE * inputs)


def _spacing(tensor: Tensor) -> float:
    """The relative spacing of a tensor's numbers."""
    return SPACING.get(str(tensor.dtype).removeprefix("torch."), 1.0)
