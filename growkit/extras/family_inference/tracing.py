"""Observe how a class uses its tensors, by running a small model.

Tracing the parameters shows which dimensions products sum over, and which belong to one space
(``flow``). The behaviour of a norm is measured on the module itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log
from typing import Any

import torch
from torch import nn

from growkit.base.errors import foreign
from growkit.base.limits import within
from growkit.extras.family_inference.classes import (
    DESCRIBE,
    ModelClass,
    as_in_files,
    one_of_experts,
)
from growkit.extras.family_inference.flow import Flow, Place
from growkit.extras.family_inference.small_model import sample_logits
from growkit.model.families.config_keys import EPS


@dataclass(frozen=True)
class NormSeen:
    """The observed behaviour of a norm.

    Attributes:
        centred: whether it subtracts the mean first.
        offset: number that it adds to its weight.
        last: whether no other norm of hidden states follows.
        eps: config key of its epsilon; None if the class fixes it.
    """

    centred: bool
    offset: float
    last: bool
    eps: str | None


@dataclass
class Observation:
    """Observations of a model while it ran, by the names of tensors in its files.

    Attributes:
        reads: dimensions of tensors that products sum over, or that are looked up.
        stacks: dimensions along which matrices are stacked and used one at a time.
        spaces: for dimensions of tensors that were used, the representative of their space.
        hidden: the representative of the space of hidden states.
        norms: the behaviour of every norm, by the names of its tensors.
        bare: the behaviour of norms without a weight, each with the width of its input.
        idle: the value of tensors in a layer that returns its input, where that matters.
        powers: by tensor, the power of hidden by which the class scales its input or output.
        normed_sums: whether the output of layers comes from a norm.
        renumbered: a tensor that files give another number than that of its layer, or "".
    """

    reads: set[tuple[str, int]] = field(default_factory=set)
    stacks: set[tuple[str, int]] = field(default_factory=set)
    spaces: dict[tuple[str, int], Place] = field(default_factory=dict)
    hidden: Place | None = None
    idle: dict[str, float] = field(default_factory=dict)
    powers: dict[str, float] = field(default_factory=dict)
    norms: dict[str, NormSeen] = field(default_factory=dict)
    bare: list[tuple[NormSeen, int]] = field(default_factory=list)
    normed_sums: bool = False
    renumbered: str = ""

    def is_hidden(self, name: str, at: int) -> bool:
        """Whether a dimension is one of hidden states, as far as anything was seen of it."""
        return self.spaces.get((name, at), self.hidden) == self.hidden


def see(asked: ModelClass) -> Observation:
    """Run a small model of a class once, and observe it.

    Raises:
        InputError: it does not run.
    """
    with foreign(f"no small model of {asked.name} runs", DESCRIBE):
        model = asked.small_model()
        flow = Flow(model)
        watched = _Watch(model, flow, asked.class_prefixes)
        with watched, flow:
            sample_logits(model)
    places, powers = _places(model), _powers(asked, flow)
    norms = _norms(asked, model, watched)
    seen = Observation(normed_sums=watched.normed_sums, hidden=watched.hidden)
    bare = (
        (replace(norm, last=False), watched.widths[name])
        for name, norm in norms.items()
        if not [*model.get_submodule(name).parameters()]
    )
    seen.bare = [*dict.fromkeys(bare)]
    seen.renumbered = _renumbered(asked, places)
    for stored, (parameter, dimensions) in places.items():
        name = one_of_experts(stored)
        if (module := parameter.rpartition(".")[0]) in norms:
            seen.norms[name] = norms[module]
        if parameter in flow.gains | flow.added:
            seen.idle[name] = float(parameter in flow.gains)
        if parameter in powers:
            seen.powers[name] = powers[parameter]
        for at, dimension in enumerate(dimensions):
            if dimension is None:
                continue
            place = parameter, dimension
            if place in flow.reads:
                seen.reads.add((name, at))
            if place in flow.stacks:
                seen.stacks.add((name, at))
            if parameter in flow.used:
                seen.spaces[name, at] = flow.root(place)
    return seen


def _renumbered(asked: ModelClass, places: Mapping[str, tuple[str, Any]]) -> str:
    """A tensor whose number in files is not that of its layer in the class; empty without one."""
    for stored, (parameter, _) in places.items():
        after = (parameter.removeprefix(prefix) for prefix in asked.class_prefixes)
        layers = {number for name in after if (number := name.partition(".")[0]).isdigit()}
        if layers and (layer := asked.layer_of(stored)) is not None and str(layer) not in layers:
            return asked.template(stored)
    return ""


def _powers(asked: ModelClass, flow: Flow) -> dict[str, float]:
    """Compare the factors of parameters with those in a model that is four times as wide."""
    axis = "heads" if asked.derived else "hidden"
    changes = asked.changes(asked.small | {axis: 4 * asked.small[axis]})
    try:
        model = asked.small_model(changes)
        wider = Flow(model)
        with wider:
            sample_logits(model)
    except Exception:  # the class cannot have this width
        return {}
    powers = {}
    for name in flow.factors.keys() & wider.factors.keys():
        # Another number of experts may have received tokens, and used their matrices.
        before, after = (
            log(abs(observed.factors[name]), 4) / observed.uses[name] for observed in (flow, wider)
        )
        calls = flow.calls[name] or 1
        powers[name] = round((after - before) * flow.uses[name] / calls, 3)
    return {name: power for name, power in powers.items() if power and not power * 2 % 1}


def _places(model: nn.Module) -> dict[str, tuple[str, list[int | None]]]:
    """For each tensor in files, the parameter whose numbers it holds, and of its dimensions theirs.

    Every number of every parameter is another one, and the class saves them.
    """
    numbered, begins, count = {}, [], 0
    for name, tensor in model.state_dict().items():
        begins.append((count, name, tuple(tensor.shape)))
        numbered[name] = torch.arange(count, count + tensor.numel(), dtype=torch.float64).view(
            tensor.shape
        )
        count += tensor.numel()
    places = {}
    for name, tensor in as_in_files(model, numbered).items():
        first = int(tensor.flatten()[0]) if tensor.numel() else -1
        _, own, shape = next((b for b in reversed(begins) if b[0] <= first), (0, name, ()))
        strides = torch.empty(shape, device="meta").stride()
        dimensions: list[int | None] = []
        for at, size in enumerate(tensor.shape):
            step = 0
            if size > 1:
                step = int(tensor.select(at, 1).flatten()[0]) - first
            fitting = [d for d, stride in enumerate(strides) if 0 < stride <= abs(step)]
            dimensions.append(fitting[0] if fitting and shape[fitting[0]] > 1 else None)
        same = tensor.shape == shape
        places[name] = own, [at if same else dimension for at, dimension in enumerate(dimensions)]
    return places


class _Watch:
    """Records what norms are given, and what layers return, in one run.

    Attributes:
        widths: width of the input of every norm.
        normed_sums: whether what the last layer returns comes from a norm.
    """

    def __init__(self, model: nn.Module, flow: Flow, layers: tuple[str, ...]) -> None:
        self._model, self._flow, self._prefixes = model, flow, layers
        self._hidden: Place | None = None
        self._spaces: dict[str, Place | None] = {}
        self.widths: dict[str, int] = {}
        self.norms = [
            name
            for name, module in model.named_modules()
            if "norm" in type(module).__name__.lower() and not [*module.children()]
        ]
        self._normed: Any = None
        self.normed_sums = False
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            norm = name in self.norms
            layer = any(name.removeprefix(prefix).isdigit() for prefix in self._prefixes)
            if norm or layer:
                before = self._before_norm(name) if norm else self._before_layer
                after = self._after_norm if norm else self._after_layer
                self._hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._hooks.append(module.register_forward_hook(after, with_kwargs=True))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def hidden(self) -> Place | None:
        """The space of hidden states."""
        return self._hidden and self._flow.root(self._hidden)

    @property
    def last(self) -> str:
        """The last norm of hidden states."""
        spaces = reversed(self._spaces.items())
        of_hidden = (n for n, space in spaces if space and self._flow.root(space) == self.hidden)
        return next(of_hidden, "")

    def _before_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        for hidden in _tensors(args, kwargs)[:1]:
            self._flow.begin_stream(hidden)
            self._hidden = self._flow.space(hidden, -1)

    def _after_layer(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.normed_sums = (
            output[0] if isinstance(output, tuple | list) else output
        ) is self._normed

    def _before_norm(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            for tensor in _tensors(args, kwargs)[:1]:
                self.widths[name] = tensor.shape[-1]
                self._spaces.pop(name, None)  # the last time decides on the order
                self._spaces[name] = self._flow.space(tensor, -1)

        return hook

    def _after_norm(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._normed = output
        if any(self._flow.is_stream(tensor) for tensor in _tensors(args, kwargs)[:1]):
            self._flow.keep_normed(output)


def _tensors(args: Any, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]


def _norms(asked: ModelClass, model: nn.Module, watched: _Watch) -> dict[str, NormSeen]:
    """Measure every norm that ran and has the effect of one."""
    config = asked.config({}).to_dict()
    keys = [key for key, value in config.items() if isinstance(value, float) and key.endswith(EPS)]
    varied = {key: asked.model(asked.config({key: 0.123}), "meta") for key in keys}
    norms = {}
    for name in watched.norms:
        if name not in watched.widths:
            continue
        module = model.get_submodule(name)
        behaviour = _behaviour(module, watched.widths[name])
        if behaviour is None:
            continue
        eps = next((key for key in keys if _eps(varied[key].get_submodule(name)) == 0.123), None)
        norms[name] = NormSeen(*behaviour, name == watched.last, eps)
    return norms


def _eps(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((value for value in values if value is not None), None)


def _behaviour(module: nn.Module, width: int) -> tuple[bool, float] | None:
    """Measure whether a norm subtracts the mean, and the number that it adds to its weight.

    None if the module does not behave like a norm of one input.
    """
    generator = torch.Generator().manual_seed(1)
    weight: Any = getattr(module, "weight", None)
    has_weight = isinstance(weight, torch.Tensor)
    shape = (3, *weight.shape) if has_weight and weight.shape[-1:] == (width,) else (3, width)
    inputs = 3 * torch.randn(shape, generator=generator)
    try:
        with torch.no_grad():
            as_it_is, shifted = module(inputs), module(inputs + 2.0)
            centred = bool((as_it_is - shifted).abs().max() < 1e-3)
            mean = inputs.mean(-1, keepdim=True) if centred else 0.0
            plain = (inputs - mean) / (inputs - mean).square().mean(-1, keepdim=True).sqrt()
            if not has_weight:
                offset, left = 0.0, as_it_is - plain
            else:
                kept = [numbers.clone() for numbers in module.parameters()]
                for parameter in module.parameters():
                    parameter.zero_()
                offset = round(float((module(inputs) / plain).mean()), 3)
                left = module(inputs) - offset * plain
                for parameter, was in zip(module.parameters(), kept, strict=True):
                    parameter.copy_(was)
    except Exception:  # it takes more than one input, or another shape
        return None
    if not within(float(left.abs().max()), 1e-3):
        return None
    return centred, offset
