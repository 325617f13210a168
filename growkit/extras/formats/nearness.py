"""How far a tensor of the target is from the source's, if no mistake explains all of its numbers.

What remains may be in few rows, or everywhere: numbers of few bits, factors that blocks, rows or
columns have of their own, or a distance such as that of training. Mistakes are seen through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from growkit.base.limits import SPACING
from growkit.base.tensors import AT_ONCE, parts, widened
from growkit.extras.formats.relations import shape_of
from growkit.model.model import Model
from growkit.proof.weights import has_factor
from growkit.results.proof_result import counted

ALIKE, NEARER, FAR = 0.5, 0.2, 0.7
"""Least correlation of tensors that are alike, how much larger that of a mistake has to be than
without it, and the largest distance, in norms of the source's tensor, of one without a mistake."""

FEW, FEW_NUMBERS = 0.5, 0.1
"""Largest part of the rows of a matrix, and of the numbers of a vector, that are called few."""

ROWS = 256
"""Rows that are looked at if a tensor differs everywhere."""

BLOCKS = (256, 128, 64, 32, 16)
"""Lengths of blocks in a row that have a scale of their own, beside whole rows."""

FITS, FITS_ALL = 0.25, 0.7
"""Largest part of a distance that factors of blocks, or one of the whole tensor, may leave, if they
explain it."""

LOOKED_AT, FEWER = 32, 0.6
"""Rows whose levels are counted, and the largest number of them in a quantised block, relative to
that in the source's."""

ACROSS, SAME_LINE = 64, 0.8
"""Least length of rows or columns that are looked for in another order, and the least cosine of
those that are the same: that of two random ones is below 0.7."""

Forms = Callable[[slice], Iterable[tuple[str, Tensor]]]
"""The forms that rows of the source's tensors may have in the target, each with the mistake that
makes it; the source's tensor itself has none, and is first."""


LEAST = 8
"""Least number of rows and columns that have factors of their own."""

MULTIPLIED = "is multiplied by about {:.4g}"
OWN = "multiplied by factors of up to {:.3g}"
DISTANCE = "about {:.2g} % of its norm away from the source's"
AWAY = f"is {DISTANCE}, as after training, averaging or quantisation"
IN_BLOCKS = f"is {DISTANCE}, as it is stored in blocks of few bits"
UNRELATED = "is unrelated to the source's, as that of another model, or one that was not loaded"


class Nearness(NamedTuple):
    """How a tensor is related to the source's.

    Attributes:
        phrase: what is said of it; braces stand for a number.
        number: the number, of which the largest is told if several tensors have the same phrase.
        mistake: whether noise alone, such as rounding to blocks, does not explain the tensor.
    """

    phrase: str
    number: float = 0.0
    mistake: bool = True

    @property
    def told(self) -> str:
        """The phrase with the number."""
        return self.phrase.format(self.number)


def measure_nearness(
    before: Model, after: Model, name: str, forms: Forms, width: int
) -> Nearness | None:
    """Describe a tensor of the target that is neither the source's nor a known mistake's.

    Args:
        before: the source.
        after: the target.
        name: name of the tensor.
        forms: the forms that the source's tensors may have.
        width: rows that belong together.
    """
    if not shape_of(after, name):
        return None
    first, scope, far = _scope(before, after, name)
    if scope:
        return Nearness(scope)
    rows, *others = shape_of(after, name)
    count = min(ROWS, max(1, AT_ONCE // max(1, math.prod(others))))
    start = first // width * width
    where = slice(start, min(start + max(count // width, 1) * width, rows))
    now, mistake, likely = _matrix(after.read(name, where)), "", None
    for phrase, tensor in forms(where):
        was = _matrix(tensor)
        alike = abs(_correlation(was, now))
        if likely is None or alike > likely[0] + NEARER:
            mistake, likely = phrase, (alike, was)
    if likely is None:
        return None
    alike, was = likely
    distance = float((now - was).norm() / was.norm())
    nearness = _by_rounding(was, now, after.tensors[name].torch_dtype)
    nearness = nearness or _by_factors(was, now, of_rows=not far)
    if far and not nearness and not mistake:
        which = f"{counted(len(far), 'row')} of {rows} (first {far[0]})"
        elsewhere = f"is far from the source's in {which}, and near it in the others"
        return Nearness(_by_order(before, after, name, far[0]) or elsewhere)
    if not nearness and alike < ALIKE and (mistake or not distance <= FAR):
        return Nearness(_by_order(before, after, name, 0) or UNRELATED)
    in_blocks = name in after.in_blocks
    if not nearness and in_blocks and has_factor(was, now):
        nearness = Nearness(MULTIPLIED, float((was * now).sum() / was.square().sum()))
    if not nearness:
        quantised = None if in_blocks else _by_levels(was, now)
        noise = Nearness(IN_BLOCKS if in_blocks else AWAY)
        nearness = (quantised or noise)._replace(number=100 * distance, mistake=bool(mistake))
    return nearness._replace(phrase=f"{mistake}, and {nearness.phrase}") if mistake else nearness


def _scope(before: Model, after: Model, name: str) -> tuple[int, str, list[int]]:
    """The first row that differs, a phrase if few do or if the target has only one number, and the
    few rows of a matrix that are much farther from the source's than the others.
    """
    differing, extremes, zero = [torch.empty(0, dtype=torch.int64)], set[float](), True
    distances = [torch.empty(0)]
    for part in parts(after, name):
        was, now = (widened(model.read(name, part)) for model in (before, after))
        differ = was != now
        differing.append(differ.reshape(len(differ), -1).any(1).nonzero()[:, 0] + part.start)
        away, size = ((of.reshape(len(of), -1)).norm(dim=1) for of in (now - was, was))
        distances.append(away / size.clamp(min=1e-30))
        zero = zero and not now[differ].any()
        extremes |= {float(now.min()), float(now.max())}
    rows, (total, *others) = torch.cat(differing), shape_of(after, name)
    first = int(rows[0]) if len(rows) else 0
    if len(extremes) == 1:
        return first, f"is {extremes.pop():g} everywhere", []
    if not 0 < len(rows) <= (FEW if others else FEW_NUMBERS) * total:
        away = torch.cat(distances)
        far = (away > max(ALIKE, 3 * float(away.median()))).nonzero()[:, 0].tolist()
        return first, "", far if others and len(far) <= FEW * total else []
    of = counted(len(rows), "row" if others else "number")
    end = ", where it is zero" if zero else ""
    return first, f"differs from the source's in {of} of {total} (first {first}){end}", []


def _matrix(tensor: Tensor) -> Tensor:
    """A tensor as [rows, columns], in float64; a vector is one row."""
    return widened(tensor).double().reshape(-1, (tensor.shape or (1,))[-1])


def _correlation(was: Tensor, now: Tensor) -> float:
    """The cosine of two matrices, or the correlation of two vectors; 0 if one is constant."""
    if len(was) == 1:
        was, now = (row - row.mean() for row in (was, now))
    return float((was * now).sum() / (was.norm() * now.norm()).clamp(min=1e-300))


def _by_rounding(was: Tensor, now: Tensor, stored: torch.dtype) -> Nearness | None:
    """Rounding to one of the two neighbours in a dtype, which need not be the nearest one."""
    dtypes = torch.bfloat16, torch.float16, stored
    dtype = next((dtype for dtype in dtypes if now.to(dtype).double().equal(now)), None)
    name = str(dtype).removeprefix("torch.")
    if dtype is None or name not in SPACING:
        return None
    powers = was.abs().log2().floor().exp2().clamp(min=torch.finfo(dtype).smallest_normal)
    if not ((now - was).abs() <= SPACING[name] * powers).all():
        return None
    if was.to(dtype).double().equal(was):
        return Nearness(f"differs from the source's by the last bit of {name} at most")
    if (now.abs() <= was.abs()).all():
        return Nearness(f"is cut off to {name}, not rounded")
    return Nearness(f"is rounded to {name}, but not always to the nearest number")


def _by_order(before: Model, after: Model, name: str, row: int) -> str:
    """Rows from one on, or columns, that are in another order in the source, seen through noise."""
    for dim, (what, start) in enumerate((("rows", row), ("columns", 0))):
        was, now = (_lines(model, name, dim) for model in (before, after))
        if was.shape[1] < ACROSS or len(was) <= LOOKED_AT:
            continue
        alike, order = (now[start : start + LOOKED_AT] @ was.T).max(1)
        moved = (order != torch.arange(start, start + len(order))).nonzero()[:, 0].tolist()
        if moved and alike.min() > SAME_LINE and len(order.unique()) == len(order):
            first = f"{start + moved[0]} is {int(order[moved[0]])} of the source"
            return f"has its {what} in another order (first, {first}), seen through noise"
    return ""


def _lines(model: Model, name: str, dim: int) -> Tensor:
    """The directions of the rows or columns of a matrix, by some of their numbers."""
    where = (slice(None), slice(0, ROWS)) if dim == 0 else (slice(0, ROWS), slice(None))
    lines = _matrix(model.read(name, *where[: len(shape_of(model, name))])).movedim(dim, 0)
    return torch.nn.functional.normalize(lines, dim=1)


def _by_factors(was: Tensor, now: Tensor, *, of_rows: bool) -> Nearness | None:
    """Factors that a matrix, columns or blocks have of their own, and single rows if asked for."""
    (rows, columns), distance = was.shape, (now - was).norm()
    lost = "as if their scales were lost, inverted or those of others"
    trials: list[tuple[str, int, int]] = []
    if rows >= LEAST and columns >= LEAST:
        trials.append((f"has its rows {OWN}, {lost}", 1, columns))
        how = "as if a norm were folded into it or it were smoothed before quantisation"
        trials.append((f"has its columns {OWN}, {how}", rows, 1))
    for size in BLOCKS:
        if columns % size == 0 and size < columns:
            trials.append((f"has blocks of {size} numbers in a row {OWN}, {lost}", 1, size))
            if rows % size == 0:
                trials.append((f"has blocks of {size} by {size} numbers {OWN}, {lost}", size, size))
    trials = [trial for trial in trials if of_rows or trial[1] > 1]
    trials.sort(key=lambda trial: -trial[1] * trial[2])  # few factors first
    for phrase, tall, wide in [(MULTIPLIED, rows, columns), *trials]:
        one, other = (t.view(rows // tall, tall, columns // wide, wide) for t in (was, now))
        factors = (one * other).sum((1, 3)) / one.square().sum((1, 3)).clamp(min=1e-300)
        rest = (other - factors[:, None, :, None] * one).norm()
        if rest < (FITS if len(factors.flatten()) > 1 else FITS_ALL) * min(distance, now.norm()):
            sign = "has the other sign, and " * bool((factors < 0).all())
            return Nearness(f"{sign}{phrase}", float(factors.abs().max()))
    return None


def _by_levels(was: Tensor, now: Tensor) -> Nearness | None:
    """Numbers of few bits in every block of a row, computed back."""
    columns = was.shape[1]
    if len(was) == 1:
        return None
    sizes = (columns, *(size for size in BLOCKS if columns % size == 0))
    counted_in = {size: [_levels(of[:LOOKED_AT], size) for of in (now, was)] for size in sizes}
    for bits, (size, (levels, others)) in product((2, 3, 4, 8), counted_in.items()):
        few = levels.max() <= 2**bits and levels.mean() <= FEWER * others.mean()
        if few and size > 2**bits:
            of = "a row" if size == columns else f"{size} numbers in a row"
            what = f"has at most {2**bits} values in {of}, as after quantisation to {bits} bits"
            return Nearness(f"{what}, and is {DISTANCE}")
    return None


def _levels(matrix: Tensor, size: int) -> Tensor:
    """The number of different numbers in every block of a row."""
    ordered = matrix.view(-1, size).sort().values
    return 1.0 + (ordered[:, 1:] != ordered[:, :-1]).sum(1)
