"""Describe a family that growkit does not know, from its class in transformers.

The shapes of a checkpoint suggest axes, but 4096 may be one of many sizes. So the class is
examined: small configs show which shapes change with which key (``classes``), and a run of a small
model shows how it uses its tensors (``running``). The candidates that remain (``proposing``) are
tried: the small model is grown as described and must compute the same in strict float64. Sizes for
which no description does are declared fixed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import yaml

from growkit.base.errors import InputError, foreign, reason, system_error
from growkit.base.lazy import usual_torch
from growkit.base.tensors import Config
from growkit.engine.calls import Call
from growkit.engine.device import CPU
from growkit.engine.layerwise import Layerwise, last_state
from growkit.engine.metrics import error_of
from growkit.engine.recipe_planning import change
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import load_model, quiet
from growkit.engine.user_family import described_family
from growkit.extras.family_inference.classes import ModelClass
from growkit.extras.family_inference.faults import layer_at_fault
from growkit.extras.family_inference.proposing import Proposal, choices, number
from growkit.extras.family_inference.results.inference_result import Inference, Trial
from growkit.extras.family_inference.tracing import see
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.scratch import report_faults, temporary
from growkit.model.families.family import described
from growkit.model.families.family_parts import MAX_LAYERS
from growkit.model.families.family_yaml import each_entry
from growkit.model.model import Model, unused_tensors
from growkit.planning.plan import Planned
from growkit.planning.recipe import DEFAULT_METHOD, GrowStep
from growkit.results import versions
from growkit.sources import find, language_model_inside

GROWTHS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "hidden": tuple(
        {"hidden": factor, **others, **head}
        for head in ({}, {"untie": True})
        for factor in ("x2", "x4")
        for others in ({"ffn": "x1", "heads": "x1", "kv_heads": "x1"}, {})
    ),
    "ffn": ({"ffn": "x2"}, {"hidden": "x2"}),
    "heads": ({"heads": "x2"}, {"hidden": "x2"}),
    "kv_heads": ({"heads": "x2", "kv_heads": "x2"}, {"hidden": "x2"}),
    "experts": ({"method": "experts", "experts": "x2"},),
    "layers": ({"method": "depth", "layers": "x2"},),
}
"""Growths to try for each axis, until one is possible."""

OTHER_DEPTHS = ("x1.5", "x3")
"""Further numbers of layers to try."""

DOES_NOT_RUN = "the grown model does not run"
"""The start of the reason if a growth can be planned, but the class cannot run the result."""

HANDS_ON = "a new layer hands on other values than it receives"
"""The reason if a growth in depth would change what later layers receive beside hidden states."""

MAX_KEPT = 16
"""Maximum number of inferred families that are kept for further commands."""

MAX_TRIED = 10
"""Maximum number of descriptions to try for an axis."""


@report_faults()
@usual_torch()
def infer(folder: str | Path) -> Inference:
    """Describe the family of a model from its class in transformers.

    Args:
        folder: folder of the model, or its name on the Hub; only headers are read.

    Raises:
        InputError: transformers has no such class, parts of it cannot be described, or tensors are
            not those of the class.
    """
    outer = find(folder).open_whole()
    checkpoint = language_model_inside(outer) or outer
    layers = checkpoint.config.get("num_hidden_layers")
    if isinstance(layers, int) and len(checkpoint.tensors) < layers <= MAX_LAYERS:
        raise InputError(
            f"config.json in {checkpoint.where()} promises {layers:,} layers, but there are only "
            f"{len(checkpoint.tensors)} tensors; correct it, or add what is missing"
        )
    inferred = inferred_family(checkpoint.config, str(checkpoint.folder / "config.json"))
    unused_tensors(checkpoint, described(inferred.description, "the inferred family"))
    result = Inference(
        model_class=inferred.asked.name,
        family=deepcopy(inferred.description),
        trials=inferred.trials,
        tried=inferred.tried,
        sure=any(trial.exact for trial in inferred.trials) and "fixed" not in inferred.description,
        yaml="",
    )
    result["yaml"] = "".join(
        f"{line}\n" for line in (*_head(result), *_body(result, inferred.ways))
    )
    return result


def inferred_family(config: Config, where: str) -> InferredFamily:
    """Infer the family of a config, once for several commands; see ``InferredFamily``."""
    from transformers import CONFIG_MAPPING

    text = json.dumps(config)
    key = text, CONFIG_MAPPING.get(str(config.get("model_type")))
    if key not in inferred_families:
        if len(inferred_families) >= MAX_KEPT:
            del inferred_families[next(iter(inferred_families))]
        inferred_families[key] = InferredFamily(json.loads(text), where)
    return inferred_families[key]


inferred_families: dict[tuple[str, Any], InferredFamily] = {}
"""By config as JSON and its class, which a user's code may change; equal configs of several folders
have one family.
"""


class InferredFamily:
    """A description of a class, in which every axis was tried.

    Attributes:
        asked: the class.
        ways: the patterns that were possible, by tensor.
        description: the description.
        trials: the trial of every axis, and the number of descriptions that were tried.
    """

    def __init__(self, config: Config, where: str) -> None:
        self.asked = ModelClass(config, where)
        seen = see(self.asked)
        self.proposal = Proposal(self.asked, seen)
        self.ways = self.proposal.ways()
        self._chosen = {name: patterns[0] for name, patterns in self.ways.items()}
        self._more: dict[str, Any] = {}
        self.tried = 0
        self.trials: list[Trial] = []
        with temporary("inference") as scratch:
            small = SmallModel.saved(self.asked, scratch)
            for axis in GROWTHS:
                self._try(axis, small)
        self.description = self._describe(config)
        fixed = {
            axis: f"cannot grow: when it was tried, {failed}"
            for trial in self.trials
            if (failed := _failed(trial))
            for axis in _grown_with(self.description, trial["axis"])
        }
        fixed |= {
            axis: why for axis, why in self.asked.rounded.items() if axis in _axes(self.description)
        }
        if seen.renumbered:
            fixed["layers"] = (
                f"cannot grow: files give {seen.renumbered} another number than its layer has in "
                "the class"
            )
        for key in self.asked.cache_keys:
            if (count := self.asked.value(key)) != self.asked.layers:
                fixed["layers"] = (
                    f"cannot grow: its class makes caches for as many as {key} says, {count}, "
                    f"rather than {self.asked.layers_key}, {self.asked.layers}; make both equal"
                )
        if "experts" in _axes(self.description) and "experts" not in self.description:
            fixed.setdefault("experts", "cannot grow: how its class chooses them was not found")
        if fixed:
            self.description["fixed"] = fixed

    def _describe(self, config: Config) -> dict[str, Any]:
        """Describe the model; a dimension that does not fit the description becomes a constant."""
        description = self.proposal.description(self._chosen, self._more)
        family, wrong = described(description, "the inferred family"), dict[str, set[int]]()
        patterns, sizes = family.patterns(config), family.sizes(config)
        for name in patterns.keys() & self.asked.shapes_here.keys():
            here = self.asked.shapes_here[name]
            for dimension, size in zip(patterns[name].dimensions, here, strict=True):
                if dimension.size(sizes) != size:
                    wrong.setdefault(str(dimension), set()).add(size)
        constants = {
            said: number(min(wrong_sizes))
            for said, wrong_sizes in wrong.items()
            if len(wrong_sizes) == 1
        }
        for said, constant in constants.items():
            words = re.compile(rf"(?<![\w.]){re.escape(said)}(?![\w.])")
            self._chosen = {name: words.sub(constant, p) for name, p in self._chosen.items()}
        return self.proposal.description(self._chosen, self._more) if constants else description

    def _try(self, axis: str, small: SmallModel) -> None:
        """Try descriptions until one is right for an axis, and keep the best."""
        best: Trial | None = None
        last: Trial | None = None
        of_best: dict[str, Any] = {}
        options = _descriptions(self.proposal, self.ways, self._chosen, axis, self._more)
        for chosen, more in islice(options, MAX_TRIED):
            description = self.proposal.description(chosen, more)
            if axis not in _axes(description):
                return
            trial = try_growth(small, axis, description)
            self.tried += 1
            if trial["error"] is None and last is not None and trial["why"] == last["why"]:
                break  # no description makes it possible
            last = trial
            if best is None or _badness(trial) < _badness(best):
                best, of_best = trial, description
            if trial.exact:
                self._chosen, self._more = chosen, more
                break
        if best is not None:
            if axis == "layers" and best.wrong:
                with suppress(InputError):
                    deeper = _grown(small.source, "depth", best["options"], of_best)
                    key = self.asked.layers_key
                    best["why"] = layer_at_fault(small.source, deeper, small.ids, key)
            self.trials.append(best)


def _descriptions(
    proposal: Proposal,
    ways: Mapping[str, list[str]],
    chosen: Mapping[str, str],
    axis: str,
    more: Mapping[str, Any],
) -> Iterator[tuple[dict[str, str], dict[str, Any]]]:
    """The current choice, then the alternatives for an axis."""
    if axis == "experts":
        for experts in proposal.experts(chosen):
            yield dict(chosen), {**more, "experts": experts}
        return
    yield dict(chosen), dict(more)
    if axis == "layers":
        yield dict(chosen), {**more, "numbered": proposal.asked.layers_key}
        return
    others: list[dict[str, Any]] = [{}]
    if axis == "hidden":
        others += [{"places": {"heads": "slopes"}, "groups": {"heads": []}}]
        yield from ((dict(chosen), {**more, **other}) for other in others[1:])
    near = {"hidden", "heads"} if axis == "hidden" else {axis}
    for changed in choices(ways, near | {"head_dim"} if "heads" in near else near):
        yield from (({**chosen, **changed}, {**more, **other}) for other in others)


def _failed(trial: Trial) -> str | None:
    """The failure of a growth that could be planned; None if it did not fail."""
    if trial.wrong:
        return trial["why"] or f"logits differed by {trial['error']:.1g}"
    why = trial["why"] or ""
    return why if why.startswith((DOES_NOT_RUN, HANDS_ON)) else None


def _badness(trial: Trial) -> float:
    return float("inf") if trial["error"] is None else float(trial["error"])


@dataclass(frozen=True)
class SmallModel:
    """A small random model of a class, to try growths.

    Attributes:
        source: the model, in a folder.
        ids: some tokens, [prompts, tokens].
        logits: its logits of them, [prompts, tokens, vocabulary].
        errors: how far logits of grown models are apart, by a digest of the grown model: many
            descriptions make the same one.
    """

    source: Checkpoint
    ids: torch.Tensor
    logits: torch.Tensor
    errors: dict[bytes, float] = field(default_factory=dict)

    @classmethod
    def saved(cls, asked: ModelClass, folder: Path) -> SmallModel:
        """Save a small random model of a class in a folder, and run it."""
        model: Any = asked.small_model()
        with quiet():
            model.save_pretrained(folder)
        source = Checkpoint(folder)
        ids = torch.arange(48).view(4, 12) * 5 % asked.small["vocab"]
        return cls(source, ids, _logits(source, ids))

    def error_of(self, grown: Model) -> float:
        """How far the logits of a grown model are apart.

        Raises:
            InputError: it does not run.
        """
        content = sha256(json.dumps(grown.config, sort_keys=True, default=str).encode())
        for name in grown.tensors:
            content.update(name.encode() + grown.read(name).numpy().tobytes())
        if content.digest() not in self.errors:
            error = error_of(_logits(grown, self.ids), self.logits)
            self.errors[content.digest()] = error
        return self.errors[content.digest()]


def _told(why: InputError, folder: Path) -> str:
    """Why a growth is not possible, without the name of a temporary folder.

    Raises:
        InputError: the given one, if it follows from a fault of the place.
    """
    if system_error(why):
        raise why
    return re.sub(rf"( in)? {re.escape(str(folder))}\S*", "", reason(why))


def try_growth(small: SmallModel, axis: str, description: Mapping[str, Any]) -> Trial:
    """Grow a small model along an axis, by the first growth that is possible.

    Depth must be right for other sizes as well, with which new layers have other places.
    """
    failures = []
    axes = {*_axes(description), "untie"}

    def failure(options: dict[str, str], why: InputError) -> Trial:
        told = _told(why, small.source.folder)
        return Trial(axis=axis, options=options, error=None, why=told)

    def grown_error(method: str, options: Mapping[str, Any]) -> float:
        with foreign(DOES_NOT_RUN, "choose other sizes"):
            grown = _grown(small.source, method, options, description)
            if axis == "layers" and _alters(grown, small.ids[0]):
                raise InputError(HANDS_ON)
            try:
                return small.error_of(grown)
            except InputError as why:  # its tensors are not those of the class, for example
                cause = _told(why, small.source.folder).partition("; ")[0]
                raise InputError(f"{DOES_NOT_RUN} ({cause})") from None

    for growth in GROWTHS[axis]:
        method = growth.get("method", DEFAULT_METHOD)
        shown = {name: value for name, value in growth.items() if name in axes}
        try:
            errors = [grown_error(method, shown)]
        except InputError as why:
            failures.append(failure(shown, why))
            continue
        for size in OTHER_DEPTHS if axis == "layers" else ():
            try:
                errors.append(grown_error(method, {"layers": size}))
            except InputError as why:  # some numbers of layers are not possible
                other = failure({axis: size}, why)
                if _failed(other):
                    return other
        return Trial(axis=axis, options=shown, error=max(errors), why=None)
    return next((trial for trial in failures if _failed(trial)), failures[0])


def _grown(
    source: Checkpoint, method: str, options: Mapping[str, Any], description: Mapping[str, Any]
) -> Model:
    grown: Model = source.with_family(described_family(description))
    for plan in change(GrowStep(method, options), grown, 0).plans:
        grown = Planned(grown, plan)
    return grown


def _grown_with(description: Mapping[str, Any], axis: str) -> set[str]:
    """The axes of a description that grow when one axis does."""
    kinds = description.get("kinds", {})
    return {of for of in _sized(description) if kinds.get(of, of) == axis}


def _axes(description: Mapping[str, Any]) -> set[str]:
    """The axes of a description, and the axes that they grow with."""
    return _sized(description) | {*description.get("kinds", {}).values()}


def _sized(description: Mapping[str, Any]) -> set[str]:
    """The axes of which sizes are the sums."""
    return {axis for text in description["sizes"].values() for axis in text.split(" + ")}


def _logits(model: Model, ids: torch.Tensor) -> torch.Tensor:
    with strict_float64(), quiet(), torch.no_grad():
        loaded: Any = load_model(model, torch.float64, CPU, "eager")
        logits: torch.Tensor = loaded(input_ids=ids, use_cache=False).logits
    return logits


def _alters(model: Model, ids: torch.Tensor) -> bool:
    """Whether an idle layer hands on other values than it receives; see ``Forward.altering``."""
    with strict_float64(), suppress(InputError):  # the proof says which classes are no stacks
        stack = Layerwise(model, torch.float64, CPU)
        last_state(stack.stages([Call(ids)]))
        return bool(stack.altering)
    return False


# The description as YAML, with what was tried in comments.


def _head(inference: Inference) -> Iterator[str]:
    version = versions().get("transformers", "")
    yield f"# Inferred from {inference['model_class']} of transformers {version}. To be used as"
    yield "#   growkit grow SRC OUT --family THIS-FILE ..."
    yield "# What grew in a small random model of the class, and computed the same in float64:"
    yield from dict.fromkeys(f"#   {_trial_line(trial)}" for trial in inference["trials"])
    others = inference["tried"] - 1
    if others:
        yield f"# It is the best of {inference['tried']} descriptions that were tried."
    yield f"# {_verdict(inference)}"


def _trial_line(trial: Trial) -> str:
    options = ", ".join(f"{name} {value}" for name, value in trial["options"].items())
    if trial["error"] is None:
        return f"{options}: not possible ({trial['why']})"
    outcome = "the same" if trial.exact else "NOT the same"
    return f"{options}: {outcome}, within {trial['error']:.1e}"


def _verdict(inference: Inference) -> str:
    if inference["sure"]:
        return "Sure: everything that could be tried computes the same."
    if not any(trial.exact for trial in inference["trials"]):
        return "Not sure: nothing that was tried computes the same. Correct it before you use it."
    return "Sure of what may grow; what is fixed below depends on something that is not described."


def _body(inference: Inference, ways: Mapping[str, list[str]]) -> Iterator[str]:
    for key, value in inference["family"].items():
        if not isinstance(value, Mapping):
            yield f"{key}: {_inline(value)}"
            continue
        yield f"{key}:" if value else f"{key}: {{}}"
        for name, entry in value.items():
            others = _others(name, entry, ways) if key == "tensors" else ()
            why = f"  # tried; by its shape also {' or '.join(others)}" if others else ""
            yield f"  {_inline(name)}: {_inline(entry)}{why}"


def _others(name: str, entry: Any, ways: Mapping[str, list[str]]) -> list[str]:
    """The other patterns that the class allows for a tensor."""
    said = {str(form["pattern"]) for _, form in each_entry({name: entry}, "pattern")}
    known = [of for kind, of in ways.items() if kind.rpartition("#")[0] == name and said & {*of}]
    return [pattern for patterns in known for pattern in patterns if pattern not in said]


def _inline(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()
