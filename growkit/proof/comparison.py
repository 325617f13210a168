"""Two models side by side, one layer at a time: how far apart they are, and from where on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from growkit.base.limits import within
from growkit.engine.calls import Call, CallError
from growkit.engine.layerwise import Layerwise, Stage
from growkit.engine.metrics import Distance, Head, distance_of, logits_in_pieces
from growkit.engine.spool import Spool
from growkit.proof.copies import Copied
from growkit.proof.fingerprint import Question
from growkit.proof.modes import PREFILL, Mode, NotAskedError

Pair = tuple[Stage | None, Stage | None, bool]
"""A stage of the source and one of the target, and whether they should hand on the same."""


def stage_pairs(
    before: Iterator[Stage], after: Iterator[Stage], layers: Sequence[int | None] | None
) -> Iterator[Pair]:
    """Both models, stage by stage; all stages of both come, some of the source's more than once.

    Args:
        before: the embedding and the layers of the source.
        after: those of the target.
        layers: for each layer of the target the number of the source's that it computes, or None
            for one that hands on what it is given; None as a whole if that is not known.
    """
    yield from _found(before, after) if layers is None else _known(before, after, layers)


def _known(
    before: Iterator[Stage], after: Iterator[Stage], layers: Sequence[int | None]
) -> Iterator[Pair]:
    one: Stage | None = next(before)
    yield one, next(after), True
    done, same = 0, True  # of the source's layers
    for layer in layers:
        same = same and layer in (None, done)
        if layer is not None or not same:
            one, done = next(before, None), done + 1
        yield one, next(after, None), same
    for left in before:
        yield left, None, False


def _found(before: Iterator[Stage], after: Iterator[Stage]) -> Iterator[Pair]:
    one: Stage | None = next(before)
    other = next(after)
    yield one, other, True
    given = other.after[0]
    for other in after:
        other.let_go()  # the source's layer needs the room
        if not other.after[0].equal(given):
            handed = one.after[0] if one else given
            one = None
            for left in before:
                if not left.after[0].equal(handed):
                    one = left
                    break
                yield left, None, False
        given = other.after[0]
        yield one, other, True
    for left in before:
        yield left, None, False


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
class Control:
    """A deliberate fault in the target, carried through its layers.

    Attributes:
        fault: what was done; empty until a layer was found in which it has any effect.
        distance: between the logits with and without it.
    """

    fault: str = ""
    distance: Distance = field(default_factory=Distance)
    state: Tensor | None = None

    def watch(self, stages: Iterator[Stage], first: int, call: int) -> Iterator[Stage]:
        """Spoil the largest matrix of the first layer from ``first`` on in which that shows.

        Args:
            stages: of the target.
            first: index of a layer.
            call: index of the call that the fault is carried along.
        """
        for stage in stages:
            if self.state is not None:
                self.state = stage.again(call, self.state)
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
            error = error_of(spoiled[:, None], clean)
            if error > most:
                self.state, self.fault = spoiled, f"{stage.name}.{key} × {1 + FAULT}"
                most = error
            if not within(most, FAULT * VISIBLE):
                return

    def measure(
        self, unspoiled: tuple[Head, list[Tensor]], head: Head, state: Tensor, ids: Tensor
    ) -> None:
        """Compare the logits; if no layer's fault shows there, with those of a spoiled head."""
        if self.state is not None:
            self.distance = distance_of(unspoiled, (head, [self.state]), [ids])
            if not within(self.distance.relative, FAULT * VISIBLE):
                return

        def spoiled(hidden: Tensor) -> Tensor:
            return head(hidden) * (1 + FAULT)

        self.fault = f"output head × {1 + FAULT}"
        self.distance = distance_of(unspoiled, (spoiled, [state]), [ids])


@dataclass
class Rounding:
    """What rounding does to the source: its states, disturbed after every layer as by one sum.

    A sum of n products in a dtype with relative spacing eps is off by about eps · √n of its size.
    """

    amount: float
    distance: Distance = field(default_factory=Distance)
    state: Tensor | None = None

    def watch(self, stages: Iterator[Stage]) -> Iterator[Stage]:
        """Carry the disturbed states of the first prompt along."""
        for stage in stages:
            clean = stage.after[0]
            state = clean if self.state is None else stage.again(0, self.state)
            generator = torch.Generator().manual_seed(len(stage.name))
            noise = torch.randn(state.shape, generator=generator, dtype=torch.float64)
            scale = state.square().mean().sqrt()
            self.state = state + self.amount * scale * noise.to(state)
            yield stage

    def measure(self, undisturbed: tuple[Head, list[Tensor]], ids: Tensor) -> None:
        """Compare the logits."""
        assert self.state is not None
        self.distance = distance_of(undisturbed, (undisturbed[0], [self.state]), [ids])


@dataclass
class Probe:
    """Additional runs: the source disturbed, and a short prompt with a fault and backward.

    Attributes:
        call: the beginning of the first prompt, at most ``PROBE`` tokens.
        control: carried along with the target on these.
        rounding: carried along with the source on the whole first prompt.
        against_itself: hold the control against the target without it, not against the source.
        wanted: whether what the target's layers are given on the call is kept, for the gradients.
        given: what every layer and the head of the target are given, each [tokens, hidden].
    """

    call: Call
    control: Control
    rounding: Rounding
    against_itself: bool
    wanted: bool
    given: Spool = field(default_factory=Spool)

    def attach(
        self, before: Iterator[Stage], after: Iterator[Stage], call: int, layers: int
    ) -> tuple[Iterator[Stage], Iterator[Stage]]:
        """The stages of both models, with the additional runs attached.

        Args:
            before: of the source.
            after: of the target.
            call: index of ``call`` among the calls.
            layers: number of layers of the target.
        """
        if self.wanted:
            after = self._kept(after, call)
        return self.rounding.watch(before), self.control.watch(after, layers // 2, call)

    def measure(
        self, heads: tuple[Head, Head], ends: tuple[Tensor, Tensor], first: tuple[Call, Tensor]
    ) -> None:
        """Compare the logits.

        Args:
            heads: of source and target.
            ends: what the last layers of both hand on of the call.
            first: the first prompt, and what the last layer of the source hands on of it.
        """
        side = 1 if self.against_itself else 0
        self.control.measure((heads[side], [ends[side]]), heads[1], ends[1], self.call.ids)
        self.rounding.measure((heads[0], [first[1]]), first[0].ids)

    def _kept(self, stages: Iterator[Stage], call: int) -> Iterator[Stage]:
        for stage in stages:
            self.given.append(stage.after[call])
            yield stage


@dataclass
class Compared:
    """What a comparison found.

    Attributes:
        distances: between the logits, by mode.
        by_layer: name of the embedding, of every layer and of the head, and the largest error of
            what it hands on, relative to its scale; up to the last that can be compared.
        source_modules: names of the source's modules that these were compared with.
        worst: index of the prompt with the largest error.
        ends: what the last layers of source and target hand on of that prompt, [tokens, hidden].
        spread: what that of the source does of some tokens of every prompt, each [tokens, hidden].
        sample: pairs of logits, source and target.
        head: name of the target's output head.
        answers: what source and target answer to a question that was asked as well.
    """

    distances: dict[str, Distance] = field(default_factory=dict)
    by_layer: list[tuple[str, float]] = field(default_factory=list)
    source_modules: list[str] = field(default_factory=list)
    worst: int = 0
    ends: tuple[Tensor, Tensor] | None = None
    spread: list[Tensor] = field(default_factory=list)
    sample: list[list[float]] = field(default_factory=list)
    head: str = ""
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
    before = _asked(source.stages(calls), asked, by_target=False)
    after = _asked(target.stages(calls, probed if probe else None), asked, by_target=True)
    if probe:
        before, after = probe.attach(before, after, probed, len(target.names) - 2)
    found = Compared(head=target.names[-1])
    count = len(target.names) - 2
    if layers is None or len(layers) != count:
        layers = range(count) if len(source.names) == len(target.names) else None
    stages = stage_pairs(_let_go(before), after, layers)
    ends = _walk(stages, padding, found, advance, copied)
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
    arrangement: Arrangement | None = None
    for one, other, comparable in stages:
        if one is not None and other is not None and comparable:
            if other.layer is None:
                arrangement = _arrangement(one.after[0], other.after[0], copied)
            if arrangement:
                errors = [
                    arrangement(state[skip:], expected[skip:])
                    for expected, state, skip in zip(one.after, other.after, padding, strict=False)
                ]
                # torch's maximum keeps a NaN.
                found.by_layer.append((other.name, float(torch.tensor(errors).max())))
                found.source_modules.append(one.name)
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


Arrangement = Callable[[Tensor, Tensor], float]
"""How far what a grown layer hands on, [..., hidden], is from copies of what the source's does."""


def _arrangement(expected: Tensor, found: Tensor, copied: Copied | None) -> Arrangement | None:
    """How the target's hidden states hold the source's; None if they cannot."""
    size, grown = expected.shape[-1], found.shape[-1]
    if copied and len(copied.source) == grown and not _in_blocks(copied, size):
        return lambda state, source: error_of(state[..., None, :], copied.expected(source))
    if grown % size:
        return None

    def tiled(state: Tensor, source: Tensor) -> float:  # the whole space again and again
        return error_of(state.view(*state.shape[:-1], grown // size, size), source)

    def adjacent(state: Tensor, source: Tensor) -> float:  # adjacent copies
        copies = state.view(*state.shape[:-1], size, grown // size)
        return error_of(copies.transpose(-1, -2), source)

    if copied and len(copied.source) == grown:
        return tiled
    return min((tiled, adjacent), key=lambda order: order(found, expected))


def _in_blocks(copied: Copied, size: int) -> bool:
    """Whether the target repeats the whole space."""
    return bool((copied.source == torch.arange(len(copied.source)) % size).all())


def error_of(copies: Tensor, state: Tensor) -> float:
    """Largest difference of any copy, relative to the scale of the state."""
    scale = state.square().mean().sqrt().clamp_min(torch.finfo(state.dtype).tiny)
    return float((copies - state[..., None, :]).abs_().max() / scale)


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
