"""What a model's attention reads on real text, layer by layer, and what a change of it costs.

Both stream the model out of its files (``growkit.proof.layerwise``), so that they work for models
that are larger than memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from growkit.checkpoint import Weights, main_dtype
from growkit.proof import Settings
from growkit.proof.comparison import logits_in_pieces
from growkit.proof.layerwise import Call, Layerwise
from growkit.proof.metrics import Distance
from growkit.proof.prompts import make_prompts

KEPT = 2
"""Second moments kept at once: two tensors are made side by side."""

Rewritten = Callable[[str, Tensor, int], Tensor]
"""From a projection's name, its weight and a rank to its weight with that rank."""


def calibration_windows(source: Weights, text: str | None) -> tuple[Tensor, ...]:
    """Token ids of a text as the source's tokenizer reads it, or seeded random ones without.

    Raises:
        InputError: the text or the tokenizer cannot be used.
    """
    return make_prompts(Settings(text), Path(source.where()), source.config).windows


class Calibration:
    """Second moments of what the attention of every layer reads, on a text.

    Args:
        source: a DIFF Transformer.
        windows: token ids, each [tokens].
    """

    def __init__(self, source: Weights, windows: Sequence[Tensor]) -> None:
        self._source = source
        self._calls = [Call(window) for window in windows]
        self._lock = Lock()
        self._moments: dict[int, Tensor] = {}
        self._running: Iterator[tuple[int, Tensor]] = iter(())

    def moment(self, layer: int) -> Tensor:
        """Σ x xᵀ over all tokens, where x is what queries and keys read: [hidden, hidden], float64.

        Layers are best asked for in order: one that lies behind makes the model run once more.
        """
        with self._lock:
            if layer not in self._moments and layer <= max(self._moments, default=layer):
                self._running, self._moments = self._run(), {}
            while layer not in self._moments:
                done, moment = next(self._running)
                self._moments[done] = moment
                self._moments.pop(done - KEPT, None)
            return self._moments[layer]

    def _run(self) -> Iterator[tuple[int, Tensor]]:
        model = _layerwise(self._source)
        found: list[Tensor] = []

        def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            read = args[0].flatten(0, -2).double()
            found.append(read.T @ read)

        for module in model.model.modules():
            if hasattr(module, "q_proj"):
                module.q_proj.register_forward_pre_hook(look)
        for stage in model.stages(self._calls):
            if stage.layer is not None:
                moment = torch.stack(found).sum(0)
                found.clear()
                yield stage.layer, moment.cpu()


def divergences(
    source: Weights,
    windows: Sequence[Tensor],
    projections: Sequence[str],
    rewritten: Rewritten,
    ranks: Sequence[int],
) -> dict[int, float]:
    """What low ranks cost: KL(source ‖ source with rewritten projections), all in one pass.

    Args:
        source: a DIFF Transformer.
        windows: token ids, each [tokens].
        projections: names within a layer's attention, e.g. ``q_proj``.
        rewritten: makes a projection's weight of a rank.
        ranks: those to try.

    Returns:
        For every rank, nats per token.
    """
    model = _layerwise(source)
    states: dict[int, list[Tensor]] = {}
    for stage in model.stages([Call(window) for window in windows]):
        if stage.layer is None:
            states = {rank: list(stage.after) for rank in ranks}
            continue
        attention = next(m for m in stage.module.modules() if hasattr(m, "q_proj"))
        modules = {name: getattr(attention, name) for name in projections}
        prefix = next(n for n, m in model.model.named_modules() if m is attention)
        weights = {name: source.read(f"{prefix}.{name}.weight") for name in projections}
        for rank in ranks:
            new = {n: rewritten(f"{prefix}.{n}.weight", w, rank) for n, w in weights.items()}
            with _replaced(modules, new):
                states[rank] = [stage.again(i, state) for i, state in enumerate(states[rank])]
    found = {rank: Distance() for rank in ranks}
    with model.head() as head:
        for index, window in enumerate(windows):
            clean = (head, stage.after[index])
            for rank in ranks:
                found[rank].add_all(logits_in_pieces(clean, (head, states[rank][index]), window))
    return {rank: max(each.kl, 0.0) / each.tokens for rank, each in found.items()}


@contextmanager
def _replaced(modules: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Iterator[None]:
    originals = {name: module.weight.data for name, module in modules.items()}
    for name, module in modules.items():
        module.weight.data = weights[name].to(originals[name])
    try:
        yield
    finally:
        for name, module in modules.items():
            module.weight.data = originals[name]


def _layerwise(source: Weights) -> Layerwise:
    dtype = torch.float64 if main_dtype(source.tensors) == "F64" else torch.float32
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return Layerwise(source, dtype, device, None)
