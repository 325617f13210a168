"""Arithmetic that is as exact, and as much the same every time, as torch can be asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

MKL_FUNCTIONS = (
    *(torch.exp, torch.log, torch.log2, torch.log10, torch.sqrt, torch.trunc),
    *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.tanh),
    *(torch.erf, torch.erfc, torch.erfinv),
)
"""What torch leaves to MKL's vector functions, where it has MKL (ATen/cpu/vml.h)."""


@contextmanager
def reproducible(device: torch.device) -> Iterator[None]:
    """Whatever a process has chosen for speed: no TF32, and on a GPU deterministic kernels.

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
