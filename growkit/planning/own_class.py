"""Classes of growkit's own: models that transformers has no class for run as models of one.

A class is one file in the folder ``own_classes`` of an extra. Its family has the code, which is
copied next to the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from growkit.base.lazy import registered
from growkit.base.tensors import Config
from growkit.model.families.family import Family, known_family
from growkit.model.model import Model
from growkit.planning.plan import Plan, Planned
from growkit.results.growth_result import Attention


@dataclass(frozen=True)
class OwnClass:
    """A class of growkit's own.

    Attributes:
        family: the family of its models.
        register: registers it with transformers' auto classes.
        runs: whether models of a family can run as models of the class.
        config: from the config of such a model and its name in messages, the config of the class.
            It raises ``InputError`` if the class cannot express the model.
        plan: the plan that turns such a model into one of the class; it raises ``InputError``.
        attention: what ``growkit inspect`` says of a model's attention; None for nothing.
    """

    family: Family
    register: Callable[[], None]
    runs: Callable[[Family], bool]
    config: Callable[[Config, str], Config]
    plan: Callable[[Model], Plan]
    attention: Callable[[Model], Attention | None] = lambda model: None


def code_in(folder: Path) -> dict[str, bytes]:
    """The files of a model's code, by name; those that begin with an underscore are growkit's."""
    return {file.name: file.read_bytes() for file in sorted(folder.glob("[!_]*.py"))}


def register_classes(model_type: str, auto_map: Mapping[str, str], package: str) -> None:
    """Register the classes of a model with transformers' auto classes.

    Args:
        model_type: the type of its config.
        auto_map: the module and the name of each class, by auto class.
        package: the package of these modules.
    """
    import transformers

    def find(place: str) -> Any:
        module, _, name = place.rpartition(".")
        return getattr(import_module(f"{package}.{module}"), name)

    config = find(auto_map["AutoConfig"])
    transformers.AutoConfig.register(model_type, config, exist_ok=True)
    for auto in auto_map.keys() - {"AutoConfig"}:
        getattr(transformers, auto).register(config, find(auto_map[auto]), exist_ok=True)


def own_classes() -> dict[str, OwnClass]:
    """All classes of growkit's own, by the names of their modules."""
    return registered("own_classes", "OWN_CLASS")


def register_own_classes() -> None:
    """Register growkit's classes with transformers, so that no folder's code is needed."""
    for own in own_classes().values():
        own.register()


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
