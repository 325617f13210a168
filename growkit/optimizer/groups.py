"""The parameters of a model as its class has them, and the groups in which they are trained.

The law of updates (``growkit.planning.updates``) is known for the tensors in files. Here it becomes
what the settings of each parameter of the class are multiplied with, for training
(``docs/training.md``) and for optimizers' states.

A single eps serves all rows of a tensor. Where these differ (signal and noise heads in one
``q_proj``), it is between theirs, where the largest change that it makes is least.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from growkit.algebra.update import MUON_ADJUSTMENTS, Update, muon_rate
from growkit.base.errors import InputError
from growkit.base.names import perhaps
from growkit.base.tensors import Config
from growkit.checkpoint.folder import ADAPTER, ADAPTER_WEIGHTS, Folder
from growkit.checkpoint.publishing import MANIFEST
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.weight_file import open_weights
from growkit.engine.class_weights import converted, empty_model
from growkit.engine.loader import Conversion, loading
from growkit.engine.oracle import lacks_class
from growkit.planning.layouts import read_layout
from growkit.planning.updates import stepped

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""Options of a group that are learning rates: its own, and those that schedulers keep there."""

OPTIMIZERS = ("adamw", "muon")

ENGINES = r"module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
"""What DDP, torch.compile, FSDP and checkpointing of activations put into names."""

WRAPPERS = re.compile(rf"\b({ENGINES}|base_layer|modules_to_save\.\w+)\.")
"""What these and PEFT put into the names of a model's own parameters."""

OF_ADAPTERS = re.compile(
    r"(?<=\.)(lora_(?:embedding_)?[AB]|lora_magnitude_vector|ia3_l|hada_w[12]_[ab]"
    r"|trainable_tokens_delta)\.\w+"
)
"""What PEFT calls a parameter of an adapter, and the name of the adapter behind it."""


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model's class.

    Attributes:
        where: the model's folder.
        shapes: of every parameter, by name, in the order of the class; tied ones come once.
        decayed: those that ``Trainer`` lets decay, which come first in its groups.
        vocabulary: those with a row for every token.
        conversions: how transformers makes them of the tensors in files.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]
    decayed: frozenset[str]
    vocabulary: frozenset[str]
    conversions: tuple[Conversion, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Parameters:
        """Those of the model in a folder, as transformers has them.

        Raises:
            InputError: it has no class for the model, or the files do not fit it.
        """
        check_trainable(checkpoint.config, str(checkpoint.folder))
        model, _, stored = empty_model(checkpoint, torch.float32, "eager")
        first: dict[str, str] = {}  # of tied parameters
        for name, _ in model.named_parameters():
            first.setdefault(stored(name), name)
        every = dict(model.named_parameters())
        shapes = {name: tuple(every[name].shape) for name in first.values()}
        return cls(
            str(checkpoint.folder),
            shapes,
            decayed(model) & shapes.keys(),
            frozenset(every.keys() - without_ends(model)),
            loading(checkpoint).conversions,
        )


def check_trainable(config: Config, where: str) -> None:
    """Refuse a model that transformers cannot train.

    Raises:
        InputError: it has no class for it.
    """
    if lacks_class(config):
        raise InputError(
            f"transformers has no class for the {config['model_type']} model in {where}, so it "
            "does not train there; leave out --optimizer"
        )


def without_ends(model: nn.Module) -> set[str]:
    """Names of all parameters but those of the embedding and the output head."""
    ends: set[int] = set()
    for get in ("get_input_embeddings", "get_output_embeddings"):
        module = getattr(model, get)() if hasattr(model, get) else None
        ends |= {id(parameter) for parameter in module.parameters()} if module else set()
    return {name for name, parameter in model.named_parameters() if id(parameter) not in ends}


def decayed(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that transformers' ``Trainer`` lets decay: all but norms and biases.

    Args:
        model: as it is or wrapped; the names are those of its ``named_parameters``.
    """
    from transformers import Trainer

    # A method that uses nothing of its trainer.
    paths = Trainer.get_decay_parameter_names(cast(Trainer, None), model)
    # Wrappers around all of a model (FSDP, checkpointing) leave themselves out of the names that
    # they give, but not of these paths. Of norms without weights there are paths to None.
    chosen = {id(reduce(getattr, path.split("."), model)) for path in paths}
    return frozenset(name for name, each in model.named_parameters() if id(each) in chosen)


# The law of updates


@dataclass(frozen=True)
class Factors:
    """What the settings of a parameter are multiplied with.

    Attributes:
        lr: of the learning rate.
        weight_decay: of decoupled weight decay.
        eps: of AdamW's eps.
    """

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0

    @classmethod
    def of(
        cls, update: Update, shape: tuple[int, ...], muon: str | None, *, coupled: bool = False
    ) -> Factors:
        """The factors of a parameter.

        Args:
            update: how it is to be updated.
            shape: of the parameter.
            muon: ``adjust_lr_fn`` of Muon; None for AdamW.
            coupled: whether weight decay is a part of the gradient, as in Adam.
        """
        if muon is None:
            decay = update.eps / update.rate if coupled else update.decay
            return cls(update.rate, decay, update.eps)
        if len(shape) != 2:
            return cls()  # Muon is for matrices alone
        n_out = 1 / (update.eps * update.factor)
        rate = muon_rate(update.factor, update.n_in, n_out, (shape[0], shape[1]), muon)
        return cls(rate, 1 / rate)

    def scaled(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a group, multiplied."""
        by = dict.fromkeys(RATES, self.lr) | {"weight_decay": self.weight_decay, "eps": self.eps}
        return {
            key: value * by[key] if key in by and isinstance(value, int | float) else value
            for key, value in options.items()
        }


@dataclass(frozen=True)
class ParamGroup:
    """A group of parameters.

    Attributes:
        parameters: their names in the class, in order.
        options: everything else, e.g. ``lr`` and ``betas``.
        rate: by what its learning rates were scaled.
        origin: the number of the group that it was a part of.
    """

    parameters: tuple[str, ...]
    options: Mapping[str, Any]
    rate: float = 1.0
    origin: int = 0

    def split(self, factors: Mapping[str, Factors], origin: int = 0) -> list[ParamGroup]:
        """A group for each set of factors in this one, with the options scaled by these.

        Groups come in the order in which their factors come up; parameters keep their order. A
        group without parameters is left out: ``param_groups`` makes none, and
        torch.distributed.checkpoint cannot load them.

        Args:
            factors: of parameters, by name; parameters without factors stay unchanged.
            origin: the number of this group.
        """
        alike: dict[Factors, list[str]] = {}
        for name in self.parameters:
            alike.setdefault(factors.get(name, Factors()), []).append(name)
        return [
            ParamGroup(tuple(names), each.scaled(self.options), each.lr, origin)
            for each, names in alike.items()
        ]


def class_updates(
    checkpoint: Checkpoint, updates: Mapping[str, Update], *, by_element: bool = True
) -> dict[str, Update]:
    """How the parameters of a model are updated, by the names that its class has for them.

    Args:
        checkpoint: of the model.
        updates: of all tensors in its files.
        by_element: whether a parameter that is made of tensors with different updates gets one for
            each element; else the one nearest to all.
    """
    if lacks_class(checkpoint.config):
        return stepped(read_layout(checkpoint), updates)
    return {
        name: _joined(checkpoint, name, conversion, updates, by_element)
        for conversion in loading(checkpoint).conversions
        for name in conversion.shapes
    }


def _joined(
    checkpoint: Checkpoint,
    name: str,
    conversion: Conversion,
    updates: Mapping[str, Update],
    by_element: bool,
) -> Update:
    """The update of a parameter that transformers makes of tensors."""
    of = [updates[each] for each in conversion.sources]
    distinct = {
        each if each.n_out.size > 1 else (each.rate, each.eps, each.new, each.why) for each in of
    }
    if conversion.transform is None or len(distinct) == 1:
        return of[0]
    rates = [each.rate for each in of]
    if by_element:
        factors = {
            pattern: [
                torch.from_numpy(
                    np.broadcast_to(updates[each].gradient, checkpoint.tensors[each].shape).copy()
                )
                for each in names
            ]
            for pattern, names in conversion.tensors.items()
        }
        with torch._C.DisableTorchFunction():
            n_out = 1 / converted(conversion, factors)[name].numpy()
    else:
        shared = [each.n_out * each.factor for each in of]
        least, most = min(each.min() for each in shared), max(each.max() for each in shared)
        n_out = np.asarray((least + most) / 2)
    found = replace(of[0], n_in=len(rates) / sum(rates), n_out=n_out, factor=1.0)
    return found if len(set(rates)) == 1 else found.because("its parts have different rates")


def recorded_updates(folder: Folder, tensors: Iterable[str]) -> dict[str, Update]:
    """The law of updates in a grown folder's manifest.

    A single number of shares serves all rows of a tensor, where its effect on eps is least.

    Args:
        folder: of a model or an adapter.
        tensors: names of all tensors in its files.

    Raises:
        InputError: the folder does not record them, or is damaged.
    """
    file = folder.path / MANIFEST
    if not folder.has(MANIFEST):
        raise InputError(f"{folder} has no {MANIFEST}; give the folder that growkit wrote")
    manifest = folder.json(MANIFEST)
    by_kind: dict[str, Update] = {}
    try:
        for group in manifest["updates"]["groups"]:
            lr, n_in, *n_out = map(float, (group["lr"], group["n_in"], *group["n_out"]))
            if not all(0 < each < math.inf for each in (lr, n_in, *n_out)):
                raise ValueError
            shares = np.asarray((min(n_out) + max(n_out)) / 2)
            by_kind |= dict.fromkeys(map(str, group["tensors"]), Update(n_in, shares, lr * n_in))
    except (TypeError, KeyError, ValueError):
        raise InputError(
            f"{file} has no updates as growkit writes them; make the model again with "
            f"'growkit run {file}'"
        ) from None
    found = {}
    for name in tensors:
        update_of = by_kind.get(name) or by_kind.get(re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name))
        if update_of is None:
            raise InputError(
                f"{file} does not mention tensor {name}; the files in {folder} are not those that "
                "growkit wrote"
            )
        found[name] = update_of
    return found


# Groups for training


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
    new adapter, a head for another task) gets the settings as they are.

    Args:
        model: the grown model, as it is or wrapped (FSDP2, DDP, torch.compile, peft).
        folder: what growkit wrote; of its files, the weights are not read. That of an adapter for
            an adapter that was grown. None for a model that was not grown, whose parameters all get
            the settings as they are.
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
    parameters = dict(model.named_parameters())
    factors: dict[str, Factors] = {}
    decaying, others = list[str](), list[str]()
    for name, parameter in parameters.items():
        wanted = only(name, parameter) if only else not muon or name in matrices
        if not parameter.requires_grad or not wanted:
            continue
        if muon and parameter.dim() != 2:
            raise InputError(f"{name} is no matrix, but Muon takes nothing else; leave it out")
        factors[name] = Factors.of(updates.get(name, Update()), tuple(parameter.shape), muon)
        loses = decays(name, parameter) if decays else name in usual
        (decaying if loses else others).append(name)
    options = {"lr": lr, **({"adjust_lr_fn": muon} if muon else {"eps": eps})}
    groups = [
        ParamGroup(tuple(names), {**options, "weight_decay": decay})
        for names, decay in ((decaying, weight_decay), (others, 0.0))
    ]
    return [
        {"params": [parameters[name] for name in each.parameters], **each.options}
        for group in groups
        for each in group.split(factors)
    ]


def hidden_matrices(model: nn.Module) -> set[str]:
    """Names of the matrices that Muon is made for: all but the embedding and the output head."""
    matrices = {name for name, parameter in model.named_parameters() if parameter.dim() == 2}
    return matrices & without_ends(model)


def matched(model: nn.Module, folder: str | Path) -> dict[str, Update]:
    """How all parameters of a model are updated, by its own names; plainly if they are not known.

    Raises:
        InputError: the model, or its adapter, is not the one in the folder.
    """
    opened = Folder(folder)
    if opened.has(ADAPTER):
        return _matched_adapter(model, opened)
    checkpoint = Checkpoint(folder)
    known = recorded_updates(opened, checkpoint.tensors)
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


def _matched_adapter(model: nn.Module, folder: Folder) -> dict[str, Update]:
    """How the parameters of an adapter are updated, which is that in a folder; see ``matched``."""
    name = next((each for each in ADAPTER_WEIGHTS if folder.find(each)), ADAPTER_WEIGHTS[0])
    held = open_weights(folder, name).tensors
    known, updates, found = recorded_updates(folder, held), {}, {}
    for name, _ in model.named_parameters():
        key = _adapter_key(name)
        updates[name] = known.get(key, Update())
        if key in held:
            found[name] = held[key].shape
    check_same(model, found, folder.path)
    return updates


def _adapter_key(name: str) -> str:
    """What PEFT calls a parameter of an adapter in its file."""
    plain = re.sub(rf"\b({ENGINES}|modules_to_save\.\w+)\.", "", name)
    plain = OF_ADAPTERS.sub(r"\1", plain).replace("magnitude_vector.weight", "magnitude_vector")
    return f"base_model.model.{plain.removeprefix('base_model.model.')}"


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
