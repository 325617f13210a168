"""The choice of modules in an adapter's config, if their names change in a grown model."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from growkit.adapters.assembly import Adapted
from growkit.adapters.folder import AdapterFolder
from growkit.adapters.methods import DEFAULT, MERGE, pattern_value
from growkit.adapters.modules import Modules
from growkit.base.errors import InputError
from growkit.base.tensors import Config

BY_MODULE = ("exclude_modules", "layers_to_transform", "rank_pattern", "alpha_pattern")
"""Keys that choose among modules, or have settings for some of them."""


def retarget(folder: AdapterFolder, adapted: Mapping[str, Adapted], modules: Modules) -> Config:
    """Make the config of a grown adapter.

    It stays unchanged if it chooses the same modules; otherwise it lists their new names.

    Args:
        folder: the adapter of the source.
        adapted: see ``Assembly``.
        modules: the modules of the grown model.

    Raises:
        InputError: the choice cannot be expressed with the new names.
    """
    config, listed = folder.config, folder.config.get("target_parameters") or ()
    if all(name == each.origin for name, each in adapted.items()):
        return config
    if not any(config.get(key) for key in BY_MODULE) and _chosen(config, modules) == adapted.keys():
        return config
    numbered = any(re.search(r"\d", name) for name in config.get("modules_to_save") or ())
    if numbered or "rank_pattern" not in folder.method.settings:
        raise InputError(
            f"the adapter in {folder.opened} names modules by the indices of layers, which change; "
            f"{MERGE}"
        )

    def name_of(parameter: str) -> str:
        return parameter if _ends(parameter, listed) else parameter.removesuffix(".weight")

    ranks, alphas = {}, {}
    for parameter, each in adapted.items():
        pattern = re.escape(name_of(parameter))
        if each.rank != config.get("r", DEFAULT):
            ranks[pattern] = each.rank
        alpha = pattern_value(config, "alpha_pattern", name_of(each.origin))
        if alpha is not None:
            alphas[pattern] = alpha
    within = [each for each in adapted if _ends(each, listed)]
    chosen = [name_of(each) for each in adapted if each not in within]
    changed: Config = {"target_modules": chosen, "rank_pattern": ranks, "alpha_pattern": alphas}
    changed |= dict.fromkeys({*BY_MODULE[:2], "layers_pattern"})
    return {**config, **changed, **({"target_parameters": within} if listed else {})}


def _chosen(config: Config, modules: Modules) -> set[str]:
    """The parameters whose names end as a config's targets do, as in PEFT."""
    listed = config.get("target_modules")
    if not isinstance(listed, list):
        return set()
    named = {f"{name}.weight" for name, _ in modules.model.named_modules() if _ends(name, listed)}
    return named | {n for n in modules.stored if _ends(n, config.get("target_parameters") or ())}


def _ends(name: str, ends: Collection[str]) -> bool:
    return any(f".{name}".endswith(f".{each}") for each in ends)
