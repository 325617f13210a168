"""A model as one value: its config, its tensors, and the family that describes them.

A checkpoint in a folder, a plan's outcome that is computed when it is read, and a config without
weights are all models; what reads a model need not know which.
"""

from __future__ import annotations

from copy import copy
from functools import cached_property
from typing import Any, NoReturn, TypeVar

from growkit.base import tensors
from growkit.base.errors import InputError
from growkit.base.tensors import Config, Weights
from growkit.families.family import Family, family_of

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
    """

    config: Config
    described: Family | None = None
    quantised: str = ""
    published: Config | None = None
    part_of: str = ""
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
    def nested_keys(self) -> set[str]:
        """Keys of parts of the published config whose entries ``config`` has as keys of its own."""
        published = (self.published or {}).items()
        return {key for key, value in published if isinstance(value, dict)} - self.config.keys()

    def with_family(self: M, described: Family | None) -> M:
        """The same model, described by another family."""
        model = copy(self)
        model.__dict__.pop("family", None)
        model.described = described
        return model


EXAMPLE_SIZES = {
    "vocab": 64,
    "hidden": 64,
    "ffn": 64,
    "layers": 2,
    "heads": 8,
    "signal_heads": 8,
    "noise_heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "experts": 4,
}
"""Sizes of an example, for axes that most families have."""

OTHER_SIZE = 8
"""Size of any other axis for which the class has no default."""


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


def example(family: Family, **switches: Any) -> Headers:
    """Make a small example of a family: a minimal config with some switches.

    In a family with experts, every layer has experts, and each token uses two of them.
    """
    config: dict[str, Any] = {"model_type": family.model_types[0]}
    if family.experts:
        config |= {**family.experts.config, family.experts.top_k: 2}
    config |= switches
    assert config["model_type"] in family.model_types
    known = {key: value for key, value in family.defaults.items() if not callable(value)}
    for key, entry in family.axes.items():
        assumed = key in family.defaults
        if key in family.derived or (callable(entry) and assumed):
            continue
        axes = entry(known | config) if callable(entry) else entry
        if axes and (not assumed or EXAMPLE_SIZES.keys() >= {*axes}):
            config[key] = sum(EXAMPLE_SIZES.get(axis, OTHER_SIZE) for axis in axes)
    return Headers(family, config, f"an example of {family.name}")
