"""Parameter groups that train a grown model as its source would be (``docs/training.md``).

A single eps serves all rows of a tensor. Where these differ (signal and noise heads in one
``q_proj``), it is between theirs, where the largest change that it makes is least.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from growkit.base.errors import InputError
from growkit.base.names import perhaps
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.loader import loading
from growkit.engine.oracle import lacks_class
from growkit.optimizer.groups import Factors, class_updates, recorded_updates
from growkit.optimizer.parameters import decayed, without_ends
from growkit.planning.updates import MUON_ADJUSTMENTS, Update

OPTIMIZERS = ("adamw", "muon")

WRAPPERS = re.compile(
    r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer"
    r"|modules_to_save\.\w+)\."
)
"""What DDP, torch.compile, FSDP, checkpointing of activations and peft put into names."""


def param_groups(
    model: nn.Module,
    folder: str | Path | None,
    *,
    lr: float,
    weight_decay: float = 0.01,
    eps: float = 1e-8,
    optimizer: str = "adamw",
    adjust_lr_fn: str = "original",
    decays: Callable[[str, nn.Parameter], bool] | None = None,
    only: Callable[[str, nn.Parameter], bool] | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for ``torch.optim.AdamW`` or ``torch.optim.Muon``.

    Every setting is the one with which the source would be trained; each group has what becomes of
    it. Decayed groups come first, as in transformers' Trainer. What the folder does not have (an
    adapter, a head for another task) gets the settings as they are.

    Args:
        model: the grown model, as it is or wrapped (FSDP2, DDP, torch.compile, peft).
        folder: what growkit wrote; of its files, the weights are not read. None for a model that
            was not grown, whose parameters all get the settings as they are.
        lr: the learning rate.
        weight_decay: of what decays.
        eps: of AdamW; Muon keeps its own, which scales with the gradient by itself.
        optimizer: ``adamw`` or ``muon``.
        adjust_lr_fn: that of Muon.
        decays: whether a parameter decays; without, what transformers' Trainer lets decay does.
        only: whether a parameter is wanted; all are without, for Muon all ``hidden_matrices``.

    Raises:
        InputError: the folder is none that growkit wrote, or the model is another one; an option
            has an unknown value.
    """
    for value, known in ((optimizer, OPTIMIZERS), (adjust_lr_fn, tuple(MUON_ADJUSTMENTS))):
        if value not in known:
            raise InputError(
                f"{value!r} is not known; choose {' or '.join(known)}{perhaps(value, known)}"
            )
    muon = adjust_lr_fn if optimizer == "muon" else None
    updates = {} if folder is None else matched(model, folder)
    matrices = hidden_matrices(model) if muon and only is None else set()
    usual = decayed(model) if decays is None else frozenset()
    groups: dict[tuple[bool, Factors], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        wanted = only(name, parameter) if only else not muon or name in matrices
        if not parameter.requires_grad or not wanted:
            continue
        if muon and parameter.dim() != 2:
            raise InputError(f"{name} is no matrix, but Muon takes nothing else; leave it out")
        factors = Factors.of(updates.get(name, Update()), tuple(parameter.shape), muon)
        loses = decays(name, parameter) if decays else name in usual
        of_optimizer = {"adjust_lr_fn": muon} if muon else {"eps": eps}
        options = {"lr": lr, "weight_decay": weight_decay if loses else 0.0, **of_optimizer}
        made = groups.setdefault((not loses, factors), {"params": [], **factors.scaled(options)})
        made["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices that Muon is made for: all but the embedding and the output head."""
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    return matrices & without_ends(model)


def matched(model: nn.Module, folder: str | Path) -> dict[str, Update]:
    """How all parameters of a model are updated, by its own names; plainly if they are not known.

    Raises:
        InputError: the model is not the one in the folder.
    """
    checkpoint = Checkpoint(folder)
    known = recorded_updates(checkpoint)
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    if not lacks_class(checkpoint.config):
        known = class_updates(checkpoint, known, by_element=False)
        shapes = {n: s for each in loading(checkpoint).conversions for n, s in each.shapes.items()}
    modules = (getattr(module, "all_tied_weights_keys", None) for module in model.modules())
    # Of the model itself, or of the first module that is not a wrapper.
    ties: dict[str, str] = next((each for each in modules if isinstance(each, dict)), {})
    updates, found = {}, {}
    for name, _ in model.named_parameters():
        plain = class_name(name)
        same = ties.get(plain, plain)
        alike = (plain, same, *(one for one, other in ties.items() if other == same))
        key = next((each for each in alike if each in known), None)
        updates[name] = known[key] if key else Update()
        if key:
            found[name] = shapes[key]
    check_same(model, found, folder)
    return updates


def check_same(model: nn.Module, found: Mapping[str, tuple[int, ...]], folder: str | Path) -> None:
    """Refuse a model that is not the one in a folder.

    Args:
        model: in memory.
        found: shapes in the folder, by the names that the model has for its parameters.
        folder: the folder.

    Raises:
        InputError: no parameter was found, or one has another shape.
    """
    kind, remedy = type(model).__name__, "give the folder that it was loaded from"
    for name, parameter in model.named_parameters():
        if name in found and found[name] != tuple(parameter.shape):
            raise InputError(
                f"{name} of the {kind} has shape {list(parameter.shape)}, but "
                f"{list(found[name])} in {folder}; {remedy}"
            )
    if not found:
        raise InputError(f"no parameter of the {kind} is one of the model in {folder}; {remedy}")


def class_name(name: str) -> str:
    """The name of a parameter without what engines have put into it."""
    return WRAPPERS.sub("", name.removeprefix("base_model.model."))
