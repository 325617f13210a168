"""How far the series of a causal integral is from the exact one, in every layer, on the text.

``differential_attention.integral_series`` leaves out terms of columns with little weight. What that
does depends on the text and the weights, so it is measured.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from growkit.base.tensors import TORCH_NAMES, main_dtype
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise, last_state
from growkit.engine.oracle import longest_context
from growkit.modeling.modeling_diff_transformer import DiffTransformerAttention
from growkit.results.proof import Finding

Errors = dict[str, tuple[float, float]]
"""By module: of the series, and of rounding the exact output once."""


def series_finding(
    after: Checkpoint, windows: Sequence[Tensor], device: torch.device
) -> Finding | None:
    """Compare both in float32, where the target's config asks for the series.

    Args:
        after: the target.
        windows: token ids, each [tokens]; joined up to the longest context.
        device: device that the model runs on.
    """
    config = after.config
    if config.get("integral") != "causal" or config.get("integral_method", "exact") == "exact":
        return None
    dtype = TORCH_NAMES[main_dtype(after.tensors)]
    ids, found = torch.cat([*windows])[: longest_context(config)], Errors()
    with ExitStack() as hooks:
        model = Layerwise(after, torch.float32, device, None)
        for name, layer in model.layers:
            for module in layer.modules():
                if isinstance(module, DiffTransformerAttention):
                    hook = partial(_compare, found, name, getattr(torch, dtype))
                    hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        last_state(model.stages([Call(ids)]))
    worst = max(found, key=lambda name: found[name][0])
    error, rounding = found[worst]
    sentence = (
        f"on {len(ids)} tokens the series of the integral is off by at most {error:.1e} of a row "
        f"(in {worst}), rounding to {dtype} by {rounding:.1e}"
    )
    if not error:
        sentence = f"{len(ids)} tokens are too few for the series, so the integral was exact"
    return Finding(
        name="series", kept=None, sentence=sentence, place=worst, measured=error, limit=rounding
    )


def _compare(
    found: Errors,
    name: str,
    dtype: torch.dtype,
    module: Any,
    args: Any,
    kwargs: Any,
    output: tuple[Tensor, Any],
) -> None:
    """Note the largest errors of a row, relative to the root mean square of the exact one."""
    with patch.object(module.config, "integral_method", "exact"):
        exact = module.forward(*args, **kwargs)[0].double()
    scale = exact.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(exact.dtype).tiny)
    rounded = exact.to(dtype)
    found[name] = tuple(  # type: ignore[assignment]
        float(((each.double() - exact) / scale).abs().max()) for each in (output[0], rounded)
    )
