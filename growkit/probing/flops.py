"""What a step of training costs, counted while a window goes through the model and back.

Counted are products of matrices: 2 · m · n · k for [m, k] times [k, n], of the forward and the
backward pass (torch's ``FlopCounterMode``). For a dense Transformer that is

    (6 · N + 12 · layers · heads · head_dim · length) · tokens

with N the weights that are multiplied with, the output head among them and the embedding not
(Kaplan et al., arXiv 2001.08361; PaLM, arXiv 2204.02311, appendix B). Attention is counted with
both of its halves, as it is computed without a special kernel, and experts as tokens are sent to
them. Norms, softmaxes and the step of the optimizer are left out, as is what growing and
measuring took.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from growkit.engine.oracle import load, quiet


def flops_of(stored: Any, window: Tensor, device: torch.device) -> int:
    """Floating-point operations of training on a window, [tokens].

    Args:
        stored: a model folder, or the checkpoint in one.
        window: the tokens.
        device: where it is tried.
    """
    model: Any = load(stored, torch.float32, device, None)  # as it is trained
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # products of groups are not counted
    ids = window[None].to(device)
    # Fused attention is not counted on every device, and its kernels by other rules.
    math = sdpa_kernel(SDPBackend.MATH)
    with quiet(), math, FlopCounterMode(display=False) as counter:
        model(ids, labels=ids, use_cache=False).loss.backward()
    return int(counter.get_total_flops())
