"""Models of growkit's own, a package each.

Their files are copied next to the weights; they do not import growkit.
"""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from growkit.base.errors import InputError
from growkit.model.families.family import shipped_family
from growkit.model.model import Model
from growkit.planning.own_class import OwnClass, code_in, register_classes
from growkit.planning.plan import Plan


def own_class(model_type: str, prefix: str, package: str = "") -> OwnClass:
    """A class that runs only models of its own type.

    Args:
        model_type: the type of its models.
        prefix: what the names of its classes begin with.
        package: where its files are; the one here that is named as the type if empty.
    """
    head = f"modeling_{model_type}.{prefix}ForCausalLM"
    auto_map = {
        "AutoConfig": f"configuration_{model_type}.{prefix}Config",
        "AutoModel": f"modeling_{model_type}.{prefix}Model",
        "AutoModelForCausalLM": head,
    }
    package = package or f"{__name__}.{model_type}"
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    family = replace(
        shipped_family(model_type),
        architecture=head.rpartition(".")[-1],
        loads_with=(
            "transformers 5.24 or later with trust_remote_code=True (the code is next to the "
            "weights)"
        ),
        auto_map=auto_map,
        code=partial(code_in, Path(spec.origin).parent),
    )

    def refuse(model: Model) -> Plan:
        raise InputError(f"{model.where()} does not run as {family.one}")

    return OwnClass(
        family=family,
        register=partial(register_classes, model_type, auto_map, package),
        runs=lambda of: False,
        config=lambda config, where: config,
        plan=refuse,
    )
