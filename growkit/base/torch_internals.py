"""Private names of torch, and changes to it: each for want of a public one, and only here.

A newer torch may rename them. The DIFF Transformer has its own, as its files go with the weights.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from growkit.base.lazy import Tensor, torch

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["TorchDispatchMode", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]


def __getattr__(name: str) -> Any:
    # Nested containers, and a mode that sees every operation; torch is imported late.
    homes = dict.fromkeys(__all__, "torch.utils._pytree")
    homes["TorchDispatchMode"] = "torch.utils._python_dispatch"
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(homes[name]), name)


def stored_dtypes() -> AbstractContextManager[None]:
    """Let no mode of torch apply, such as strict float64, so that tensors keep their dtypes."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


def version_of(tensor: Tensor) -> int:
    """The number of changes made to a tensor in place."""
    return tensor._version


def parameters_of(module: torch.nn.Module) -> dict[str, torch.nn.Parameter | None]:
    """The parameters of a module alone, which can be replaced by others of any shape."""
    return module._parameters


def buffers_of(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """The buffers of a module alone."""
    return module._buffers


def saved_buffers(module: torch.nn.Module) -> set[str]:
    """The names of the buffers of a module alone that are saved with it."""
    return module._buffers.keys() - module._non_persistent_buffers_set


def fused_kernel(*args: Any, **kwargs: Any) -> int:
    """The kernel, a value of ``SDPBackend``, that torch chooses for fused attention."""
    return torch._fused_sdp_choice(*args, **kwargs)


@contextmanager
def replaced_attention(instead: Callable[..., Any]) -> Iterator[None]:
    """Call another function in place of torch's fused attention."""
    from unittest.mock import patch

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", instead):
        yield


@contextmanager
def registered_parameters(change: Callable[[torch.nn.Parameter], Any]) -> Iterator[None]:
    """Change the parameters that modules register in this context."""
    from unittest.mock import patch

    register = torch.nn.Module.register_parameter

    def register_changed(module: Any, name: str, parameter: torch.nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else change(parameter))

    with patch.object(torch.nn.Module, "register_parameter", register_changed):
        yield


@contextmanager
def loading_as_stored() -> Iterator[None]:
    """Let ``torch.load`` keep the dtypes of stored bytes; see ``stored_dtypes``."""
    from unittest.mock import patch

    load = torch.load

    def load_as_stored(*args: Any, **kwargs: Any) -> Any:
        with stored_dtypes():
            return load(*args, **kwargs)

    with patch("torch.load", load_as_stored):  # ``torch`` here is imported late
        yield


def fake_tensors() -> AbstractContextManager[Any]:
    """Make tensors in this context that take no memory."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def unpickled(
    content: bytes, storage: Callable[[tuple[Any, ...]], Any], check: Callable[..., None]
) -> Any:
    """Unpickle the contents of an archive as ``torch.load`` does, which executes no code of it.

    Args:
        content: the pickle.
        storage: makes a storage from what the pickle says of it.
        check: called with storage, offset, size and strides of every tensor.
    """
    from unittest.mock import patch

    from torch._weights_only_unpickler import Unpickler

    rebuild: Callable[..., Tensor] = torch._utils._rebuild_tensor

    def rebuild_checked(*parts: Any) -> Tensor:
        check(*parts)
        return rebuild(*parts)

    loader: Any = Unpickler(io.BytesIO(content), encoding="utf-8")
    loader.persistent_load = storage
    with patch.object(torch._utils, "_rebuild_tensor", rebuild_checked), stored_dtypes():
        return loader.load()


def storage_info(file: str, start: int, length: int) -> Any:
    """The place of an entry in the files of a distributed checkpoint, in bytes."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, length)
