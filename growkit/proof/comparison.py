"""Two models side by side, one layer at a time: how far apart they are, and from where on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from growkit.algebra.expansion import NOTHING
from growkit.base.limits import within
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call, CallError, Spool
from growkit.engine.class_weights import ClassWeights
from growkit.engine.layerwise import Layerwise, Stage
from growkit.engine.loader import loading
from growkit.engine.metrics import Distance, Head, distance_of, error_of, logits_in_pieces
from growkit.engine.oracle import lacks_class
from growkit.planning.layouts import read_layout
from growkit.planning.plan import Lineage, Places, traced
from growkit.proof.fingerprint import Question
from growkit.proof.modes import PREFILL, Mode, NotAskedError


@dataclass(frozen=True)
class Copied:
    """Which coordinate of the source each one of the target copies.

    Attributes:
        source: [coordinates of the target], ``NOTHING`` for zeros.
        factor: what the target's tensor is multiplied by.
    """

    source: Tensor
    factor: float = 1.0

    def expected(self, given: Tensor) -> Tensor:
        """What the target should have of the source's [..., coordinates]."""
        zero = given.new_zeros(*given.shape[:-1], 1)  # where ``NOTHING`` points to
        return torch.cat([given, zero], -1)[..., self.source.to(given.device)]

    def summed(self, found: Tensor, size: int) -> Tensor:
        """The sums of copies in the target's [..., coordinates]; ``size`` is the source's."""
        sums = found.new_zeros(*found.shape[:-1], size + 1)
        return sums.index_add_(-1, self.source.to(found.device) % (size + 1), found)[..., :-1]


def copied_states(expected: Tensor, found: Tensor, copied: Copied | None) -> Copied | None:
    """How the target's hidden states hold the source's; None if they cannot.

    Args:
        expected: states of the source, [tokens, hidden].
        found: those of the target.
        copied: what is known of it; without, whole spaces or single coordinates may be repeated.
    """
    size, grown = expected.shape[-1], found.shape[-1]
    if copied and len(copied.source) == grown:
        return copied
    if grown % size:
        return None
    places = torch.arange(grown)
    orders = Copied(places % size), Copied(places // (grown // size))
    return min(orders, key=lambda order: error_of(found, order.expected(expected)))


def hidden_copies(
    lineage: Lineage, before: Checkpoint, after: Checkpoint, embeddings: tuple[str, str]
) -> Copied | None:
    """What hidden states copy, read off the embeddings; None if that is not known.

    Args:
        lineage: how the target was made.
        before: the source.
        after: the target.
        embeddings: names of both embeddings in their classes, [vocabulary, hidden].
    """
    old, new = (_stored(*each) for each in zip((before, after), embeddings, strict=True))
    made = traced(lineage.plans, new.tensor, 1, new) if new else None
    if made is None or old is None or old.source is not None or made.tensor != old.tensor:
        return None
    assert new
    size, grown = before.tensors[old.tensor].shape[1], after.tensors[new.tensor].shape[1]
    source = np.arange(grown) if made.source is None else made.source
    if len(source) != grown or source.max(initial=NOTHING) >= size:
        return None  # the manifest does not describe this target
    return Copied(torch.from_numpy(source), made.factor / old.factor)


def _stored(checkpoint: Checkpoint, name: str) -> Places | None:
    """The stored tensor that a parameter of the class is, and the places of its columns."""
    if lacks_class(checkpoint.config):
        return traced((read_layout(checkpoint),), name, 1)
    stored = ClassWeights(checkpoint, loading(checkpoint).conversions).stored_as(name)
    return Places(stored) if stored else None


Pair = tuple[Stage | None, Stage | None, bool]
"""A stage of the source and one of the target, and whether they should hand on the same."""


def _pairs(
    before: Iterator[Stage], after: Iterator[Stage], layers: Sequence[int | None] | None
) -> Iterator[Pair]:
    """All stages of both.

    Args:
        before: of the source.
        after: of the target.
        layers: the source's layer that each layer of the target computes, None for one that returns
            what it is given; None if that is not known.
    """
    one: Stage | None = next(before)
    yield one, next(after), True
    done, same = 0, layers is not None  # ``done`` counts the source's layers
    for layer in layers or ():
        same = same and layer in (None, done)
        if layer is not None or not same:
            one, done = next(before, None), done + 1
        yield one, next(after, None), same
    for left, other in zip_longest(before, after):
        yield left, other, False


PROBE = 128
"""Tokens, at most, of the prompt that is run with a fault, and backward."""

SPREAD = 128
"""Tokens of every prompt, at most, on which rounding in the storage dtype is measured."""

SAMPLE = 500
"""Pairs of logits that are kept to be drawn."""

FAULT = 1e-3
"""Relative size of the fault that the negative control must notice."""

VISIBLE = 1e-6
"""Share of a fault that must arrive, or another is tried: less may drown in rounding."""


@dataclass
class Probe:
    """Additional runs: a deliberate fault in the target, and the source disturbed by rounding.

    A sum of n products in a dtype with relative spacing eps is off by about eps · √n of its size.

    Attributes:
        call: the beginning of the first prompt, at most ``PROBE`` tokens, for the fault.
        noise: relative size of one rounded sum, added to the source's states after every layer on
            the whole first prompt.
        against_itself: hold the fault against the target without it, not against the source.
        wanted: whether the inputs of the target's layers are kept, for the gradients.
        given: the inputs of every layer and of the head of the target, each [tokens, hidden].
        fault: what was changed; empty until a layer was found in which it has any effect.
        control: between the logits with and without the fault.
        rounding: between the logits with and without the noise.
    """

    call: Call
    noise: float
    against_itself: bool
    wanted: bool
    given: Spool = field(default_factory=Spool)
    fault: str = ""
    control: Distance = field(default_factory=Distance)
    rounding: Distance = field(default_factory=Distance)
    _spoiled: Tensor | None = None
    _disturbed: Tensor | None = None

    def disturb(self, stages: Iterator[Stage]) -> Iterator[Stage]:
        """Run the first prompt through the source with noise."""
        for stage in stages:
            disturbed = self._disturbed
            state = stage.after[0] if disturbed is None else stage.again(0, disturbed)
            generator = torch.Generator().manual_seed(len(stage.name))
            noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
            scale = state.square().mean().sqrt()
            self._disturbed = state + self.noise * scale * noise.to(state)
            yield stage

    def spoil(self, stages: Iterator[Stage], first: int, call: int) -> Iterator[Stage]:
        """Spoil the largest matrix of the first layer from ``first`` on in which that shows.

        Args:
            stages: of the target.
            first: index of a layer.
            call: index of ``call`` among the calls.
        """
        for stage in stages:
            if self.wanted:
                self.given.append(stage.after[call])
            if self._spoiled is not None:
                self._spoiled = stage.again(call, self._spoiled)
            elif stage.layer is not None and stage.layer >= first:
                self._spoil(stage, call)
            yield stage

    def _spoil(self, stage: Stage, call: int) -> None:
        assert stage.given is not None
        elements = {key: p.numel() for key, p in stage.module.named_parameters() if p.dim() > 1}
        clean, most = stage.after[call], 0.0
        for key in sorted(elements, key=lambda name: -elements[name]):
            with stage.scaled(key, 1 + FAULT):
                spoiled = stage.again(call, stage.given)
            # An identity block, say, multiplies by zero what is spoiled here.
            error = error_of(spoiled, clean)
            if error > most:
                self._spoiled, self.fault = spoiled, f"{stage.name}.{key} × {1 + FAULT}"
                most = error
            if not within(most, FAULT * VISIBLE):
                return

    def measure(
        self, heads: tuple[Head, Head], ends: tuple[Tensor, Tensor], first: tuple[Call, Tensor]
    ) -> None:
        """Compare the logits; if no layer's fault shows there, with those of a spoiled head.

        Args:
            heads: of source and target.
            ends: the outputs of both last layers for the call.
            first: the first prompt, and the output of the source's last layer for it.
        """
        assert self._disturbed is not None
        clean = heads[0], [first[1]]
        self.rounding = distance_of(clean, (heads[0], [self._disturbed]), [first[0].ids])
        side, head, ids = 1 if self.against_itself else 0, heads[1], [self.call.ids]
        unspoiled = heads[side], [ends[side]]
        if self._spoiled is not None:
            self.control = distance_of(unspoiled, (head, [self._spoiled]), ids)
            if not within(self.control.relative, FAULT * VISIBLE):
                return

        def spoiled(hidden: Tensor) -> Tensor:
            return head(hidden) * (1 + FAULT)

        self.fault = f"output head × {1 + FAULT}"
        self.control = distance_of(unspoiled, (spoiled, [ends[1]]), ids)


@dataclass
class Compared:
    """What a comparison found.

    Attributes:
        distances: between the logits, by mode.
        by_layer: name of the embedding and of every layer, and the largest error of its output,
            relative to its scale; up to the last that can be compared.
        worst: index of the prompt with the largest error.
        ends: what the last layers of source and target hand on of that prompt, [tokens, hidden].
        spread: what that of the source does of some tokens of every prompt, each [tokens, hidden].
        sample: pairs of logits, source and target.
        head: name of the target's output head; None if it is not known which layers correspond.
        answers: what source and target answer to a question that was asked as well.
    """

    distances: dict[str, Distance] = field(default_factory=dict)
    by_layer: list[tuple[str, float]] = field(default_factory=list)
    worst: int = 0
    ends: tuple[Tensor, Tensor] | None = None
    spread: list[Tensor] = field(default_factory=list)
    sample: list[list[float]] = field(default_factory=list)
    head: str | None = None
    answers: tuple[Tensor, Tensor] | None = None

    @property
    def prefill(self) -> Distance:
        """Between the logits of all prompts."""
        return self.distances[PREFILL]


def compare(
    source: Layerwise,
    target: Layerwise,
    asked: Sequence[Mode],
    advance: Callable[[], None],
    probe: Probe | None = None,
    copied: Copied | None = None,
    layers: Sequence[int | None] | None = None,
    question: Question | None = None,
) -> Compared:
    """Run both models on everything that is asked.

    Args:
        source: the source.
        target: the target.
        asked: the prefill first.
        advance: called after every layer of both.
        probe: what else to run.
        copied: what the target's hidden states hold, if that is known.
        layers: which layers of the source those of the target compute, if that is known.
        question: what else both are asked.

    Raises:
        NotAskedError: a model cannot be asked in one of the ways but the prefill.
        InputError: a class cannot run with its config.
    """
    calls: list[Call] = []
    for mode in asked:
        begin = len(calls)
        calls += [
            call if call.continues is None else replace(call, continues=begin + call.continues)
            for call in mode.calls
        ]
    padding = [mode.padding for mode in asked for _ in mode.calls]
    probed = 0
    if probe and len(probe.call.ids) < len(calls[0].ids):
        probed = len(calls)
        calls.append(probe.call)
    if question:
        calls.append(question.call)
    count = len(target.names) - 2
    before = _asked(source.stages(calls), asked, by_target=False)
    after = _asked(target.stages(calls, probed if probe else None), asked, by_target=True)
    if probe:
        before = probe.disturb(before)
        after = probe.spoil(after, count // 2, probed)
    if layers is None or len(layers) != count:
        layers = range(count) if len(source.names) == len(target.names) else None
    found = Compared(head=target.names[-1] if layers is not None else None)
    ends = _walk(_pairs(_let_go(before), after, layers), padding, found, advance, copied)
    found.spread = [state[_spread(state)] for state in ends[0][: len(asked[0].calls)]]
    with source.head() as source_head, target.head() as target_head:
        heads = source_head, target_head
        _compare_logits(asked, heads, ends, found)
        for model in (source, target):
            model.check_reach()
        found.ends = ends[0][found.worst], ends[1][found.worst]
        if probe:
            on_probe = ends[0][probed], ends[1][probed]
            probe.measure(heads, on_probe, (calls[0], ends[0][0]))
        if question:
            of_source, of_target = (
                question.of(head(states[-1])) for head, states in zip(heads, ends, strict=True)
            )
            found.answers = of_source, of_target
    return found


def _asked(stages: Iterator[Stage], asked: Sequence[Mode], *, by_target: bool) -> Iterator[Stage]:
    """The stages of a model; see ``compare``."""
    mode_of = [mode.name for mode in asked for _ in mode.calls]
    try:
        yield from stages
    except CallError as error:
        name = mode_of[error.call] if error.call < len(mode_of) else PREFILL
        if name == PREFILL:
            raise
        raise NotAskedError(error.why, name, by_target=by_target) from error


def _compare_logits(
    asked: Sequence[Mode],
    heads: tuple[Head, Head],
    ends: tuple[list[Tensor], list[Tensor]],
    found: Compared,
) -> None:
    """Take the logits of all calls into account, mode by mode."""
    calls = [(mode, call) for mode in asked for call in mode.calls]
    found.distances |= {mode.name: Distance() for mode, _ in calls}
    meant = [
        [state[mode.padding :] for state, (mode, _) in zip(states, calls, strict=False)]
        for states in ends
    ]
    ids = [call.ids[mode.padding :] for mode, call in calls]
    pieces = logits_in_pieces((heads[0], meant[0]), (heads[1], meant[1]), ids)
    for index, logits, others, following, position in pieces:
        mode = calls[index][0]
        so_far = found.distances[mode.name].largest
        found.distances[mode.name].add(logits, others, following, position)
        if index == 0:
            found.sample += _sample(logits, others, SAMPLE * len(logits) // len(ids[0]))
        if mode is asked[0] and not found.prefill.largest <= so_far:
            found.worst = index


def _walk(
    stages: Iterator[Pair],
    padding: Sequence[int],
    found: Compared,
    advance: Callable[[], None],
    copied: Copied | None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Go through both models, and compare what their layers hand on; what the last ones do."""
    ends: tuple[list[Tensor], list[Tensor]] = ([], [])
    held: Copied | None = None
    for one, other, comparable in stages:
        if one is not None and other is not None and comparable:
            if other.layer is None:
                held = copied_states(one.after[0], other.after[0], copied)
            if held:
                errors = [
                    error_of(state[skip:], held.expected(expected[skip:]))
                    for expected, state, skip in zip(one.after, other.after, padding, strict=False)
                ]
                # torch's maximum keeps a NaN.
                found.by_layer.append((other.name, float(torch.tensor(errors).max())))
        ends = (one.after if one else ends[0], other.after if other else ends[1])
        if other:
            other.let_go()  # the source's next layer needs the room
        advance()
    return ends


def _let_go(stages: Iterator[Stage]) -> Iterator[Stage]:
    """The same, without their weights: the other model's need the room."""
    for stage in stages:
        stage.let_go()
        yield stage


def _spread(state: Tensor) -> Tensor:
    """Places of ``SPREAD`` tokens, from the first to the last; or of all."""
    places = torch.linspace(0, len(state) - 1, min(len(state), SPREAD), dtype=torch.float64)
    return places.round().long().to(state.device)


def _sample(logits: Tensor, others: Tensor, count: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(logits.numel(), (max(count, 1),), generator=generator)
    pairs = torch.stack([logits.flatten().cpu()[picked], others.flatten().cpu()[picked]], -1)
    digits = 17 if pairs.dtype == torch.float64 else 9  # all there are: differences are drawn
    rounded = [[float(f"{value:.{digits}g}") for value in pair] for pair in pairs.tolist()]
    return [pair for pair in rounded if all(map(math.isfinite, pair))]
