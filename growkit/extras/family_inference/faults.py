"""Why a deeper model computes something else than its source: the first layer that differs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from growkit.base.limits import within
from growkit.engine.device import CPU
from growkit.engine.metrics import error_of
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import load_model, quiet
from growkit.model.model import Model

SAME = 1e-10
"""Relative difference of hidden states up to which they are the same."""


class LayerRun(NamedTuple):
    """A layer that ran: its module, and the hidden states before and after it."""

    layer: nn.Module
    before: Tensor
    after: Tensor


def layer_at_fault(source: Model, deeper: Model, ids: Tensor, layers_key: str) -> str | None:
    """Say in a clause why the first layer of a deeper model that differs does so; None if unknown.

    Args:
        source: a model.
        deeper: the model with new layers, which are to return their inputs.
        ids: some tokens, [prompts, tokens].
        layers_key: the config key of the number of layers.
    """
    old, new = (_run_layers(model, ids, model.config[layers_key]) for model in (source, deeper))
    if not old or not new:
        return None
    done = 0
    for place, ran in enumerate(new):
        name = type(ran.layer).__name__
        if place and not _same(new[place - 1].after, ran.before):
            return f"its class changed what {name} {place - 1} handed to the next one"
        zero = [key for key, tensor in ran.layer.named_parameters() if not tensor.any()]
        if _same(ran.before, ran.after) and zero:
            continue
        if zero:
            return (
                f"a new {name} changed its input, although {', '.join(sorted(zero))} were 0: its "
                "class adds or scales something else"
            )
        if done == len(old):
            return None
        kept, done = old[done], done + 1
        if key := _other_attribute(kept.layer, ran.layer):
            return f"{key} of {name} became another number: it follows the number of layers"
        if _same(kept.before, ran.before) and not _same(kept.after, ran.after):
            return (
                f"{name} {place} of the deeper model computed something else than {name} "
                f"{done - 1} of the source from the same input: its class depends on its number"
            )
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and within(error_of(one, other), SAME)


def _other_attribute(one: nn.Module, other: nn.Module) -> str | None:
    """The first float attribute that has different values in the modules of two layers."""
    modules = dict(other.named_modules())
    for path, module in one.named_modules():
        twin = vars(modules[path]) if path in modules else {}
        for key, value in vars(module).items():
            if type(value) is float and twin.get(key, value) != value:
                return f"{path}.{key}".lstrip(".")
    return None


def _run_layers(model: Model, ids: Tensor, count: int) -> Sequence[LayerRun]:
    """Run a model in strict float64, and keep what each of its layers read and returned.

    Args:
        model: the model.
        ids: tokens, [prompts, tokens].
        count: number of its layers.
    """
    runs: list[LayerRun] = []

    def keep(layer: nn.Module, args: Any, options: Any, output: Any) -> None:
        before = args[0] if args else options.get("hidden_states")
        after = output[0] if isinstance(output, tuple) else output
        if isinstance(before, Tensor) and isinstance(after, Tensor):
            runs.append(LayerRun(layer, before.clone(), after.clone()))

    with strict_float64(), quiet(), torch.no_grad():
        loaded: Any = load_model(model, torch.float64, CPU, "eager")
        stacks = [
            (name.count("."), module)
            for name, module in loaded.named_modules()
            if isinstance(module, nn.ModuleList) and len(module) == count
        ]
        if not stacks:
            return ()
        for layer in min(stacks, key=lambda stack: stack[0])[1]:
            layer.register_forward_hook(keep, with_kwargs=True)
        loaded(input_ids=ids, use_cache=False)
    return runs
