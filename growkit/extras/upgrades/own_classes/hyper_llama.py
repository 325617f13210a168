"""Llama with several residual streams."""

from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.extras.upgrades.modeling import (
    ARCHITECTURE,
    AUTO_MAP,
    MODEL_TYPE,
    model_code,
    register,
)
from growkit.model.families.family import shipped_family
from growkit.model.model import Model
from growkit.planning.own_class import OwnClass
from growkit.planning.plan import Plan

FAMILY = replace(
    shipped_family(MODEL_TYPE),
    architecture=ARCHITECTURE,
    loads_with=(
        "transformers 5.24 or later with trust_remote_code=True (the code is next to the weights)"
    ),
    auto_map=AUTO_MAP,
    code=model_code,
)


def _refuse(model: Model) -> Plan:
    raise InputError(f"{model.where()} does not run as {FAMILY.one}")


def _config(config: Config, where: str) -> Config:
    return config


OWN_CLASS = OwnClass(
    family=FAMILY, register=register, runs=lambda family: False, config=_config, plan=_refuse
)
