"""Strict float64: any transformers model, in true float64 from end to end.

Casting a model to float64 is not enough. Norms, softmaxes, rotary angles and λ ask for float32 on
their way, and hide differences up to 1e-6 in their rounding. Under this mode, every such request
is answered with float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

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
