"""Strict float64: any transformers model, in true float64 from end to end.

Casting a model to float64 is not enough. Norms, softmaxes, rotary angles and λ compute in float32
internally, and its rounding hides differences up to 1e-6. This mode replaces float32 by float64 in
every such request.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from growkit.base.torch_internals import loading_as_stored, stored_dtypes

_NARROWER = {torch.float32, torch.float16, torch.bfloat16}
_SAME_BITS = {torch.Tensor.view, torch.frombuffer}
"""Functions that read stored bits as a dtype, which must be the one that they were stored in."""

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
        if func in _SAME_BITS:
            return func(*args, **(kwargs or {}))
        wide = {key: _widened(value) for key, value in kwargs.items()} if kwargs else {}
        if torch.dtype in map(type, args):  # of few calls, and every attribute is such a call
            args = tuple(map(_widened, args))
        return _CASTS.get(func, func)(*args, **wide)


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROWER else value


@contextmanager
def strict_float64() -> Iterator[None]:
    """Load and run models in strict float64, which is also the default dtype inside."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with loading_as_stored(), StrictFloat64():
            yield
    finally:
        torch.set_default_dtype(default)


MKL_FUNCTIONS = (
    *(torch.exp, torch.log, torch.log2, torch.log10, torch.sqrt, torch.trunc),
    *(torch.sin, torch.cos, torch.tan, torch.asin, torch.acos, torch.atan, torch.tanh),
    *(torch.erf, torch.erfc, torch.erfinv),
)
"""Functions that torch delegates to MKL's vector library, if built with MKL (ATen/cpu/vml.h)."""


@cache
def choose_kernels() -> None:
    """Let MKL choose the kernels of its functions from a single thread, once per process.

    MKL chooses a kernel on the first call of a function. If two threads make that call at once, one
    of them may get a kernel of half the precision for this call (pytorch/pytorch#188792). The
    rotary angles of the first prompt are such a call.
    """
    with stored_dtypes():  # float32 is float32 here
        for dtype in (torch.float32, torch.float64):
            one = torch.ones(1, dtype=dtype)
            for function in MKL_FUNCTIONS:
                function(one)
