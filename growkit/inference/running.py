"""Observe how a class uses its tensors, in a small model while it runs.

The type of a module determines the dimension that it reads. Its input shows whether it reads hidden
states. The effect of a norm is measured on the norm itself.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from growkit.base.errors import foreign
from growkit.base.limits import within
from growkit.inference.classes import DESCRIBE, ModelClass, not_inferred

EPS = ("eps", "epsilon", "norm_eps")
"""Suffixes of config keys for the number that a norm adds to a mean."""


@dataclass(frozen=True)
class NormSeen:
    """The observed behaviour of a norm.

    Attributes:
        centred: whether it subtracts the mean first.
        offset: number that it adds to its weight.
        behind: whether it reads the output of attention or MLP, before the residual addition.
        last: whether it follows all layers.
        eps: config key of the number that it adds to a mean; None if the class fixes it.
    """

    centred: bool
    offset: float
    behind: bool
    last: bool
    eps: str | None


@dataclass
class Observation:
    """Observations of a model while it ran.

    Attributes:
        layers: common prefix of the layers' names, such as ``model.layers.``.
        kinds: the kind of every module with parameters: linear, transposed, embedding or norm.
        reads_hidden: linear modules of attention that read the same input as the attention.
        attention: prefixes of the names of attention modules.
        norms: the behaviour of every norm.
    """

    layers: str
    kinds: dict[str, str] = field(default_factory=dict)
    reads_hidden: set[str] = field(default_factory=set)
    attention: list[str] = field(default_factory=list)
    norms: dict[str, NormSeen] = field(default_factory=dict)

    def in_attention(self, module: str) -> bool:
        """Whether a module is part of an attention."""
        return module.startswith(tuple(self.attention)) if self.attention else False


def see(asked: ModelClass) -> Observation:
    """Run a small model of a class once, and observe it.

    Raises:
        InputError: it does not run, or has unknown parts.
    """
    from transformers.pytorch_utils import Conv1D

    with foreign(f"no small model of {asked.name} runs", DESCRIBE):
        model = asked.small_model()
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == asked.small["layers"]
    ]
    if not lists:
        raise not_inferred(f"{asked.name} has no list of layers")
    seen = Observation(lists[0] + ".")
    kinds = {nn.Embedding: "embedding", nn.Linear: "linear", Conv1D: "transposed"}
    for name, module in model.named_modules():
        plain = next((kind for of, kind in kinds.items() if isinstance(module, of)), None)
        if plain:
            seen.kinds[name] = plain
        elif "norm" in type(module).__name__.lower() and not [*module.children()]:
            seen.kinds[name] = "norm"
        elif "attention" in type(module).__name__.lower() and name.startswith(seen.layers):
            seen.attention.append(name + ".")
    watched = _Watch(model, seen)
    with foreign(f"no small model of {asked.name} runs", DESCRIBE):
        watched.run(asked.small["vocab"])
    given = asked.config(asked.small).to_dict()
    keys = [key for key, value in given.items() if isinstance(value, float) and key.endswith(EPS)]
    varied = {key: asked.model(asked.config(asked.small, **{key: 0.123}), "cpu") for key in keys}
    for name, module in model.named_modules():
        if seen.kinds.get(name) != "norm":
            continue
        eps = next((key for key in keys if _eps(varied[key].get_submodule(name)) == 0.123), None)
        centred, offset = _behaviour(module, watched.widths.get(name, 0), name)
        seen.norms[name] = NormSeen(
            centred, offset, name in watched.behind, name in watched.last, eps
        )
    return seen


def _eps(module: nn.Module) -> float | None:
    found = (getattr(module, name, None) for name in ("eps", "variance_epsilon", "epsilon"))
    return next((each for each in found if each is not None), None)


def _behaviour(module: nn.Module, width: int, name: str) -> tuple[bool, float]:
    """Measure whether a norm subtracts the mean, and the number that it adds to its weight.

    Raises:
        InputError: the module does not behave like a norm.
    """
    if not width:
        raise not_inferred(f"{name} never runs, so that its effect cannot be seen")
    generator = torch.Generator().manual_seed(1)
    weight: Any = getattr(module, "weight", None)
    shape = (3, *weight.shape) if _has_weight(module) else (3, width)
    given = 3 * torch.randn(shape, generator=generator)
    with torch.no_grad():
        as_it_is, shifted = module(given), module(given + 2.0)
        centred = bool((as_it_is - shifted).abs().max() < 1e-3)
        mean = given.mean(-1, keepdim=True) if centred else 0.0
        plain = (given - mean) / (given - mean).square().mean(-1, keepdim=True).sqrt()
        if not _has_weight(module):
            offset, left = 0.0, as_it_is - plain
        else:
            kept = [each.clone() for each in module.parameters()]
            for each in module.parameters():
                each.zero_()
            offset = round(float((module(given) / plain).mean()), 3)
            left = module(given) - offset * plain
            for each, was in zip(module.parameters(), kept, strict=True):
                each.copy_(was)
    if not within(float(left.abs().max()), 1e-3):
        raise not_inferred(f"{name} is no norm of a kind that growkit knows")
    return centred, offset


def _has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), torch.Tensor)


class _Watch:
    """Records inputs and outputs of modules in one run."""

    def __init__(self, model: nn.Module, seen: Observation) -> None:
        self.model, self.seen = model, seen
        self.behind: set[str] = set()
        self.last: set[str] = set()
        self.widths: dict[str, int] = {}
        self._attention: dict[str, list[Any]] = {}
        self._made: dict[str, list[Any]] = {}
        self._layers_done = 0

    def run(self, vocab: int) -> None:
        """Run some tokens."""
        hooks = []
        for name, module in self.model.named_modules():
            before, after = self._before(name), self._after(name)
            hooks.append(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(module.register_forward_hook(after))
        try:
            with torch.no_grad():
                self.model(torch.arange(12)[None] % vocab, use_cache=False)
        finally:
            for hook in hooks:
                hook.remove()

    def _layer(self, name: str) -> str | None:
        rest = name.removeprefix(self.seen.layers)
        return rest.partition(".")[0] if rest != name else None

    def _before(self, name: str) -> Any:
        kind, layer = self.seen.kinds.get(name), self._layer(name)
        attention = next((a for a in self.seen.attention if name.startswith(a)), None)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            if name + "." in self.seen.attention:
                self._attention[name + "."] = given
            if not given:
                return
            around = self._attention.get(attention or "", [])
            if kind in ("linear", "transposed") and any(_same(given[0], each) for each in around):
                self.seen.reads_hidden.add(name)
            if kind == "norm":
                self.widths[name] = given[0].shape[-1]
                made = self._made.get(layer or "", [])
                if layer and not attention and any(each is given[0] for each in made):
                    self.behind.add(name)
                if layer is None and self._layers_done:
                    self.last.add(name)

        return hook

    def _after(self, name: str) -> Any:
        kind, layer = self.seen.kinds.get(name), self._layer(name)
        whole = layer is not None and name == self.seen.layers + layer

        def hook(module: nn.Module, args: Any, made: Any) -> None:
            if whole:
                self._layers_done += 1
            elif layer and kind not in ("norm", "embedding"):
                given = args[0] if args else None
                outcome = made[0] if isinstance(made, tuple | list) else made
                if outcome is not given:  # unlike dropout, which returns its input here
                    self._made.setdefault(layer, []).append(outcome)

        return hook


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)
