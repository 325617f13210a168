"""The device of a computation: its choice, its name and settings, and whether it is precise.

``find_arithmetic_fault`` computes sums, products and functions whose results are known to the last
bit. A device that gets another result does not prove anything in that dtype.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from growkit.base.errors import InputError, reason
from growkit.base.settings import no_device
from growkit.base.tensors import AT_ONCE

CPU = torch.device("cpu")

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""Bits in the significand of a dtype."""

RUNS = 3
"""Number of times that a computation runs, to see whether it always gives the same bits."""

CLOSE = 16
"""Allowed error of a function such as exp, in units of the spacing; libraries promise 1 to 4. So
does a root: that of a CPU may be the wrong one."""

EXPONENTS = {torch.float64: 100, torch.float32: 20, torch.float16: 4, torch.bfloat16: 20}
"""Exponents of factors whose products and sums stay in the range of a dtype."""

ROWS, COLUMNS = 16, 61
"""Number of different rows, and of different columns, in a product whose shape is tried: the device
repeats them. As tiles of kernels have even sizes, no two of them get the same columns."""

Product = tuple[int, int, int]
"""Shape of a product with a matrix: rows, terms of every sum, columns."""


def choose_device(name: str, dtype: torch.dtype | None = None) -> torch.device:
    """Convert a name to a device; ``auto`` is torch's accelerator if it has the dtype.

    Without a dtype, the device is not touched.

    Raises:
        InputError: torch has no such device.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return accelerator if accelerator and (dtype is None or has(accelerator, dtype)) else CPU
    if name != "cpu" and name != (accelerator and accelerator.type):
        raise InputError(no_device(name))
    return torch.device(name)


def check_subnormal_numbers() -> None:
    """Refuse to compute where subnormal numbers count as zero, which would lose weights.

    A thread passes this mode on to those that it starts, and torch's threads keep it.

    Raises:
        InputError: they do, in this thread or in one of torch's.
    """
    with torch.device("cpu"):
        least = torch.full((torch.get_num_threads() << 16,), 2.0**-126, dtype=torch.float32)
        lost = (least / 2).view(torch.int32) == 0
    if lost.any():
        raise InputError(
            "subnormal numbers count as zero in this process (torch.set_flush_denormal), so "
            "weights would be lost; use a process without it"
        )


def has(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device has a dtype."""
    try:
        torch.ones(1, dtype=dtype).to(device)
    except (TypeError, RuntimeError):
        return False
    return True


def device_name(device: torch.device) -> str:
    """The name of a device in reports."""
    return getattr(_properties(device), "name", device.type)


def driver_versions(device: torch.device) -> dict[str, str]:
    """Versions of the driver and libraries of a device, as far as they are known."""
    if device.type == "cpu":
        return {}
    versions = {"driver": getattr(_properties(device), "driver_version", None)}
    with suppress(OSError):
        match = re.search(r"Kernel Module\s+(?:for \S+\s+)?([\d.]+)", NVIDIA_DRIVER.read_text())
        versions["driver"] = match and match[1]
    versions |= {name: getattr(torch.version, name, None) for name in ("cuda", "hip", "xpu")}
    return {name: str(version) for name, version in versions.items() if version}


def memory_of(device: torch.device) -> int:
    """Bytes of memory that a device has in all."""
    with suppress(RuntimeError):  # some devices do not tell
        if device.type != "cpu":
            return torch.accelerator.get_memory_info(device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _properties(device: torch.device) -> Any:
    read = getattr(getattr(torch, device.type, None), "get_device_properties", None)
    return read(device) if read and device.type != "cpu" else None


def settings() -> Iterator[tuple[Any, str, Any]]:
    """Settings of torch that give every product its full precision: owner, name and value."""
    backends: Any = torch.backends
    for of in (backends.cuda, backends.cudnn, backends.mkldnn):
        for kind in ("matmul", "conv", "rnn"):
            if hasattr(getattr(of, kind, None), "fp32_precision"):
                yield getattr(of, kind), "fp32_precision", "ieee"
    # Without these, sums of a product may be rounded before they are complete.
    for dtype in ("fp16", "bf16"):
        yield backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction", False
    yield backends.cuda.matmul, "allow_fp16_accumulation", False
    yield backends.cudnn, "deterministic", True
    # Deterministic kernels fill new memory, which takes longer than to compute with it.
    yield torch.utils.deterministic, "fill_uninitialized_memory", False


def _as_set(owner: Any, name: str) -> Any:
    """The value that makes a setting what it is; torch writes two for sums, and reads one."""
    with suppress(AttributeError):
        return getattr(owner, name), getattr(owner, f"{name}_split_k")
    return getattr(owner, name)


@contextmanager
def reproducible(device: torch.device) -> Iterator[list[str]]:
    """Force full precision and deterministic kernels in this context.

    Args:
        device: device of the proof. CPUs are deterministic already.

    Yields:
        The names of operations that ran and have no deterministic form.
    """
    chosen = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    before = [(owner, name, _as_set(owner, name)) for owner, name, _ in settings()]
    varying: list[str] = []
    show = warnings.showwarning

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if match := re.search(r"(\S+) does not have a deterministic|(CuBLAS)", str(message)):
            varying.extend({match[1] or match[2]} - {*varying})
        else:
            show(message, *args, **kwargs)

    try:
        for owner, name, value in settings():
            setattr(owner, name, value)
        with warnings.catch_warnings():
            if device.type != "cpu":
                # cuBLAS reads this on first use; without it, the order of sums may vary.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                # Some kernels have no deterministic form; a proof with them is better than none.
                warnings.filterwarnings("always", message=".*deterministic")
                warnings.showwarning = note
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield varying
    finally:
        torch.use_deterministic_algorithms(chosen, warn_only=warn_only)
        for owner, name, value in before:
            setattr(owner, name, value)


On = Callable[[Tensor], Tensor]
"""Moves a tensor to a device."""


class _Known(NamedTuple):
    """A computation with a known result.

    Attributes:
        what: what it computes, for "... are wrong".
        compute: computes it; its argument moves a tensor to the device.
        expected: the result; None for that of the CPU.
        close: allowed relative error, in units of the spacing.
    """

    what: str
    compute: Callable[[On], Tensor]
    expected: Tensor | None = None
    close: int = 0


def find_arithmetic_fault(
    device: torch.device, dtype: torch.dtype, products: Iterable[Product] = ()
) -> str:
    """Find out what a device computes in another way than the dtype promises.

    Args:
        device: the device; the CPU is the reference and always passes.
        dtype: dtype of the computation.
        products: shapes of products that will follow.

    Returns:
        The first fault, with the number of others; empty if there is none.
    """
    if device.type == "cpu":
        return ""
    if not has(device, dtype):
        return f"there is no {str(dtype).removeprefix('torch.')}"
    doubts, on = [], partial(Tensor.to, device=device)
    for what, compute, expected, close in _known(dtype, {*products}):
        try:
            results = [compute(on).cpu().double().nan_to_num(torch.inf) for _ in range(RUNS)]
        except RuntimeError as error:
            doubts.append(f"{what} cannot be computed ({reason(error)})")
            continue
        expected = (compute(lambda tensor: tensor) if expected is None else expected).double()
        tolerance = close * torch.finfo(dtype).eps * expected.abs()
        if not all(outcome.equal(results[0]) for outcome in results):
            doubts.append(f"{what} vary from run to run")
        elif not ((results[0] - expected).abs() <= tolerance).all():
            doubts.append(f"{what} are wrong")
    more = [f"and {len(doubts) - 1} more"] if len(doubts) > 1 else []
    more += [f"{name} is set" for name in os.environ if doubts and "EMULAT" in name]
    return ", ".join([*doubts[:1], *more])


def _known(dtype: torch.dtype, products: Iterable[Product]) -> Iterator[_Known]:
    """Computations whose results depend neither on the order of sums nor on the library."""
    name, digits = str(dtype).removeprefix("torch."), DIGITS[dtype]
    # Narrow dtypes are summed in float32, and rounded once.
    wide = torch.float64 if digits == DIGITS[torch.float64] else torch.float32
    generator = torch.Generator().manual_seed(0)

    def integers(bits: int, *shape: int) -> Tensor:
        return torch.randint(1 - (1 << bits), 1 << bits, shape, generator=generator).to(dtype)

    def full_length(*shape: int, exponents: int = 0) -> Tensor:
        """Numbers that need every digit."""
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) + 1
        spread = torch.randint(-exponents, exponents + 1, shape, generator=generator)
        return torch.ldexp(drawn, spread).to(dtype)

    one, other = full_length(4096), full_length(4096)
    yield _Known(
        f"sums, products and quotients of {name}",
        lambda on: _operations(on(one), on(other)),
    )
    small = one * (torch.finfo(dtype).tiny / 2)
    yield _Known(f"subnormal numbers of {name}", lambda on: on(small) * 0.5)
    if dtype == wide:
        numbers = integers(digits - 18, 1 << 16)
        cancelling = torch.cat([numbers, -numbers, torch.ones_like(numbers[:3])])
        yield _Known(
            f"long sums and maxima of {name}",
            lambda on: _reductions(on(cancelling)),
        )
        angles = torch.arange(4096, dtype=dtype).square()
        yield _Known(
            f"functions of {name}",
            lambda on: torch.cat([_functions(on(one - other)), on(angles).sin(), on(angles).cos()]),
            close=CLOSE,
        )
    for rows, terms, columns in sorted(products):
        if terms * columns > 2 * AT_ONCE:  # such matrices are multiplied in blocks
            columns = max(1, AT_ONCE // terms)
        what = f"products [{rows}, {terms}] · [{terms}, {columns}] of {name}"
        row, column = torch.arange(rows) % ROWS, torch.arange(columns)
        # Sums of integers with so few digits are exact in any order.
        bits = min(digits, (DIGITS[wide] - (terms - 1).bit_length()) // 2, EXPONENTS[dtype])
        left, matrix = integers(bits, ROWS, terms), integers(bits, COLUMNS, terms)
        exact = functional.linear(left.to(wide), matrix.to(wide)).to(dtype)
        repeated = partial(_repeated, matrix, column % COLUMNS)
        yield _Known(what, _product(left, row, repeated), exact[row][:, column % COLUMNS])
        # Each column selects a number. Emulations with one exponent for a row lose small ones.
        left = full_length(ROWS, terms, exponents=EXPONENTS[dtype])
        chosen, selecting = column % terms, partial(_selecting, column % terms, terms, dtype)
        yield _Known(
            f"{what}, at full length", _product(left, row, selecting), left[row][:, chosen]
        )


def _operations(a: Tensor, b: Tensor) -> Tensor:
    return torch.stack([a + b, a - b, a * b, a / b])


def _reductions(x: Tensor) -> Tensor:
    return torch.stack([x.sum(), x.cumsum(0).max(), x.max(), x.neg().max()])


def _repeated(rows: Tensor, order: Tensor, on: On) -> Tensor:
    """A matrix that repeats a few rows, made on the device: large ones take long to get there."""
    return on(rows)[on(order)]


def _selecting(chosen: Tensor, terms: int, dtype: torch.dtype, on: On) -> Tensor:
    """A matrix [len(chosen), terms] that has a one in every row, at the chosen place."""
    return (on(chosen)[:, None] == on(torch.arange(terms))).to(dtype)


def _product(left: Tensor, row: Tensor, matrix: Callable[[On], Tensor]) -> Callable[[On], Tensor]:
    def compute(on: On) -> Tensor:
        rows, columns = _repeated(left, row, on), matrix(on)
        product, turned = functional.linear(rows, columns), columns.T.contiguous()
        # Backward passes multiply in other layouts, which have kernels of their own.
        for other in (rows @ turned, rows.T.contiguous().T @ turned):
            product = torch.where(product == other, product, torch.nan)
        return product

    return compute


def _functions(x: Tensor) -> Tensor:
    rows = x.view(-1, 64)
    values = [x.exp(), x.abs().add(0.5).log(), x.abs().add(0.5).rsqrt(), x.sin(), x.cos(), x.tanh()]
    values += [
        x.sigmoid(),
        x.erf(),
        x.abs().sqrt(),
        rows.softmax(-1).flatten(),
        rows.square().mean(-1),
    ]
    return torch.cat(values)
