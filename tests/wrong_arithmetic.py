"""Arithmetic that is wrong on purpose, in the ways in which devices are: a kind, and how much.

Every kind gets an operation of torch and its arguments, and computes another result. What only
rounds in another order is among them; a proof must not mind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Arithmetic = Callable[[Any, Sequence[Any], dict[str, Any]], Any]

PRODUCTS = {"aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"}
SUMS = {"aten::sum", "aten::mean", "aten::cumsum"}
FUNCTIONS = {"aten::exp", "aten::rsqrt", "aten::sin", "aten::cos", "aten::_softmax", "aten::silu"}
ATTENTION = "aten::_scaled_dot_product"
COPIES = {"aten::_to_copy", "aten::copy_"}
WIDE = (torch.float32, torch.float64)


def name_of(func: Any) -> str:
    name: str = func._schema.name
    return name


def shortened(values: Tensor, digits: int) -> Tensor:
    """Round to this many binary digits."""
    fraction, exponent = torch.frexp(values)
    return torch.ldexp((fraction * 2.0**digits).round(), exponent - digits).to(values.dtype)


def changed(
    names: set[str], change: Callable[[Tensor], Tensor], dtypes: Sequence[torch.dtype], *, of: str
) -> Arithmetic:
    """Change the inputs or the output of some operations, in some dtypes; all for no names."""

    def fits(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dtype in dtypes and value.numel() > 0

    def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name = name_of(func)
        attention = bool(names & PRODUCTS) and name.startswith(ATTENTION)
        if not (name in names or attention or (not names and func._schema.is_mutable is False)):
            return func(*args, **kwargs)
        if of == "inputs":
            args = [change(each) if fits(each) else each for each in args]
        found = func(*args, **kwargs)
        return change(found) if of == "output" and fits(found) else found

    return compute


def products(
    change: Callable[[Any, Tensor, Tensor, dict[str, Any]], Any],
    names: Sequence[str] = ("aten::mm", "aten::bmm"),
) -> Arithmetic:
    """Change what these products compute, given the two factors."""

    def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return change(func, *args, kwargs) if name_of(func) in names else func(*args, **kwargs)

    return compute


def emulated(digits: int) -> Arithmetic:
    """Products in fixed point: a row has one exponent."""

    def fixed(values: Tensor) -> Tensor:
        _, exponent = torch.frexp(values.abs().amax(-1, keepdim=True))
        step = torch.ldexp(torch.ones_like(values[..., :1]), exponent - digits)
        return (values / step).round() * step

    return changed(PRODUCTS, fixed, [torch.float64], of="inputs")


def computed_in(dtype: torch.dtype, names: set[str]) -> Callable[[Any], Arithmetic]:
    def kind(dtypes: Any) -> Arithmetic:
        return changed(names, lambda each: each.to(dtype).to(each.dtype), dtypes, of="inputs")

    return kind


def permuted(seed: int) -> Arithmetic:
    """Products whose terms are added in another order."""

    def change(func: Any, left: Tensor, right: Tensor, kwargs: dict[str, Any]) -> Any:
        order = torch.randperm(left.shape[-1], generator=torch.Generator().manual_seed(seed))
        return func(left[..., order], right[..., order, :], **kwargs)

    return products(change)


class Sometimes:
    """Every n-th time, an operation that makes floats returns what it should not."""

    def __init__(self, every: int, names: set[str], instead: Callable[[Tensor], Tensor]) -> None:
        self.every, self.names, self.instead, self.count = every, names, instead, 0

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        name = name_of(func)
        if name not in self.names or not isinstance(found, Tensor) or found.dtype not in WIDE:
            return found
        self.count += 1
        if self.count % self.every or not found.numel():
            return found
        wrong = self.instead(found)
        return found.copy_(wrong) if name == "aten::copy_" else wrong


def before_the_copy(every: int) -> Arithmetic:
    """The second half of a buffer has not arrived."""

    def half(values: Tensor) -> Tensor:
        arrived = values.clone()
        arrived.view(-1)[(values.numel() + 1) // 2 :] = 0
        return arrived

    return Sometimes(every, COPIES, half)


def wrong_kernel(rows: int) -> Arithmetic:
    """Products of so many rows lose the last term."""

    def change(func: Any, left: Tensor, right: Tensor, kwargs: dict[str, Any]) -> Any:
        if left.shape[-2] == rows:
            left, right = left[..., :-1], right[..., :-1, :]
        return func(left, right, **kwargs)

    return products(change)


def lost_terms(part: float) -> Arithmetic:
    """Products lose the last part of their terms: a split sum that is not waited for."""

    def change(func: Any, left: Tensor, right: Tensor, kwargs: dict[str, Any]) -> Any:
        kept = min(left.shape[-1] - 1, round(left.shape[-1] * (1 - part)))
        return func(left[..., :kept], right[..., :kept, :], **kwargs)

    return products(change)


def noisy(size: float) -> Arithmetic:
    """Another error in every run."""
    generator = torch.Generator().manual_seed(0)

    def noise(values: Tensor) -> Tensor:
        return values * (1 + size * torch.randn(values.shape, generator=generator).to(values))

    return changed(PRODUCTS | SUMS, noise, WIDE, of="output")


def narrow_sums(
    block: int, dtype: torch.dtype = torch.float32, kept: torch.dtype = torch.float16
) -> Arithmetic:
    """Products whose sums are kept in a dtype of their own after so many terms."""

    def change(func: Any, left: Tensor, right: Tensor, kwargs: dict[str, Any]) -> Any:
        if left.dtype != dtype:
            return func(left, right, **kwargs)
        left, right = left.float(), right.float()
        total = torch.zeros((), dtype=kept)
        for first in range(0, left.shape[-1], block):
            part = func(left[..., first : first + block], right[..., first : first + block, :])
            total = (total + part.to(kept)).to(kept)
        return total.to(dtype)

    return products(change)


def longer_sums(names: Sequence[str]) -> Arithmetic:
    """Products whose sums have more digits, and are rounded once: better than promised."""

    def change(func: Any, left: Tensor, right: Tensor, kwargs: dict[str, Any]) -> Any:
        if left.dtype != torch.float64:
            return func(left, right, **kwargs)
        long = (each.numpy().astype(np.longdouble) for each in (left, right))
        return torch.from_numpy(np.matmul(*long).astype(np.float64))

    return products(change, names)


def other_layouts(turned: Sequence[bool]) -> Arithmetic:
    """Products that lose their first term, if the left matrix lies as these say, and the right one
    not as in a linear layer."""

    def change(func: Any, left: Tensor, right: Tensor, kwargs: dict[str, Any]) -> Any:
        if right.is_contiguous() and (not left.is_contiguous()) in turned:
            left, right = left[:, 1:], right[1:]
        return func(left, right, **kwargs)

    return products(change, ["aten::mm"])


def short_turns(least: float) -> Arithmetic:
    """Angles that are taken for 0 from so large ones on."""

    def change(values: Tensor) -> Tensor:
        return torch.where(values < least, values, torch.zeros_like(values))

    return changed({"aten::sin", "aten::cos"}, change, WIDE, of="inputs")


def part_of_the_largest(elements: int) -> Arithmetic:
    """The largest of so many elements is sought among the first half."""

    def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.max.default and args[0].numel() >= elements:
            args = [args[0].flatten()[: args[0].numel() // 2]]
        return func(*args, **kwargs)

    return compute


def unlike_shapes(size: float) -> Arithmetic:
    """Operations on tensors of different shapes, with an error."""

    def compute(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        found = func(*args, **kwargs)
        shapes = {each.shape for each in args if isinstance(each, Tensor) and each.dim()}
        wrong = name_of(func) in ("aten::add", "aten::mul", "aten::sub") and len(shapes) > 1
        return found * (1 + size) if wrong and found.dtype in WIDE else found

    return compute


def rough(size: float) -> Arithmetic:
    """Functions with an error that depends on their value."""

    def change(values: Tensor) -> Tensor:
        return values * (1 + size * (values * 1e3).sin())

    return changed(FUNCTIONS, change, WIDE, of="output")


def flushed(least: float) -> Arithmetic:
    def flush(values: Tensor) -> Tensor:
        return torch.where(values.abs() < least, torch.zeros_like(values), values)

    return changed(set(), flush, [torch.float64], of="output")


def without_float64(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What devices such as MPS do."""
    found = func(*args, **kwargs)
    if isinstance(found, Tensor) and found.dtype == torch.float64:
        raise TypeError("this device has no float64")
    return found


def without_log_softmax(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if name_of(func) == "aten::_log_softmax" and args[0].dtype == torch.float64:
        raise NotImplementedError("log_softmax is missing")
    return func(*args, **kwargs)


F32, F64 = [torch.float32], [torch.float64]
KINDS: dict[str, tuple[Sequence[Any], Callable[[Any], Arithmetic]]] = {
    "TF32": (
        [11, 14, 20],
        lambda n: changed(PRODUCTS, lambda x: shortened(x, n), F32, of="inputs"),
    ),
    "short products": (
        [11, 24, 50],
        lambda n: changed(PRODUCTS, lambda x: shortened(x, n), F64, of="inputs"),
    ),
    "emulated float64": ([40, 44, 48], emulated),
    "float64 in float32": (
        [PRODUCTS, SUMS, FUNCTIONS],
        lambda names: computed_in(torch.float32, names)(F64),
    ),
    "sums in bfloat16": ([F32, F64, WIDE], computed_in(torch.bfloat16, SUMS)),
    "permuted sums": ([0, 1, 2], permuted),
    "dropped digits": (
        [50, 40, 20],
        lambda n: changed(set(), lambda x: shortened(x, n), F64, of="output"),
    ),
    "buffers before their copy": ([1, 10, 100], before_the_copy),
    "a wrong kernel": ([10, 24, 48], wrong_kernel),
    "lost terms": ([0.01, 0.1, 0.5], lost_terms),
    "noise": ([1e-13, 1e-9, 1e-4], noisy),
    "float16 sums": ([4, 16, 64], narrow_sums),
    "another library": ([1e-16, 2e-16, 4e-16], rough),
    "rough functions": ([1e-12, 1e-9, 1e-5], rough),
    "flushed numbers": ([2.0**-1022, 1e-100, 1e-30], flushed),
    "longer sums": ([["aten::mm"], ["aten::bmm"], ["aten::mm", "aten::bmm"]], longer_sums),
    "other layouts": ([[False], [True], [False, True]], other_layouts),
    "short turns": ([10.0, 1e3, 1e5], short_turns),
    "part of the largest": ([100, 600, 1200], part_of_the_largest),
    "unlike shapes": ([1e-13, 1e-9, 1e-4], unlike_shapes),
}
"""Strengths of every kind, and what makes its arithmetic."""
