"""Experiments as data: what is compared, with which seeds, rates and budgets.

An arm of a file may have several ``sources`` in place of one: ``ARM, SOURCE`` of each is one arm.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "experiments"
SCALES = Path(__file__).parent / "scales.yaml"


@dataclass(frozen=True)
class Scale:
    """How large everything is.

    Attributes:
        vocabulary: tokens of the tokenizer.
        context: tokens of a window.
        batch: windows of a step.
        source_tokens: with which a source is trained.
        extra: what an arm may compute on top, in multiples of what its source took.
        warmup: steps.
        looks: how often the validation loss is taken on the way of an arm.
        look_windows: held-out windows of a look.
        windows: held-out windows where a rate has decayed.
        models: settings of the sources' configs, by name.
        decay: the share of steps in which a rate decays.
        betas: of AdamW.
        weight_decay: of matrices.
        eps: of AdamW.
        dtype: what is computed in; weights and moments are float32.
        text_bytes: of the text; None for all.
        packages: installed packages whose sources are read with the standard library.
        endings: of their files.
        learning_rates: instead of the experiment's; None for those.
        seeds: likewise.
        arms: those of the experiment that are run, without their sources; None for all.
        sources: likewise; arms of other sources are not run.
    """

    vocabulary: int
    context: int
    batch: int
    source_tokens: int
    extra: float
    warmup: int
    looks: int
    look_windows: int
    windows: int
    models: Mapping[str, Mapping[str, Any]]
    decay: float = 0.2
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    eps: float = 1e-8
    dtype: str = "float32"
    text_bytes: int | None = None
    packages: tuple[str, ...] = ()
    endings: tuple[str, ...] = (".py",)
    learning_rates: tuple[float, ...] | None = None
    seeds: tuple[int, ...] | None = None
    arms: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Arm:
    """One way to spend the extra compute.

    Attributes:
        name: what it is called.
        source: the source that it begins with, or whose compute sets its budget.
        steps: of a recipe (``grow: …``, ``convert: …``), applied to the source.
        weights: ``source``, or ``new`` for weights drawn anew, in the shape that the steps make.
        model: settings that replace those of the source's config; for new weights.
        equal: ``parameters`` fits the MLP, so that there are as many as in the source's shape.
        optimizer: ``law`` (the source's state, grown, and a rate for every tensor), ``new`` (no
            state, the law's rates) or ``plain`` (no state, one rate).
        warm: whether the rate is warmed up (again).
        ramp: the share of the extra compute in which the gates of DINT are ramped; 0 for none.
        points: budgets at which the rate has decayed, in shares of the extra compute; ``total``
            stands for the extra and the source's.
    """

    name: str
    source: str
    steps: tuple[Mapping[str, Any], ...] = ()
    weights: str = "source"
    model: Mapping[str, Any] = field(default_factory=dict)
    equal: str | None = None
    optimizer: str = "law"
    warm: bool = False
    ramp: float = 0.0
    points: tuple[float | str, ...] = ()

    def __post_init__(self) -> None:
        for key, known in (
            ("weights", ("source", "new")),
            ("optimizer", ("law", "new", "plain")),
            ("equal", (None, "parameters")),
        ):
            if getattr(self, key) not in known:
                raise SystemExit(f"{self.name}: {key} must be one of {known}")
        if self.model and self.weights != "new":
            raise SystemExit(f"{self.name}: a model of its own has new weights; set weights: new")


@dataclass(frozen=True)
class Source:
    """A small model that is trained first.

    Attributes:
        name: what it is called.
        model: which of the scale's models it is.
        trained: whether arms begin with its weights.
        times: tokens with which it is trained, in multiples of the scale's.
    """

    name: str
    model: str
    trained: bool = True
    times: float = 1.0


@dataclass(frozen=True)
class Experiment:
    """What is compared.

    Attributes:
        name: of its file.
        question: what it asks.
        scale_name: of the scale.
        scale: how large everything is.
        seeds: of weights, splits and the order of the text.
        learning_rates: in ascending order. An arm is tried with the middle one, then with the
            neighbours of the best one, until both are worse.
        sources: by name.
        arms: by name.
        baseline: the arm that others are held against.
        measures: what else is measured where a rate has decayed.
        charts: arms by the title of a chart.
        claims: what others say: which arm is ``better`` ``than`` which ``at`` which point (and
            ``against`` which, if that is another), and where that is said; ``of`` names a measure
            instead of the test loss, of which less is better without ``more``.
        goals: arms whose last losses the others are to reach; the baseline's without any.
        tuned_with: how many of the seeds choose the rate.
    """

    name: str
    question: str
    scale_name: str
    scale: Scale
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    sources: Mapping[str, Source]
    arms: Mapping[str, Arm]
    baseline: str
    measures: tuple[str, ...] = ()
    charts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    claims: tuple[Mapping[str, Any], ...] = ()
    goals: tuple[str, ...] = ()
    tuned_with: int = 1

    def source_tokens(self, name: str) -> int:
        """Tokens with which a source is trained."""
        return round(self.sources[name].times * self.scale.source_tokens)


def names() -> list[str]:
    """All experiments."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def load(name: str, scale_name: str, folder: Path = FOLDER, scales: Path = SCALES) -> Experiment:
    """An experiment at a scale.

    Args:
        name: of its file.
        scale_name: of one of the scales.
        folder: where experiments lie.
        scales: file with the scales.
    """
    known = yaml.safe_load(scales.read_text("utf-8"))
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise SystemExit(f"there is no experiment {name!r}; choose {', '.join(names())}")
    if scale_name not in known:
        raise SystemExit(f"there is no scale {scale_name!r}; choose {', '.join(known)}")
    scale = Scale(**_tuples(known[scale_name]))
    data = yaml.safe_load(file.read_text("utf-8"))
    defaults = data.pop("defaults", {})
    for key in ("arms", "sources"):
        if unknown := {*(getattr(scale, key) or ())} - {*data[key]}:
            listed = ", ".join(sorted(unknown))
            raise SystemExit(f"{scales.name} has {key} {listed}, which {name} lacks")
    sources = {
        key: Source(key, **each)
        for key, each in data.pop("sources").items()
        if scale.sources is None or key in scale.sources
    }
    first = next(iter(sources))
    arms = {
        each["name"]: Arm(**_tuples({"source": first, **defaults, **each}))
        for key, given in data.pop("arms").items()
        if scale.arms is None or key in scale.arms
        for each in _on_every_source(key, given or {})
        if each.get("source", first) in sources
    }
    charts = {key: tuple(each) for key, each in data.pop("charts", {}).items()}
    named = {data["baseline"], *(arm for each in charts.values() for arm in each)}
    named |= {claim[key] for claim in data.get("claims", ()) for key in ("better", "than")}
    named |= {*data.get("goals", ())}
    if unknown := named - {*arms}:
        raise SystemExit(f"{file.name} speaks of {', '.join(sorted(unknown))}, which is no arm")
    made = {"scale_name": scale_name, "scale": scale, "sources": sources, "arms": arms}
    data = _tuples(data) | made | {"name": name, "charts": charts}
    for key in ("learning_rates", "seeds"):
        data[key] = getattr(scale, key) or data[key]
    return Experiment(**data)


def _on_every_source(name: str, arm: dict[str, Any]) -> list[dict[str, Any]]:
    """An arm of a file, once for each of its sources."""
    several = arm.pop("sources", None)
    if several is None:
        return [{"name": name, **arm}]
    return [{"name": f"{name}, {source}", "source": source, **arm} for source in several]


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(each) if isinstance(each, list) else each for key, each in values.items()}


def settings_of(experiment: Experiment, name: str, text: str) -> str:
    """A hash of all that the numbers of a source or an arm follow from, but for seed and rate.

    Args:
        experiment: with it.
        name: of the source or arm.
        text: hash of the text.
    """
    arm = experiment.arms.get(name)
    source = experiment.sources[arm.source if arm else name]
    scale = _set(experiment.scale)
    for key in ("learning_rates", "seeds", "arms", "sources"):  # more of them change no run
        scale.pop(key, None)
    scale["models"] = scale["models"][source.model]
    parts = [text, scale, _set(source), _set(arm) if arm else None, experiment.measures]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]


def _set(data: Any) -> dict[str, Any]:
    """What differs from the defaults: a new setting changes no hash."""
    found = {key.name: getattr(data, key.name) for key in fields(data)}
    empty = {key.name: {} for key in fields(data) if key.default_factory is dict}
    defaults = {key.name: key.default for key in fields(data)} | empty
    return {key: value for key, value in found.items() if value != defaults[key]}


@dataclass(frozen=True)
class Job:
    """Which run.

    Attributes:
        experiment: with the arm.
        name: of the arm or the source.
        seed: of new weights, random splits and the order of the text.
        rate: its learning rate.
    """

    experiment: Experiment
    name: str
    seed: int
    rate: float

    @property
    def arm(self) -> Arm | None:
        """None for a source."""
        return self.experiment.arms.get(self.name)
