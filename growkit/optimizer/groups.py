"""From the law of updates to parameter groups.

The law (``growkit.planning.updates``) is known for the tensors in files. Here it becomes what the
settings of each parameter of the class are multiplied with, for training and optimizers' states.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import np, torch
from growkit.checkpoint.publishing import MANIFEST
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.loader import Conversion, loading
from growkit.engine.oracle import lacks_class
from growkit.planning.layouts import read_layout
from growkit.planning.updates import Update, muon_rate, stepped

RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")
"""Options of a group that are learning rates: its own, and those that schedulers keep there."""


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
        cls,
        update: Update,
        shape: tuple[int, ...] = (),
        muon: str | None = None,
        *,
        coupled: bool = False,
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


def split_groups(groups: Sequence[ParamGroup], factors: Mapping[str, Factors]) -> list[ParamGroup]:
    """Groups whose parameters have the same factors, with the options scaled by these.

    A group becomes one for each set of factors in it, in the order in which these come up;
    parameters keep their order. Groups without parameters are left out: ``param_groups`` makes
    none, and torch.distributed.checkpoint cannot load them.

    Args:
        groups: those of the source's optimizer, with the parameters of the target.
        factors: of parameters, by name; parameters without factors stay unchanged.
    """
    found = []
    for number, group in enumerate(groups):
        alike: dict[Factors, list[str]] = {}
        for name in group.parameters:
            alike.setdefault(factors.get(name, Factors()), []).append(name)
        for each, names in alike.items():
            found.append(ParamGroup(tuple(names), each.scaled(group.options), each.lr, number))
    return found


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
        from growkit.engine.class_weights import converted

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


def recorded_updates(checkpoint: Checkpoint) -> dict[str, Update]:
    """The law of updates in a grown folder's manifest, for every tensor in its files.

    A single number of shares serves all rows of a tensor, where its effect on eps is least.

    Raises:
        InputError: the folder does not record them, or is damaged.
    """
    folder, file = checkpoint.folder, checkpoint.folder / MANIFEST
    if not checkpoint.opened.has(MANIFEST):
        raise InputError(f"{folder} has no {MANIFEST}; give the folder that growkit wrote")
    manifest = checkpoint.opened.json(MANIFEST)
    by_kind: dict[str, Update] = {}
    try:
        for group in manifest["updates"]["groups"]:
            lr, n_in, *n_out = map(float, (group["lr"], group["n_in"], *group["n_out"]))
            if not all(0 < each < math.inf for each in (lr, n_in, *n_out)):
                raise ValueError
            shares = np.asarray((min(n_out) + max(n_out)) / 2)
            update = Update(n_in, shares, lr * n_in)
            by_kind |= dict.fromkeys(map(str, group["tensors"]), update)
    except (TypeError, KeyError, ValueError):
        raise InputError(
            f"{file} has no updates as growkit writes them; make the model again with "
            f"'growkit run {file}'"
        ) from None
    found = {}
    for name in checkpoint.tensors:
        kind = re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name)
        update_of = by_kind.get(name) or by_kind.get(kind)
        if update_of is None:
            raise InputError(
                f"{file} does not mention tensor {name}; the files in {folder} are not those that "
                "growkit wrote"
            )
        found[name] = update_of
    return found
