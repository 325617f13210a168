"""Parameter groups with which a grown model goes on as its source would (``docs/training.md``).

A single eps serves all rows of a tensor. Where these differ (signal and noise heads in one
``q_proj``), it lies between theirs, where the largest change that it makes is least.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from growkit.algebra.muon import ADJUSTMENTS, muon_rate
from growkit.base.errors import InputError
from growkit.base.names import perhaps
from growkit.planning.factors import UNCHANGED, Factors
from growkit.training.decay import decayed
from growkit.training.law import found_in, known_of

OPTIMIZERS = ("adamw", "muon")


def param_groups(
    model: nn.Module,
    folder: str | Path,
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

    Every setting is the one with which the source would go on; each group has what becomes of it.
    Decayed groups come first, as in transformers' Trainer. What the folder does not have (an
    adapter, a head for another task) gets the settings as they are.

    Args:
        model: the grown model, as it is or wrapped (FSDP2, DDP, torch.compile, peft).
        folder: what growkit wrote; of its files, the weights are not read.
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
    for value, known in ((optimizer, OPTIMIZERS), (adjust_lr_fn, tuple(ADJUSTMENTS))):
        if value not in known:
            raise InputError(
                f"{value!r} is not known; choose {' or '.join(known)}{perhaps(value, known)}"
            )
    factors = matched(model, folder)
    if only is None and optimizer == "muon":
        matrices = hidden_matrices(model)
        only = lambda name, _: name in matrices  # noqa: E731
    usual = decayed(model) if decays is None else frozenset()
    groups: dict[tuple[bool, object], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or (only and not only(name, parameter)):
            continue
        loses = decays(name, parameter) if decays else name in usual
        of = factors[name]
        decay = weight_decay if loses else 0.0
        if optimizer == "muon":
            if parameter.dim() != 2:
                raise InputError(f"{name} is no matrix, but Muon takes nothing else; leave it out")
            shape = (parameter.shape[0], parameter.shape[1])
            rate = muon_rate(of.lr * of.n_in, of.n_in, of.n_out, shape, adjust_lr_fn)
            made = {"lr": lr * rate, "weight_decay": decay / rate, "adjust_lr_fn": adjust_lr_fn}
            key: tuple[bool, object] = (not loses, rate)
        else:
            made = {"lr": lr * of.lr, "weight_decay": decay * of.weight_decay, "eps": eps * of.eps}
            key = (not loses, (of.lr, of.weight_decay, of.eps))
        groups.setdefault(key, {"params": [], **made})["params"].append(parameter)
    return [groups[key] for key in sorted(groups, key=lambda key: key[0])]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices that Muon is made for: all but the embedding and the output head."""
    ends: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)() if hasattr(model, get) else None
        ends |= {id(parameter) for parameter in module.parameters()} if module else set()
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2 and id(parameter) not in ends
    }


def matched(model: nn.Module, folder: str | Path) -> dict[str, Factors]:
    """The factors of all parameters of a model, by its own names; plain ones where there are none.

    Raises:
        InputError: the model is not the one in the folder.
    """
    known, ties = known_of(folder), _ties(model)
    found, factors = False, {}
    for name, parameter in model.named_parameters():
        each = found_in(name, known, ties)
        if each and each.shape != tuple(parameter.shape):
            raise InputError(
                f"{name} of the {type(model).__name__} has shape {list(parameter.shape)}, but "
                f"{list(each.shape)} in {folder}; give the folder that it was loaded from"
            )
        found |= each is not None
        factors[name] = each.factors if each else UNCHANGED
    if not found:
        raise InputError(
            f"no parameter of the {type(model).__name__} is one of the model in {folder}; give the "
            "folder that it was loaded from"
        )
    return factors


def _ties(model: nn.Module) -> dict[str, str]:
    """Parameters that are one with another, as transformers names them."""
    for module in model.modules():  # the model itself, or the first that is not around it
        tied = getattr(module, "all_tied_weights_keys", None)
        if isinstance(tied, dict):
            return {str(one): str(other) for one, other in tied.items()}
    return {}
