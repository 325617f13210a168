"""What the modules of a layer hand on while a model runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise

GIVEN = "given"
"""What the layer itself is given, beside what its modules hand on."""


def outputs(model: Layerwise, layer: str, ids: Tensor) -> dict[str, Tensor]:
    """What every module of a layer hands on, each [tokens, rows], and what it is given."""
    found: dict[str, Tensor] = {}
    with _listening(model.model, layer, found, len(ids)):
        for stage in model.stages([Call(ids)]):
            if stage.name == layer:
                break
    return found


@contextmanager
def _listening(
    model: nn.Module, layer: str, found: dict[str, Tensor], tokens: int
) -> Iterator[None]:
    def keep(name: str, values: Any) -> None:
        first = values[0] if isinstance(values, tuple) and values else values
        if not isinstance(first, Tensor):
            return
        rows = first[0] if first.dim() == 3 else first
        if rows.dim() == 2 and len(rows) == tokens:
            found.setdefault(name, rows.detach())

    def before(name: str, module: nn.Module, inputs: Any) -> None:
        keep(f"{name}:given" if name else GIVEN, inputs)

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        keep(name, output)

    hooks = [
        hook
        for name, module in model.get_submodule(layer).named_modules()
        for hook in (
            module.register_forward_pre_hook(partial(before, name)),
            module.register_forward_hook(partial(after, name)),
        )
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
