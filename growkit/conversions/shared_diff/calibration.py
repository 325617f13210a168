"""What a model's attention reads on real text, layer by layer, and what a change of it costs.

Both stream the model out of its files (``growkit.engine.layerwise``), so that they work for models
that are larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.progress import Advance, nothing
from growkit.checkpoint.tensors import Weights, main_dtype, total_bytes
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.metrics import distance_of
from growkit.engine.spool import Spool

WINDOWS = 64
"""Windows of the text from which second moments are taken: 32,768 tokens of 512 each."""

Way = TypeVar("Way", bound=Hashable)
"""One of several ways to rewrite projections."""


class Calibration:
    """Second moments of what the attention of every layer reads, on a text.

    The model runs once. Moments of all layers together are as large as a part of the model, so they
    wait in a folder for temporary files; it goes when the object goes.

    Args:
        source: a DIFF Transformer.
        windows: token ids, each [tokens].
    """

    def __init__(self, source: Weights, windows: Sequence[Tensor]) -> None:
        self._moments = Spool()
        self._lock = Lock()
        self._running = _run(source, windows, self._moments)

    def moment(self, layer: int, shrinkage: float = 0.0) -> Tensor:
        """Σ x xᵀ over all tokens, where x is what queries and keys read: [hidden, hidden], float64.

        Args:
            layer: its index.
            shrinkage: the part of the moment that is spread evenly over all directions. What a text
                shows of rare directions says little of other texts (Ledoit and Wolf, "A
                well-conditioned estimator for large-dimensional covariance matrices", 2004).

        Raises:
            InputError: the model cannot be run, or there is no room for temporary files.
        """
        with self._lock:
            while len(self._moments) <= layer:
                next(self._running)
        moment = self._moments[layer]
        even = torch.eye(len(moment), dtype=moment.dtype) * moment.trace() / len(moment)
        return moment.lerp(even, shrinkage)


def _run(source: Weights, windows: Sequence[Tensor], moments: Spool) -> Iterator[None]:
    """Run a model, and keep the moment of one layer at a time."""
    model = _layerwise(source)
    hidden = source.config["hidden_size"]
    moment = torch.zeros(hidden, hidden, dtype=torch.float64, device=model.device)

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        read = args[0].flatten(0, -2).double()
        moment.addmm_(read.T, read)

    for module in model.model.modules():
        if hasattr(module, "q_proj"):
            module.q_proj.register_forward_pre_hook(look)
    for stage in model.stages([Call(window) for window in windows]):
        if stage.layer is not None:
            moments.append(moment)
            moment.zero_()
            yield


def divergences(
    source: Weights,
    windows: Sequence[Tensor],
    projections: Sequence[str],
    rewritten: Callable[[str, Tensor, Way], Tensor],
    ways: Sequence[Way],
    advance: Advance = nothing,
) -> dict[Way, float]:
    """What other projections cost: KL(source ‖ source with rewritten ones), all in one pass.

    Args:
        source: a DIFF Transformer.
        windows: token ids, each [tokens].
        projections: names within a layer's attention, e.g. ``q_proj``.
        rewritten: from a projection's name, its weight and a way to its new weight.
        ways: those to try, e.g. ranks.
        advance: called with the number of bytes done, of those of the source.

    Returns:
        For every way, nats per token.
    """
    model = _layerwise(source)
    states: dict[Way, list[Tensor]] = {}
    for stage in model.stages([Call(window) for window in windows]):
        if stage.layer is None:
            states = {way: list(stage.after) for way in ways}
            continue
        advance(total_bytes(source.tensors) // source.config["num_hidden_layers"])
        attention = next(m for m in stage.module.modules() if hasattr(m, "q_proj"))
        modules = {name: getattr(attention, name) for name in projections}
        prefix = next(n for n, m in model.model.named_modules() if m is attention)
        weights = {name: source.read(f"{prefix}.{name}.weight") for name in projections}
        for way in ways:
            new = {n: rewritten(f"{prefix}.{n}.weight", w, way) for n, w in weights.items()}
            with _replaced(modules, new):
                states[way] = [stage.again(i, state) for i, state in enumerate(states[way])]
    with model.head() as head:
        clean = head, stage.after
        found = {way: distance_of(clean, (head, states[way]), windows) for way in ways}
    return {way: each.kl_per_token for way, each in found.items()}


@contextmanager
def _replaced(modules: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[None]:
    for name, module in modules.items():
        weight = weights[name].to(dict(module.named_parameters())["weight"])
        module.forward = partial(functional.linear, weight=weight, bias=module.bias)
    try:
        yield
    finally:
        for module in modules.values():
            del module.forward


def _layerwise(source: Weights) -> Layerwise:
    dtype = torch.float64 if main_dtype(source.tensors) == "F64" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Layerwise(source, dtype, device, None)
