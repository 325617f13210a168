"""Source and target, run side by side, one layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkit.base.limits import rounded_sum
from growkit.base.tensors import total_bytes
from growkit.engine import metrics
from growkit.engine.calls import Call, CallError, batches
from growkit.engine.device import CPU, Product, has
from growkit.engine.layerwise import Layerwise, Stage
from growkit.engine.lending import Copies, copies_on
from growkit.engine.metrics import Distance, Head, error_of
from growkit.engine.strict import strict_float64
from growkit.model.model import Model
from growkit.proof.control import Controls, Coverage
from growkit.proof.fingerprint import Question, question, widest
from growkit.proof.localisation import copied_states, copies_of
from growkit.proof.modes import LONG, PREFILL, Mode, NotAskedError
from growkit.proof.pair import Pair

NUMBERS = frozenset({"layer_idx", "layer_id", "layer_number", "training"})
"""Attributes for the number of a layer, or for its use."""

SPREAD = 128
"""Limit for the tokens of a prompt on which rounding in the storage dtype is measured."""

SAMPLE = 500
"""Number of pairs of logits that are kept for the chart."""

Models = tuple[Layerwise, Layerwise]
"""Source and target."""

StagePair = tuple[Stage | None, Stage | None, bool]
"""A stage of the source and one of the target, and whether their outputs should correspond."""

Ends = tuple[list[Tensor], list[Tensor]]
"""Outputs of the last layers of source and target for every call, each [tokens, hidden]."""


class Setting(NamedTuple):
    """A plain attribute of a module in a layer.

    Attributes:
        path: path of the attribute in the layer.
        classes: the classes of its module and of those around it.
    """

    path: str
    classes: str


@dataclass
class Comparison:
    """Results of running source and target on all modes.

    Attributes:
        dtype: torch name of the dtype.
        distances: distance of the logits, by mode.
        by_layer: name of the embedding and of every layer, with the largest error of its output
            relative to its scale; up to the last layer that can be compared.
        end: output of the target's last layer for the first prompt, [tokens, hidden].
        spread: outputs of the last layers for some tokens of every prompt.
        kernels: by the mode of every attention kernel, the spread of its first call, and whether
            the last layers of both models gave the same bits in all calls.
        sample: pairs of logits, source and target.
        answers: answers to the question of the fingerprint, of the source, and of a target that
            need not be the same function.
    """

    dtype: str
    distances: dict[str, Distance] = field(default_factory=dict)
    by_layer: list[tuple[str, float]] = field(default_factory=list)
    end: Tensor | None = None
    spread: Ends = ([], [])
    kernels: dict[str, tuple[Tensor, bool]] = field(default_factory=dict)
    sample: list[list[float]] = field(default_factory=list)
    answers: tuple[Tensor, ...] = ()

    @property
    def prefill(self) -> Distance:
        """Distance of the logits of all prompts."""
        return self.distances[PREFILL]

    @property
    def largest(self) -> float:
        """The largest relative difference in any mode; a NaN is the largest.

        Modes in which the source computes no finite logits are left out.
        """
        errors = [mode.relative for mode in self.distances.values() if mode.usable]
        return max(errors, key=lambda error: (not math.isfinite(error), error), default=math.nan)


@dataclass(frozen=True)
class SideBySide:
    """Both models, ready to run.

    Attributes:
        pair: source and target.
        place: device of strict float64.
        question: the question of the fingerprint.
        copies: where the pair's device keeps the tensors of both.
    """

    pair: Pair
    place: torch.device
    question: Question
    copies: Sequence[Copies | None]

    @classmethod
    def of(cls, pair: Pair) -> SideBySide:
        """Both models of a pair, in strict float64 on its device if that has float64."""
        place = pair.device if has(pair.device, torch.float64) else CPU
        asked = question(pair.before, max(map(len, pair.prompts.windows)))
        return cls(pair, place, asked, copies_on(pair.device, (pair.before, pair.after)))

    @cached_property
    def models(self) -> Models:
        """Both models in strict float64."""
        with strict_float64():
            return self.open(torch.float64, self.place)

    def open(
        self,
        dtype: torch.dtype,
        device: torch.device,
        weights: Sequence[Model] = (),
        depths: Sequence[int] = (),
    ) -> Models:
        """Open both models, or two with the same vocabularies in their place."""
        before, after = weights or (self.pair.before, self.pair.after)
        tokens = self.pair.before.config["vocab_size"] if self.pair.more_tokens else None
        source_depth, target_depth = depths or (None, None)
        copies = self.copies if device == self.pair.device and not weights else (None, None)
        return (
            Layerwise(before, dtype, device, None, copies[0], source_depth),
            Layerwise(after, dtype, device, tokens, copies[1], target_depth),
        )

    @cached_property
    def layers(self) -> Sequence[int | None] | None:
        """The source's layer of every layer of the target; None for one that returns its input.

        It is None as a whole if the layers cannot be compared.
        """
        source, target = (model.layers for model in self.models)
        lineage = self.pair.lineage
        if lineage.layers is None and (lineage.plans or len(source) == len(target)):
            return range(len(target))
        layers = [layer.computes for layer in lineage.layers or ()]
        return layers if len(layers) == len(target) else None  # a manifest may describe another one

    def controls(self, call: Call, only: str = "") -> Controls:
        """The controls of a comparison; see ``Controls``."""
        noise = rounded_sum(widest(self.pair.before))
        return Controls(call, noise, not self.pair.exact, only)

    def compare_prompt(
        self,
        ids: Tensor,
        device: torch.device,
        weights: Sequence[Model] = (),
        only: str = "",
        depths: Sequence[int] = (),
    ) -> tuple[Comparison, Controls]:
        """Compare in strict float64 on one prompt, with the noise and the negative control.

        Args:
            ids: the prompt, [tokens].
            device: device of both models.
            weights: of other models than source and target, with the same vocabularies.
            only: see ``Controls``.
            depths: number of layers of both models; empty for all.
        """
        controls = self.controls(Call(ids), only)
        with strict_float64():
            models = self.open(torch.float64, device, weights, depths)
            modes = [Mode(PREFILL, (controls.call,))]
            return self.compare(models, modes, "float64", controls, place=device), controls

    def compare(
        self,
        models: Models,
        modes: Sequence[Mode],
        dtype: str,
        controls: Controls | None = None,
        coverage: Coverage | None = None,
        place: torch.device | None = None,
    ) -> Comparison:
        """Run both models in all modes, the prefill first.

        Args:
            models: source and target.
            modes: the modes.
            dtype: torch name of their dtype.
            controls: receives what the controls measure.
            coverage: receives on which tensors the logits depend.
            place: device on which logits are compared; None for that of strict float64.

        Raises:
            NotAskedError: a model does not support a mode other than the prefill.
            InputError: a class cannot run with its config.
        """
        place = place or self.place
        mode_of = [mode for mode in modes for _ in mode.calls]
        calls = [call for mode in modes for call in mode.calls]
        ids = [call.ids[mode.padding :] for call, mode in zip(calls, mode_of, strict=True)]
        controlled = 0
        if controls and len(controls.call.ids) < len(calls[0].ids):
            controlled = len(calls)
            calls.append(controls.call)
        # An exact target is compared with the source, which alone needs to identify the model.
        asked = models[:1] if self.pair.exact else models
        before, after = (
            model.stages([*calls, self.question.call] if model in asked else calls)
            for model in models
        )
        if controls:
            before = controls.add_rounding_noise(before)
            first = 0 if controls.only else len(models[1].layers) // 2
            after = controls.inject_fault(after, first, controlled)
        if coverage:
            after = coverage.disturb(after, _watched(calls, mode_of), self.layers)
        before = stages_of(before, mode_of, by_target=False)
        after = stages_of(after, mode_of, by_target=True)
        result = Comparison(dtype)
        ends = self._walk(_pairs(before, after, self.layers), mode_of, result)
        result.end = ends[1][0]
        prompts = slice(len(modes[0].calls))
        of_source, of_target = (
            [state[_spread(state)] for state in states[prompts]] for states in ends
        )
        result.spread = of_source, of_target
        _compare_kernels(modes, mode_of, ends, result)
        with models[0].head() as source_head, models[1].head() as target_head:
            heads = computed_on(place, source_head), computed_on(place, target_head)
            _compare_logits(ids, mode_of, heads, ends, result)
            if controls:
                states = ends[0][controlled], ends[1][controlled]
                controls.measure(heads, states, (calls[0], ends[0][0]))
            last = list(zip(heads, ends, strict=True))[: len(asked)]
            result.answers = tuple(self.question.of(head(states[-1])) for head, states in last)
        return result

    def _walk(self, stages: Iterator[StagePair], modes: Sequence[Mode], result: Comparison) -> Ends:
        """Compare the outputs of all layers, and return those of the last ones."""
        ends: Ends = ([], [])
        copied: Tensor | None = None
        for source, target, comparable in stages:
            if source is not None and target is not None and comparable:
                if target.layer is None:
                    copied = copied_states(source.after[0], target.after[0])
                if copied is not None:
                    triples = zip(source.after, target.after, modes, strict=False)
                    errors = [
                        error_of(state[mode.padding :], copies_of(expected[mode.padding :], copied))
                        for expected, state, mode in triples
                    ]
                    # torch's maximum keeps a NaN.
                    result.by_layer.append((target.name, float(torch.tensor(errors).max())))
            ends = (source.after if source else ends[0], target.after if target else ends[1])
            if target:
                target.loaded.close()  # the source's next layer needs the room
            self._advance()
        return ends

    @cached_property
    def _advance(self) -> Callable[[], None]:
        """Advances the bar, by pairs of layers and the embeddings."""
        total = sum(total_bytes(model.tensors) for model in (self.pair.before, self.pair.after))
        layers = max(len(model.layers) for model in self.models)
        return partial(self.pair.advance, total // (layers + 1))

    def products(self, modes: Sequence[Mode]) -> set[Product]:
        """Shapes of products with the matrices of both models, with many rows and with few."""
        calls = [call for mode in modes for call in mode.calls]
        rows = [len(call.ids) for call in calls]
        rows += [len(batch) * len(batch[0].ids) for _, batch in batches(calls)]
        infos = [*self.pair.before.tensors.values(), *self.pair.after.tensors.values()]
        shapes = {info.shape[-2:] for info in infos if len(info.shape) > 1}
        return {(n, terms, out) for n in (min(rows), max(rows)) for out, terms in shapes}

    def changed_layer_settings(self) -> list[str]:
        """Find the first setting of a layer that changed differently than in other layers.

        A setting, such as a size, may change if it changes in the same way wherever modules of the
        same classes contain it; layers of another kind have other sizes.
        """
        if not self.pair.exact or self.layers is None:
            return []
        before, after = map(_layer_settings, self.models)
        became: dict[tuple[Setting, Any], Any] = {}
        for (name, settings), number in zip(after, self.layers, strict=False):
            old_settings = before[number][1] if number is not None and number < len(before) else {}
            for key in sorted(old_settings.keys() & settings.keys()):
                if became.setdefault((key, old_settings[key]), settings[key]) != settings[key]:
                    return [f"{name}.{key.path}"]
        return []

    def depths_of_all_kinds(self) -> Sequence[int]:
        """How many layers of both models hold two of every kind; empty if that is all.

        A device computes layers of a kind with the same kernels, so that a CPU need not repeat
        all of them.
        """
        if self.layers is None:
            return ()
        kinds = [tuple(settings.items()) for _, settings in _layer_settings(self.models[0])]
        last = {kind: [i for i, other in enumerate(kinds) if other == kind][:2] for kind in kinds}
        depth = max(place for places in last.values() for place in places) + 1
        numbers = [-1 if number is None else number for number in self.layers]
        target = next((i for i, number in enumerate(numbers) if number >= depth), len(numbers))
        return (depth, target) if depth < len(kinds) and target < len(numbers) else ()


def computed_on(place: torch.device, head: Head) -> Head:
    """Move logits to a device that has float64, for comparisons."""
    return lambda hidden: head(hidden).to(place)


def _pairs(
    before: Iterator[Stage], after: Iterator[Stage], layers: Sequence[int | None] | None
) -> Iterator[StagePair]:
    """Pair the stages of both models.

    Args:
        before: stages of the source.
        after: stages of the target.
        layers: for each layer of the target, the source layer that it computes, or None if it
            returns its input; None if this is not known.
    """
    source: Stage | None = next(before)
    yield source, next(after), True
    done, same = 0, layers is not None  # ``done`` counts the source's layers
    for layer in layers or ():
        same = same and (layer is None or layer >= done)
        until = layer + 1 if same and layer is not None else done + (not same)
        while done < until:  # layers that the target lacks returned their input
            source, done = next(before, None), done + 1
        yield source, next(after, None), same
    for left, other in zip_longest(before, after):
        yield left, other, False


def stages_of(
    stages: Iterator[Stage], mode_of: Sequence[Mode], *, by_target: bool
) -> Iterator[Stage]:
    """Run the stages of a model; an error names the mode that it does not support."""
    try:
        for stage in stages:
            if not by_target:
                stage.loaded.close()  # the target's weights need the room
            yield stage
    except CallError as error:
        name = mode_of[error.call].name if error.call < len(mode_of) else PREFILL
        if name == PREFILL:
            raise
        raise NotAskedError(error.why, name, by_target=by_target) from error


def _watched(calls: Sequence[Call], mode_of: Sequence[Mode]) -> int:
    """The call that shows whether tensors have an effect: of long texts, or else the shortest."""
    names = [mode.name for mode in mode_of]
    uncached = [at for at, call in enumerate(calls) if not call.cached]
    unpadded = [at for at in uncached if at >= len(mode_of) or not mode_of[at].padding]
    shortest = min(unpadded, key=lambda at: len(calls[at].ids))
    return names.index(LONG) if LONG in names else shortest


def _compare_kernels(
    modes: Sequence[Mode], mode_of: Sequence[Mode], ends: Ends, result: Comparison
) -> None:
    """Note the states of every attention kernel, and whether all of its runs gave the same."""
    for mode in modes:
        if mode.kernel:
            runs = [index for index, of in enumerate(mode_of) if of is mode]
            first = ends[0][runs[0]]
            same = all(states[runs[0]].equal(states[run]) for states in ends for run in runs)
            result.kernels[mode.name] = first[_spread(first)], same


def _compare_logits(
    ids: Sequence[Tensor],
    mode_of: Sequence[Mode],
    heads: tuple[Head, Head],
    ends: Ends,
    result: Comparison,
) -> None:
    """Add the logits of all calls, without their padding, to the distances of their modes."""
    result.distances |= {mode.name: Distance() for mode in mode_of}
    unpadded = [
        [state[mode.padding :] for state, mode in zip(states, mode_of, strict=False)]
        for states in ends
    ]
    pieces = metrics.logits_in_pieces((heads[0], unpadded[0]), (heads[1], unpadded[1]), ids)
    for index, logits, others, following, position in pieces:
        result.distances[mode_of[index].name].add(logits, others, following, position)
        if index == 0:
            result.sample += _sample(logits, others, SAMPLE * len(logits) // len(ids[0]))


def _spread(state: Tensor) -> Tensor:
    """Indices of ``SPREAD`` evenly spread tokens, or of all tokens if there are fewer."""
    places = torch.linspace(0, len(state) - 1, min(len(state), SPREAD), dtype=torch.float64)
    return places.round().long().to(state.device)


def _sample(logits: Tensor, others: Tensor, count: int) -> list[list[float]]:
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(logits.numel(), (max(count, 1),), generator=generator)
    pairs = torch.stack([logits.flatten().cpu()[picked], others.flatten().cpu()[picked]], -1)
    digits = 17 if pairs.dtype == torch.float64 else 9  # all, since the chart has differences
    rounded = [[float(f"{value:.{digits}g}") for value in pair] for pair in pairs.tolist()]
    return [pair for pair in rounded if all(map(math.isfinite, pair))]


def _layer_settings(model: Layerwise) -> list[tuple[str, dict[Setting, Any]]]:
    """Name of every layer, with every plain attribute of its modules."""
    layers = []
    for name, layer in model.layers:
        classes: dict[str, str] = {}
        for path, module in layer.named_modules():
            around = classes.get(path.rpartition(".")[0], "")
            classes[path] = f"{around}/{type(module).__name__}"
        settings = {
            Setting(f"{path}.{key}".lstrip("."), classes[path]): value
            for path, module in layer.named_modules()
            for key, value in vars(module).items()
            if key not in NUMBERS and isinstance(value, bool | int | float | str | None)
        }
        layers.append((name, settings))
    return layers
