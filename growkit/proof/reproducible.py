"""Arithmetic that is as exact, and as much the same every time, as torch can be asked for."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


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
