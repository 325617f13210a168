"""Gradients that are looked at as they are made, and kept by nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn


@contextmanager
def handing_over(
    parameters: Mapping[str, nn.Parameter], look: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Gradients of these parameters go to ``look`` as they are made; neither of them is kept."""

    def hand_over(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.new_empty(0)  # all that needed it went backward before
        look(name, gradient)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(hand_over, name))
        for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def backward(output: Tensor, gradient: Tensor | None = None) -> None:
    """Go backward from what was computed; ``gradient`` is that of it, where it is no number."""
    torch.autograd.backward([output], [gradient] if gradient is not None else None)
