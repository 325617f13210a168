"""What a change of attention's projections costs on a text, and the text's moments.

To measure inputs and costs on real text, the model runs one layer at a time from its files
(``growkit.engine.layerwise``), so it may be larger than memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.limits import within
from growkit.base.options import Option
from growkit.base.progress import current
from growkit.base.settings import Settings
from growkit.base.tensors import main_dtype, total_bytes
from growkit.extras.planned_tokenizer import with_tokenizer
from growkit.model.model import Model
from growkit.results.growth_result import RankTried

if TYPE_CHECKING:
    from growkit.engine.layerwise import Layerwise
    from growkit.extras.spool import Spool

TOLERANCE = Option(
    "tolerance",
    "the KL that rank auto may cost, in nats per token",
    form="NATS",
    kind=float,
    limits=(None, 1e300),
)
CALIBRATION = Option(
    "calibration",
    "a UTF-8 text, which weights inputs by their frequency, and on which auto tries ranks",
    form="TEXT",
)

Way = TypeVar("Way", bound=Hashable)

Record = Callable[[Any, Tensor, Mapping[str, Any], Any], Tensor]
"""Maps an attention, its input [batch, tokens, hidden], its other arguments and what it returns to
a tensor, which is added up over the text."""

WINDOWS = 64
"""Number of windows of text, of 512 tokens each, for the second moments."""

RANKS_PER_PASS = 8
"""Number of ranks that are tried in one pass over the model."""


@dataclass(frozen=True)
class Replacement:
    """What a layer's attention has in place of its own.

    Attributes:
        projections: by the name of a projection, its weight and its bias; None keeps the bias.
        scores: maps the input of attention, [batch, tokens, hidden], to what is added to the
            products of queries and keys, [batch, heads, tokens, tokens].
    """

    projections: Mapping[str, tuple[Tensor, Tensor | None]]
    scores: Callable[[Tensor], Tensor] | None = None


def windows_of(source: Model, text: str | None, count: int | None = None) -> Sequence[Tensor]:
    """Token ids of a text, or random ones, each [tokens].

    Raises:
        InputError: see ``growkit.engine.prompts.make_prompts``.
    """
    from growkit.engine.prompts import make_prompts

    with with_tokenizer(source) as folder:
        return make_prompts(Settings(text, count), folder.path, source.config).windows


def smallest_rank(
    largest: int, costs: Callable[[Sequence[int]], Mapping[int, float]], tolerance: float
) -> tuple[int, dict[int, float]]:
    """Find a rank that keeps a tolerance while the next smaller one does not.

    Apart from noise, costs fall as ranks rise. Ranks are tried in a geometric series, then between
    the largest rank that fails and the smallest that keeps the tolerance, until these are
    neighbours.

    Args:
        largest: the largest useful rank.
        costs: maps ranks to the cost of each.
        tolerance: the largest accepted cost.

    Returns:
        The rank, and the cost of every rank that was tried.

    Raises:
        InputError: no rank keeps the tolerance.
    """
    tried: dict[int, float] = {}
    below, above = 0, largest + 1
    while above - below > 1:
        between = range(below + 1, above)
        ranks = list(between[:: -(-len(between) // RANKS_PER_PASS)])
        if above > largest:  # the first pass covers the whole range
            steps = {round(largest ** (i / (RANKS_PER_PASS - 1))) for i in range(RANKS_PER_PASS)}
            ranks = sorted(steps | {1, largest})
        tried |= costs(ranks)
        kept = [rank for rank, cost in tried.items() if within(cost, tolerance)]
        if not kept:
            raise InputError(
                f"no rank keeps a tolerance of {tolerance:g}: rank {largest} still costs "
                f"{tried[largest]:.3g}; pass a wider --dtype or a larger tolerance"
            )
        above = min(kept)
        below = max((rank for rank in tried if rank < above), default=0)
    return above, dict(sorted(tried.items()))


def search_ranks(
    largest: int,
    tolerance: float,
    ways_of: Callable[[int], Sequence[Way]],
    costs: Callable[[Sequence[Way]], Mapping[Way, float]],
) -> tuple[Way, list[RankTried]]:
    """Find the cheapest way of the smallest rank that keeps a tolerance; see ``smallest_rank``.

    Args:
        largest: the largest useful rank.
        tolerance: the largest accepted cost, in nats per token.
        ways_of: the ways that a rank has, if any.
        costs: measures the cost of ways, in nats per token.

    Returns:
        The way, and the cost of every rank that was tried.

    Raises:
        InputError: no rank keeps the tolerance.
    """
    ways: dict[int, Sequence[Way]] = {}
    tried: dict[Way, float] = {}

    def costs_by_rank(ranks: Sequence[int]) -> Mapping[int, float]:
        ways.update((rank, ways_of(rank)) for rank in ranks)
        tried.update(costs([way for rank in ranks for way in ways[rank]]))
        return {rank: min((tried[way] for way in ways[rank]), default=math.inf) for rank in ranks}

    best, by_rank = smallest_rank(largest, costs_by_rank, tolerance)
    return min(ways[best], key=tried.__getitem__), [
        RankTried(layer=None, rank=rank, kl_nats_per_token=cost, energy=None, chosen=rank == best)
        for rank, cost in by_rank.items()
        if ways[rank]
    ]


def costs_of(
    source: Model,
    windows: Sequence[Tensor],
    ways: Sequence[Way],
    of_layer: Callable[[int], Callable[[Way], Replacement]],
    title: str,
) -> Mapping[Way, float]:
    """Measure the cost of changes of attention, all ways in one pass over the model.

    Args:
        source: the model.
        windows: token ids, each [tokens].
        ways: what is tried.
        of_layer: maps the index of a layer to the function that makes its replacement.
        title: what the progress bar says.

    Returns:
        KL(source ‖ source with the replacements) of every way, in nats per token.
    """
    from growkit.engine.calls import Call
    from growkit.engine.metrics import distance_of

    model, total = _layerwise(source), total_bytes(source.tensors)
    states: dict[Way, list[Tensor]] = {}
    with current().bytes(title, total) as advance:
        for stage in model.stages([Call(window) for window in windows]):
            if stage.layer is None:
                states = {way: list(stage.after) for way in ways}
                continue
            advance(total // len(model.layers))
            attention = next(m for m in stage.module.modules() if hasattr(m, "q_proj"))
            replacement = of_layer(stage.layer)
            for way in ways:
                with _replaced(attention, replacement(way)):
                    states[way] = [stage.again(i, state) for i, state in enumerate(states[way])]
    with model.head() as head:
        clean = head, stage.after
        return {way: distance_of(clean, (head, states[way]), windows).kl_per_token for way in ways}


class Calibration:
    """Sums over a text for every layer's attention; by default the second moments of its inputs.

    The model runs once, when the first sum is needed. The moments of all layers are as large as a
    part of the model, so they are kept in a temporary folder, which is deleted with this object.

    Args:
        source: a model whose attention has a ``q_proj``.
        windows: token ids, each [tokens].
        record: what is added up.
        kernel: name of the attention kernel; "eager" returns the weights of tokens.
    """

    def __init__(
        self,
        source: Model,
        windows: Sequence[Tensor],
        record: Record = lambda module, inputs, arguments, output: moment_of(inputs),
        kernel: str = "",
    ) -> None:
        self._run = partial(_run, source, windows, record, kernel)
        self._lock = Lock()
        self._sums: Spool | None = None

    def moment(self, layer: int, shrinkage: float = 0.0) -> Tensor:
        """Σ x xᵀ over all tokens, where x is the input of queries and keys, [hidden, hidden].

        Args:
            layer: index of the layer.
            shrinkage: part of the moment that is spread evenly over all directions, since rare
                directions differ between texts (Ledoit and Wolf, "A well-conditioned estimator for
                large-dimensional covariance matrices", 2004).

        Returns:
            The moment, in float64.

        Raises:
            InputError: the model cannot run, or there is no room for temporary files.
        """
        moment = self.sums(layer)
        even = torch.eye(len(moment), dtype=moment.dtype) * moment.trace() / len(moment)
        return moment.lerp(even, shrinkage)

    def sums(self, layer: int) -> Tensor:
        """What is added up for a layer, in float64.

        Raises:
            InputError: see ``moment``.
        """
        with self._lock:
            self._sums = self._sums or self._run()
        return self._sums[layer]


def moment_of(inputs: Tensor, weights: Tensor | None = None) -> Tensor:
    """Σ x xᵀ over all tokens, [hidden, hidden] of [batch, tokens, hidden], in float64.

    Args:
        inputs: the tokens.
        weights: of the tokens, [batch, tokens].
    """
    rows = inputs.double().flatten(0, -2)
    return rows.T @ (rows if weights is None else rows * weights.reshape(-1, 1))


def _run(source: Model, windows: Sequence[Tensor], record: Record, kernel: str) -> Spool:
    from growkit.engine.calls import Call
    from growkit.extras.spool import Spool

    model, spool, sums = _layerwise(source), Spool(), list[Tensor]()

    def look(module: Any, args: Sequence[Tensor], named: dict[str, Any], output: Any) -> None:
        inputs = args[0] if args else named["hidden_states"]
        terms = record(module, inputs, named, output)
        sums[:] = [sums[0] + terms if sums else terms]

    for module in model.model.modules():
        if hasattr(module, "q_proj"):
            module.register_forward_hook(look, with_kwargs=True)
    for stage in model.stages([Call(window, kernel=kernel) for window in windows]):
        if stage.layer is not None:
            spool.append(sums.pop())
    return spool


@contextmanager
def _replaced(attention: Any, replacement: Replacement) -> Iterator[None]:
    modules = {name: getattr(attention, name) for name in replacement.projections}
    for name, module in modules.items():
        like = dict(module.named_parameters())["weight"]
        weight, bias = replacement.projections[name]
        bias = module.bias if bias is None else bias.to(like)
        module.forward = partial(torch.nn.functional.linear, weight=weight.to(like), bias=bias)

    def add_scores(module: Any, args: Any, named: dict[str, Any]) -> Any:
        assert replacement.scores is not None
        scores = replacement.scores(named["hidden_states"]) * module.scaling
        later = torch.full_like(scores[0, 0], -torch.inf).triu(1)
        return args, named | {"attention_mask": scores + later}

    with ExitStack() as stack:
        for module in modules.values():
            stack.callback(delattr, module, "forward")
        if replacement.scores is not None:
            hook = attention.register_forward_pre_hook(add_scores, with_kwargs=True)
            stack.callback(hook.remove)
        yield


def _layerwise(source: Model) -> Layerwise:
    from growkit.engine.device import choose_device
    from growkit.engine.layerwise import Layerwise

    dtype = torch.float64 if main_dtype(source.tensors) == "F64" else torch.float32
    return Layerwise(source, dtype, choose_device("auto", dtype))
