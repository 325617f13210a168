"""The factors in a grown folder, by the names that a model class has for its parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.checkpoint.made import MANIFEST
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.loader import loading
from growkit.engine.oracle import lacks_class
from growkit.planning.factors import Factors


@dataclass(frozen=True)
class Known:
    """A parameter of a grown model.

    Attributes:
        factors: of its settings.
        shape: as the class has it.
    """

    factors: Factors
    shape: tuple[int, ...]


def known_of(folder: str | Path) -> dict[str, Known]:
    """Every parameter of a grown model, by the name that its class has for it.

    Args:
        folder: what growkit wrote.

    Raises:
        InputError: the folder says nothing of them, or is damaged.
    """
    checkpoint = Checkpoint(folder)
    stored = _stored(checkpoint)
    if lacks_class(checkpoint.config):
        tensors = checkpoint.tensors
        return {name: Known(each, tensors[name].shape) for name, each in stored.items()}
    found: dict[str, Known] = {}
    for conversion in loading(checkpoint).conversions:
        factors = _together([stored[name] for name in conversion.sources])
        found |= {name: Known(factors, shape) for name, shape in conversion.shapes.items()}
    return found


def _stored(checkpoint: Checkpoint) -> dict[str, Factors]:
    """By the names in the files.

    Raises:
        InputError: see ``known_of``.
    """
    folder = checkpoint.folder
    if not checkpoint.opened.has(MANIFEST):
        raise InputError(f"{folder} has no {MANIFEST}; give the folder that growkit wrote")
    manifest = checkpoint.opened.json(MANIFEST)
    file = folder / MANIFEST
    if not isinstance(manifest, dict) or "updates" not in manifest:
        raise InputError(
            f"{file} does not say how to go on training, as it was written by an earlier growkit; "
            f"make the model again with 'growkit run {file}'"
        )
    by_kind: dict[str, Factors] = {}
    try:
        for group in manifest["updates"]["groups"]:
            numbers = {key: _number(group[key]) for key in ("lr", "weight_decay", "eps", "n_in")}
            shared = [_number(each) for each in group["n_out"]]
            made = Factors(**numbers, n_out=(min(shared) + max(shared)) / 2)
            by_kind |= dict.fromkeys(map(str, group["tensors"]), made)
    except (TypeError, KeyError, ValueError):
        raise InputError(
            f"updates in {file} are not as growkit writes them; make the model again with "
            f"'growkit run {file}'"
        ) from None
    found = {}
    for name in checkpoint.tensors:
        kind = re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name)
        factors = by_kind.get(name) or by_kind.get(kind)
        if factors is None:
            raise InputError(
                f"{file} says nothing of tensor {name}; the files in {folder} are not those that "
                "growkit wrote"
            )
        found[name] = factors
    return found


def _number(value: Any) -> float:
    """A factor.

    Raises:
        ValueError: it cannot be one.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError
    if not (math.isfinite(value) and value > 0):
        raise ValueError
    return float(value)


def _together(parts: Sequence[Factors]) -> Factors:
    """Of a parameter that is made of several tensors, whose factors are mostly the same."""
    if len(set(parts)) == 1:
        return parts[0]
    lr = sum(each.lr for each in parts) / len(parts)
    n_out = (min(each.n_out for each in parts) + max(each.n_out for each in parts)) / 2
    eps = 2 / (min(1 / each.eps for each in parts) + max(1 / each.eps for each in parts))
    return replace(parts[0], lr=lr, weight_decay=1 / lr, eps=eps, n_out=n_out)


WRAPPERS = re.compile(
    r"\b(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|base_layer"
    r"|modules_to_save\.\w+)\."
)
"""What DDP, torch.compile, FSDP, checkpointing of activations and peft put into names."""


def class_name(name: str) -> str:
    """The name of a parameter without what engines have put into it."""
    return WRAPPERS.sub("", name.removeprefix("base_model.model."))


def found_in(name: str, known: Mapping[str, Known], ties: Mapping[str, str]) -> Known | None:
    """What is known of a parameter; None for one that the folder does not have.

    Args:
        name: as the model calls it.
        known: see ``known_of``.
        ties: names of parameters that are one with another, and that one.
    """
    plain = class_name(name)
    same = ties.get(plain, plain)
    alike = (plain, same, *(one for one, other in ties.items() if other == same))
    return next((known[each] for each in alike if each in known), None)
