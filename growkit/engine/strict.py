"""Strict float64: any transformers model, in true float64 from end to end.

Casting a model to float64 is not enough. Norms, softmaxes, rotary angles and λ ask for float32 on
their way, and hide differences up to 1e-6 in their rounding. Under this mode, every such request
is answered with float64.
"""

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from growkit.base.errors import InputError
from growkit.base.settings import NO_GPU

CPU = torch.device("cpu")

_NARROWER = {torch.float32, torch.float16, torch.bfloat16}
_CASTS: dict[Any, Any] = {
    torch.Tensor.float: torch.Tensor.double,
    torch.Tensor.half: torch.Tensor.double,
    torch.Tensor.bfloat16: torch.Tensor.double,
}


class StrictFloat64(TorchFunctionMode):
    """Turn every request for a float dtype narrower than float64 into one for float64."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        wide = {key: _widened(value) for key, value in (kwargs or {}).items()}
        return _CASTS.get(func, func)(*map(_widened, args), **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROWER else value


@contextmanager
def strict_float64() -> Iterator[None]:
    """Load and run models inside this context; numbers without a dtype are float64 as well."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch, "load", _load_as_stored), StrictFloat64():
            yield
    finally:
        torch.set_default_dtype(default)


_load = torch.load


def _load_as_stored(*args: Any, **kwargs: Any) -> Any:
    # Unpickling asks for the dtype that the bytes in the file have, and must get it.
    with torch._C.DisableTorchFunction():
        return _load(*args, **kwargs)


MKL_FUNCTIONS = (
    *(torch.exp, torch.log, torch.log2, torch.log10, torch.sqrt, torch.trunc),
    *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.tanh),
    *(torch.erf, torch.erfc, torch.erfinv),
)
"""What torch leaves to MKL's vector functions, where it has MKL (ATen/cpu/vml.h)."""


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """No TF32, and on a GPU deterministic kernels, even if a process has chosen speed.

    Args:
        device: where the proof runs. CPUs are deterministic as they are.
    """
    precision = torch.get_float32_matmul_precision()
    chosen = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_float32_matmul_precision("highest")
    try:
        with warnings.catch_warnings():
            if device.type == "cuda":
                # cuBLAS reads it when it is first used; without it, sums may take turns.
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                # Some kernels have no deterministic form, and a proof is better than none.
                warnings.filterwarnings("ignore", message=".*deterministic")
                torch.use_deterministic_algorithms(True, warn_only=True)
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(chosen, warn_only=warn_only)


@cache
def choose_kernels() -> None:
    """Let MKL choose kernels for its functions while a single thread asks for them, once.

    It chooses when a function is first called. If two threads are the first together, one of them
    may get a kernel with half of the digits, for that call alone (pytorch/pytorch#188792). Rotary
    angles of the first prompt are such a call.
    """
    with torch._C.DisableTorchFunction():  # float32 is float32 here
        for dtype in (torch.float32, torch.float64):
            one = torch.ones(1, dtype=dtype)
            for function in MKL_FUNCTIONS:
                function(one)


def choose_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is a GPU where there is one.

    Raises:
        InputError: there is no GPU.
    """
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError(NO_GPU)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def device_name(device: torch.device) -> str:
    """The name of a device in reports."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
