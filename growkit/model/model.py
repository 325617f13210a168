"""A model as one value: its config, its tensors, and the family that describes them.

A checkpoint in a folder, a plan's outcome that is computed when it is read, and a config without
weights are all models; what reads a model need not know which.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import copy
from functools import cached_property
from types import MappingProxyType
from typing import NoReturn, TypeVar

from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor
from growkit.base.tensors import Config, Weights
from growkit.model.families.family import Family, family_of
from growkit.model.families.family_parts import PREDICTING, Member

QUANTISED = re.compile(
    r"[._](qweight|qzeros|scales|blocks|g_idx|packed|scale(_inv)?|weight_format|absmax|SCB|W_q)$"
)
"""Names of auxiliary tensors of quantised weights."""

ADAPTED = re.compile(r"\b(lora_|base_layer\.|base_model\.model\.)")
"""Names of an adapter's tensors."""

RECOMPUTED = "the model class computes it"
"""Reason to drop a tensor that is not a parameter."""

M = TypeVar("M", bound="Model")


class Model(Weights):
    """Tensors by name with the config that they belong to.

    Attributes:
        config: the contents of ``config.json``.
        described: a family that the user describes, or that was inferred, for its own types of
            models; all other types have those of the package.
        quantised: how the numbers are stored, in a phrase, if they are made from quantised ones.
        published: the config with the keys of its file, of which ``config`` may have other forms.
        stands_alone: whether transformers loads exactly this model from its files.
        part_of: type of the larger model that holds this one, if it is a part of one.
        left_out: other parts of that model, with the reason why they are left out.
        note: a sentence on that; empty if it is no part of one.
    """

    config: Config
    described: Family | None = None
    quantised: str = ""
    published: Config | None = None
    part_of: str = ""
    left_out: Mapping[str, str] = MappingProxyType({})
    note: str = ""
    stands_alone: bool = True

    @cached_property
    def family(self) -> Family:
        """The family that describes the model, in the form that its tensors have.

        Raises:
            InputError: no family does, or the config does not fit it; see ``family_of``.
        """
        family = family_of(self.config, self.where(), self.described)
        try:
            stored = family.as_stored(self.config, self.tensors.keys())
            stored.complete(self.config)
        except InputError as error:  # this error does not name the folder
            raise InputError(f"{self.where()} is no such model: {error}") from None
        return stored

    @property
    def complete(self) -> Config:
        """The config with the defaults of the class; see ``Family.complete``."""
        return self.family.complete(self.config)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis."""
        return self.family.sizes(self.config)

    @cached_property
    def unused(self) -> tuple[dict[str, str], dict[str, str]]:
        """The tensors that the class does not read; see ``unused_tensors``."""
        return unused_tensors(self, self.family)

    @property
    def nested_keys(self) -> set[str]:
        """Keys of parts of the published config whose entries ``config`` has as keys of its own."""
        published = (self.published or {}).items()
        return {key for key, value in published if isinstance(value, dict)} - self.config.keys()

    def with_family(self: M, described: Family | None) -> M:
        """The same model, described by another family."""
        model = copy(self)
        for known in ("family", "unused"):
            model.__dict__.pop(known, None)
        model.described = described
        return model


class Derived(Model):
    """A model made from another one: it has all of that which it does not change.

    Args:
        source: the other one.

    Attributes:
        names: names that tensors have in the other one, where they have others there.
    """

    names: Mapping[str, str] = MappingProxyType({})

    def __init__(self, source: Model) -> None:
        self.source, self.config, self.tensors = source, source.config, source.tensors
        self.described, self.published = source.described, source.published
        self.quantised, self.part_of = source.quantised, source.part_of

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        return self.source.where(name and self.names.get(name, name))

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        return self.source.read(self.names.get(name, name), *where)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return self.source.cuts(self.names.get(name, name))


def unused_tensors(source: Model, family: Family) -> tuple[dict[str, str], dict[str, str]]:
    """Compare the headers of a checkpoint with its family.

    Returns:
        The tensors to drop, with the reason; and those of them that must equal another tensor, with
        its name.

    Raises:
        InputError: a tensor is missing, has a wrong shape or dtype, or is unknown to the family.
    """
    sizes = family.sizes(source.config)
    if sizes["layers"] > len(source.tensors):
        raise InputError(
            f"config.json in {source.where()} has {sizes['layers']} layers, but there are "
            f"only {len(source.tensors)} tensors; correct num_hidden_layers or add what is missing"
        )
    patterns = family.patterns(source.config)
    for member in family.members(source.config):
        _check_header(source, family, member, member.pattern.shape(sizes))
    unknown = "remove it, or correct model_type, the number of layers or the bias switches"
    dropped: dict[str, str] = {}
    duplicates: dict[str, str] = {}
    for name in sorted(source.tensors.keys() - patterns.keys()):
        if name.endswith(family.recomputed) and family.recomputed:
            dropped[name] = RECOMPUTED
        elif predicts(name, source.config, sizes["layers"]):
            dropped[name] = "it predicts further tokens, and the model class does not read it"
        elif name in family.duplicates:
            dropped[name] = f"tied to {family.duplicates[name]}"
            duplicates[name] = family.duplicates[name]
        else:
            raise InputError(
                f"tensor {name} in {source.where(name)} is not part of {family.one} with "
                f"this config.json; {_remedy(source, unknown)}"
            )
    return dropped, duplicates


INDICES = frozenset({"I32", "I64"})
"""Dtypes of tensors that hold whole numbers."""


def _check_header(source: Model, family: Family, member: Member, expected: tuple[int, ...]) -> None:
    name, pattern = member.name, member.pattern
    info = source.tensors.get(name)
    if info is None:
        remedy = "copy the checkpoint again, or correct its config.json"
        remedy = _remedy(source, remedy)
        for alias, of in family.duplicates.items():
            if of == name and alias in source.tensors:
                remedy = f"rename {alias}, which is tied to it"
        if other := next(
            (stored for stored in source.tensors if stored.endswith(f".{name}")), None
        ):
            prefix = other.removesuffix(name)
            remedy = f"{other} is there, so leave {prefix} out of the names of its tensors"
        raise InputError(
            f"tensor {name} is missing from {source.where()}; {family.one} with its "
            f"config.json has it, with shape {list(expected)}; {remedy}"
        )
    if member.tensor.indices:
        if info.dtype not in INDICES:
            raise InputError(
                f"tensor {name} in {source.where(name)} has dtype {info.dtype}, but holds whole "
                f"numbers ({', '.join(sorted(INDICES))}); copy the checkpoint again"
            )
    elif info.dtype not in tensors.FLOAT_BYTES:
        raise InputError(
            f"tensor {name} in {source.where(name)} has dtype {info.dtype}; growkit works on "
            f"float weights ({', '.join(tensors.FLOAT_BYTES)}), dequantise the model first"
        )
    if info.shape != expected:
        raise InputError(
            f"tensor {name} in {source.where(name)} has shape {list(info.shape)}; config.json "
            f"predicts {list(expected)} ({pattern.notation}), correct whichever is wrong"
        )


def _remedy(source: Model, remedy: str) -> str:
    """The remedy for tensors that do not fit, if that given is not the likely one."""
    if any(map(ADAPTED.search, source.tensors)):
        return "the model has an adapter, merge that into it first"
    quantised = any(map(QUANTISED.search, source.tensors))
    if quantised:
        return (
            "the model is quantised, dequantise it first, or copy config.json again if that lacks "
            "its quantization_config"
        )
    if source.part_of:
        remedy += (
            f"; or, if {source.part_of} models have another name for it, save the language model "
            "alone with transformers, and give that folder"
        )
    return remedy


def predicts(name: str, config: Config, layers: int) -> bool:
    """Whether a tensor predicts further tokens: by its name, or behind the last layer."""
    if re.search(r"(^|\.)mtp(_\w+)?\.", name):
        return True
    match = re.search(r"\blayers\.(\d{1,9})\.", name)
    more = max(predicting(config).values(), default=0)
    return match is not None and layers <= int(match[1]) < layers + more


def predicting(config: Config) -> dict[str, int]:
    """The numbers of layers that predict further tokens, by their keys."""
    entries = {key: value for key, value in config.items() if PREDICTING.fullmatch(key)}
    return {key: value for key, value in entries.items() if isinstance(value, int) and value}


class Headers(Model):
    """A model without weights: the header of every tensor that its family expects.

    Args:
        family: family of the model.
        config: contents of its ``config.json``.
        where: name of the model in messages.

    Raises:
        InputError: the config has a wrong size or dtype.
    """

    def __init__(self, family: Family, config: Config, where: str) -> None:
        self.config, self.described, self._where = config, family, where
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
        if dtype not in tensors.TORCH_NAMES.values():
            expected = ", ".join(tensors.TORCH_NAMES.values())
            raise InputError(f"dtype in {where} is {dtype!r}; one of {expected} was expected")
        sizes, patterns = family.sizes(config), family.patterns(config)
        self.tensors = {
            name: tensors.TensorInfo(pattern.shape(sizes), tensors.SAFETENSORS_NAMES[dtype])
            for name, pattern in patterns.items()
        }

    def where(self, name: str | None = None) -> str:
        """The name of the model in messages."""
        return self._where

    def read(self, name: str, *where: slice | None) -> NoReturn:
        """Refuse, since there are no weights."""
        raise InputError(
            f"this recipe is planned with the numbers of {name}, but {self._where} has no weights; "
            "plan it where they are"
        )

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return tensors.ANYWHERE
