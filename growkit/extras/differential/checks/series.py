"""How far the series of a causal integral is from the exact one, in every layer, on the text.

``differential_attention.integral_series`` leaves out terms of columns with little weight. What that
does depends on the text and the weights, so it is measured, and must be within what can be proved.
"""

import math
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from growkit.base.tensors import TORCH_NAMES, main_dtype
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise, last_state
from growkit.engine.metrics import finite
from growkit.engine.transformers_class import longest_context
from growkit.extras.differential.modeling.differential_attention import (
    BLOCK_ROWS,
    EXACT_ROWS,
    Projected,
    SignalHeads,
    causal_integral,
    column_sums,
    heavy_columns,
    integral_series,
)
from growkit.extras.differential.modeling.modeling_diff_transformer import DiffTransformerAttention
from growkit.extras.differential.results.series_section import SeriesError, SeriesSection
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding

Errors = dict[str, tuple[float, float, float]]
"""By module: see ``SeriesError``."""


def check_series(pair: Pair, function: Function) -> SeriesSection | None:
    """Compare both in float32, where the target's config asks for the series.

    The prompts are joined up to the longest context.
    """
    after, config = pair.after, pair.after.config
    if config.get("integral") != "causal" or config.get("integral_method", "exact") == "exact":
        return None
    dtype = TORCH_NAMES[main_dtype(after.tensors)]
    ids, errors = torch.cat([*pair.prompts.windows])[: longest_context(config)], Errors()
    with ExitStack() as hooks:
        model = Layerwise(after, torch.float32, function.strict.side.place)
        for name, layer in model.layers:
            for module in layer.modules():
                if isinstance(module, DiffTransformerAttention):
                    hook = partial(_compare, errors, name, getattr(torch, dtype))
                    hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        last_state(model.stages([Call(ids)]))
    layers = [
        SeriesError(
            module=name,
            error=finite(error),
            rounding=finite(once) if once else None,
            of_bound=finite(share),
        )
        for name, (error, once, share) in errors.items()
    ]
    return SeriesSection(findings=[_finding(errors, len(ids), dtype)], notes=[], layers=layers)


CHECK = Check(check_series)


def _finding(errors: Errors, tokens: int, dtype: str) -> Finding:
    worst = max(errors, key=lambda name: errors[name][0])
    error, rounding, _ = errors[worst]
    beyond = [name for name, (*_, share) in errors.items() if not share <= 1]
    rounded = f"rounding to {dtype} by {rounding:.1e}" if rounding else "computed in float32"
    sentence = (
        f"on {tokens} tokens the series of the integral is off by at most {error:.1e} of a row "
        f"(in {worst}), {rounded}"
    )
    if not error:
        sentence = f"{tokens} tokens are too few for the series, so the integral was exact"
    elif beyond:
        worst = beyond[0]
        sentence += f", and in {worst} by more than the squares of its means allow"
    else:
        largest = max(share for *_, share in errors.values())
        sentence += (
            f"; no row is off by more than {largest:.0%} of the bound from its squared means"
        )
    return Finding(
        name="series",
        kept=False if beyond else None,
        sentence=sentence,
        place=worst,
        measured=finite(error),
        limit=finite(rounding) if rounding else None,
        verdict="preserved, but the series of its integral is wrong",
        in_reason=True,
    )


def _compare(
    errors: Errors,
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
    error, rounding = (
        float(((tensor.double() - exact) / scale).abs().max())
        for tensor in (output[0], exact.to(dtype))
    )
    projected, _, _ = module.project(*args, **kwargs)
    share = share_of_bound(projected, module.scaling) if error else 0.0  # else it was exact
    errors[name] = error, rounding, share


def share_of_bound(projected: Projected, scaling: float) -> float:
    """The largest error of a head in float64, over the bound of its row.

    Both integrals are means of values, and r of some columns is left out of the weights. So row n
    is off by Σ r (V - H) / (n + 1 + Σ r). V - H is at most the range of the values so far, and Σ r
    at most (e - 2) Σ G², over these columns.
    """
    projected = projected.map(Tensor.double)
    ((query, key), _), value, gamma = projected.parts(), projected.value, projected.gamma
    assert gamma is not None
    group, signal, rows = query.shape[1] // key.shape[1], *query.shape[1:3]
    gammas = gamma.expand(-1, signal, rows, -1).split(group, 1)
    heads = query.split(group, 1), key.split(1, 1), value.split(1, 1), gammas
    groups = (SignalHeads(*head, scaling) for head in zip(*heads, strict=True))
    return float(torch.stack([*map(_of_group, groups)]).max())


def _of_group(heads: SignalHeads) -> Tensor:
    """``share_of_bound`` of the signal heads of one key head."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        # In blocks, unlike fused attention in float64 on some devices.
        return causal_integral(SignalHeads(query, key, value, 0 * gamma, scaling), None)[0]

    query, key, value, gamma, scaling, *_ = heads
    rows = query.shape[2]
    series, _ = integral_series(heads, attend)
    sums = column_sums(query[:, :, :EXACT_ROWS], key, scaling, 0, None)
    counts = torch.arange(1, rows + 1, device=key.device)[None]
    columns, starts = heavy_columns(query, key, scaling, counts, None, sums)
    starts = columns.new_full((len(key), 1, rows + 1), rows).scatter(2, columns, starts)
    extent = value.cummax(2).values - value.cummin(2).values
    before, shares = query[..., :0, 0], []
    for first in range(0, rows, BLOCK_ROWS):
        last = min(first + BLOCK_ROWS, rows)
        part, counts = slice(first, last), torch.arange(first, last, device=key.device)[:, None] + 1
        later = torch.arange(last, device=key.device) >= counts
        scores = query[:, :, part] @ key[:, :, :last].mT * scaling
        maps = scores.masked_fill(later, -torch.inf).softmax(-1)
        running = functional.pad(before, (0, last - first))[:, :, None] + maps.cumsum(-2)
        means, before = running / counts, running[:, :, -1]
        weights = maps + gamma[:, :, part] * means.masked_fill(later, -torch.inf).softmax(-1)
        exact = weights @ value[:, :, :last]
        left = means * (counts <= starts[:, :, None, :last])
        squares = left.square().sum(-1, keepdim=True) * gamma[:, :, part].abs()
        bound = (math.e - 2) * squares * extent[:, :, part] / (counts + 1)
        rounding = 1e-12 * exact.abs().amax(-1, keepdim=True)
        off = ((series[:, :, part] - exact).abs() - rounding).clamp_min(0)
        shares.append((off / bound.clamp_min(torch.finfo(bound.dtype).tiny)).max())
    return torch.stack(shares).max()
