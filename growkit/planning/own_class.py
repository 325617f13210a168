"""Classes of growkit's own (``growkit.model.families.own_code``), as transformers knows them.

Models of other families that transformers has no class for run as models of one; how is a file in
the folder ``own_classes`` of an extra.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from growkit.base.lazy import registered
from growkit.base.tensors import Config
from growkit.model.families.family import Family, known_family
from growkit.model.families.own_code import auto_map_of, modeling_files, package_of
from growkit.model.model import Model
from growkit.planning.plan import Plan, Planned


@dataclass(frozen=True)
class OwnClass:
    """How models of other families run as models of a class of growkit's own.

    Attributes:
        family: the family of its models.
        runs: whether models of a family can run as models of the class.
        config: from the config of such a model and its name in messages, the config of the class.
            It raises ``InputError`` if the class cannot express the model.
        plan: the plan that turns such a model into one of the class; it raises ``InputError``.
        attention: what ``growkit inspect`` says of a model's attention; None for nothing.
    """

    family: Family
    runs: Callable[[Family], bool]
    config: Callable[[Config, str], Config]
    plan: Callable[[Model], Plan]
    attention: Callable[[Model], Any] = lambda model: None


def own_classes() -> dict[str, OwnClass]:
    """The classes as which models of other families run, by the names of their modules."""
    return registered("own_classes", "OWN_CLASS")


def register_own_classes() -> None:
    """Register growkit's classes with transformers, so that no folder's code is needed."""
    for file in modeling_files().values():
        _register(file)


@cache
def _register(file: Path) -> None:
    import transformers

    package, classes = package_of(file), {}
    for auto, place in auto_map_of(file).items():
        module, _, name = place.rpartition(".")
        classes[auto] = getattr(import_module(f"{package}.{module}"), name)
    for auto, cls in classes.items():
        cls.register_for_auto_class(auto)  # ``save_pretrained`` then copies the code
    config = classes.pop("AutoConfig")
    transformers.AutoConfig.register(config.model_type, config, exist_ok=True)
    for auto, cls in classes.items():
        getattr(transformers, auto).register(config, cls, exist_ok=True)


def substitute(config: Config) -> OwnClass | None:
    """The class that runs a model of a type for which transformers has none; None if it has one."""
    from transformers import CONFIG_MAPPING

    register_own_classes()
    family = known_family(config)
    if family is None or config["model_type"] in CONFIG_MAPPING:
        return None
    return next((own for own in own_classes().values() if own.runs(family)), None)


def config_as_loaded(config: Config, where: str) -> Config:
    """The config with which a model runs, which is another one's if transformers lacks its class.

    Raises:
        InputError: the class of growkit's own cannot express the model.
    """
    own = substitute(config)
    return own.config(config, where) if own else config


def runnable(model: Model) -> Model:
    """The model itself, or turned into one of a class of growkit's own if transformers has none."""
    own = substitute(model.config)
    return Planned(model, own.plan(model)) if own else model


def as_own(model: Model) -> Plan:
    """The plan that turns a model into one of a class of growkit's own, whose code is written.

    Raises:
        InputError: no such class of growkit's own runs the model.
    """
    written = [own for own in own_classes().values() if own.family.auto_map]
    fitting = [own for own in written if own.runs(model.family)]
    return (fitting or written)[0].plan(model)  # if none fits, the first says why
