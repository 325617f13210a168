"""Attention kernels of torch: which of them a device offers, and which one runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from growkit.base.torch_internals import fused_kernel, replaced_attention
from growkit.engine.transformers_internals import attention_of

FUSED = {
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "overrideable": SDPBackend.OVERRIDEABLE,
}
"""Kernels of torch's fused attention; devices outside of torch bring the last one."""

EAGER = "eager"
"""Attention as the class itself writes it, without torch's fused attention."""

CHOSEN = "as chosen"
"""The kernel that the class and torch choose."""


def offered(model: Any, device: torch.device, dtype: torch.dtype) -> list[str]:
    """The kernels that a model can run with, the chosen one first.

    Args:
        model: a transformers model.
        device: device of the model.
        dtype: dtype of the computation.
    """
    if attention_of(model) != "sdpa":
        return [CHOSEN]
    kernels, heads = [CHOSEN, EAGER], torch.zeros(1, 1, 16, 64, dtype=dtype).to(device)
    for name, kernel in FUSED.items():
        with warnings.catch_warnings(), sdpa_kernel(kernel):
            warnings.simplefilter("ignore")  # they say why a kernel cannot run
            with suppress(RuntimeError):
                choice = fused_kernel(heads, heads, heads, is_causal=True)
                functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
                kernels += [name] if choice == kernel.value else []
    return kernels


@contextmanager
def with_kernel(name: str, model: Any, ran: dict[str, set[str]]) -> Iterator[None]:
    """Run a model with one kernel where it can take the inputs, and with math elsewhere.

    Args:
        name: name of the kernel; empty for no choice.
        model: a transformers model.
        ran: receives the names of the fused kernels that run, by the name of the chosen one.
    """
    if not name:
        yield
        return
    attention = functional.scaled_dot_product_attention
    used = ran.setdefault(name, set())
    names = {kernel.value: fused for fused, kernel in FUSED.items()}

    def noted(*args: Any, **kwargs: Any) -> Any:
        used.add(names.get(fused_kernel(*args, **kwargs), "unknown"))
        return attention(*args, **kwargs)

    with ExitStack() as chosen:
        if name == EAGER:
            chosen.callback(model.set_attn_implementation, attention_of(model))
            model.set_attn_implementation(EAGER)
        elif name in FUSED:
            kernels = [FUSED[name], SDPBackend.MATH]
            chosen.enter_context(sdpa_kernel(kernels, set_priority=True))
        chosen.enter_context(replaced_attention(noted))
        yield
