"""Recipes as files: strict YAML, or the manifest of a model.

::

    source: ./small
    steps:
      - grow: hypercloning
        hidden: x2
    output: ./large
    verify: {prompts: 8, length: 128, seed: 0}

A step is a growth (``grow: METHOD``) or a conversion (``convert: VARIANT``). ``family`` may name a
file that describes the source's family (``growkit.families.described``), or hold what stands there.
Unknown keys are errors that name the nearest match. Paths are relative to the current folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from growkit.base.errors import InputError
from growkit.base.names import NOTHING, did_you_mean, nearest, perhaps
from growkit.base.settings import Settings
from growkit.base.strict_yaml import in_yaml, read_yaml
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.made import MANIFEST
from growkit.families.described import described, load_description
from growkit.planning.operation import config_key_aliases
from growkit.recipe.operations import having, operation_of
from growkit.recipe.recipe import STEPS, Recipe, Step


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship with growkit, by name."""
    package = Path(__file__).parent.parent
    # In an installed package they lie inside it, in a checkout beside it.
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        InputError: there is none of this name; gives the nearest.
    """
    known = shipped_recipes()
    if name not in known:
        raise InputError(f"there is no recipe {name!r}; {did_you_mean(name, known, quoted=str)}")
    return known[name]


LISTED = "'growkit recipes list' lists those"

NEEDED = ("source", "steps", "output")


def recipe_file(name: Path) -> Path:
    """The file of a recipe.

    Args:
        name: a file, a model's folder, whose manifest is meant, or the name of a recipe that ships
            with growkit, where there is no file of that name.

    Raises:
        InputError: it is none of these; says what it might be.
    """
    if os.path.isdir(name) and os.path.lexists(name / MANIFEST):
        return name / MANIFEST
    if os.path.isdir(name):
        raise InputError(
            f"{name} holds no {MANIFEST}, so growkit did not make it, and it is no recipe; give a "
            "recipe (YAML) or a folder that growkit wrote"
        )
    known = shipped_recipes()
    if os.path.lexists(name) or len(name.parts) != 1:
        return name
    if str(name) not in known:
        meant = did_you_mean(name.stem, known, otherwise=LISTED, quoted=str)
        raise InputError(f"there is no file {name}, and no recipe of that name in growkit; {meant}")
    return known[str(name)]


def load_recipe(
    file: str | Path,
    source: str | None = None,
    output: str | None = None,
    otherwise: Mapping[str, str] = NOTHING,
) -> Recipe:
    """Read a recipe.

    Args:
        file: YAML, or the manifest of a model, whose recipe makes it again; or what else
            ``recipe_file`` finds one by.
        source: replaces the recipe's source.
        output: replaces the recipe's output.
        otherwise: source or output of a recipe that has none.

    Raises:
        InputError: names the key that is unknown, missing or of the wrong kind.
    """
    file = recipe_file(Path(file))
    content = _manifest(file) if file.suffix == ".json" else read_yaml(file, "recipe")
    if not isinstance(content, dict) or content.keys().isdisjoint(NEEDED):
        raise InputError(f"recipe {file} must be a mapping with source, steps and output")
    given: dict[str, Any] = {
        key: value for key, value in (("source", source), ("output", output)) if value is not None
    }
    if isinstance(content.get("family"), str):
        given["family"] = load_description(content["family"])
    return parse_recipe({**otherwise, **content} | given, str(file))


def _manifest(file: Path) -> Any:
    """The recipe in a manifest; a recipe of its own, where the JSON is no manifest."""
    content = Folder(file.parent).json(file.name)
    recipe = content.get("recipe") if "growkit" in content else content
    return _placed(recipe, file.parent) if recipe is not content else content


def _placed(recipe: Any, model: Path) -> Any:
    """The recipe of a manifest, which holds names, with the places where these are found.

    What is not in the current folder may lie beside the model. The output is the model itself.
    """
    if not isinstance(recipe, dict):
        return recipe
    beside = os.path.dirname(os.path.abspath(model))

    def found(content: Any, key: str) -> Any:
        name = content.get(key) if isinstance(content, dict) else None
        if not isinstance(name, str) or not name or os.path.lexists(name):
            return content
        path = os.path.join(beside, name)
        return content | {key: path} if os.path.lexists(path) else content

    placed = found(found(recipe, "source"), "optimizer")
    if isinstance(placed.get("steps"), list):
        placed = placed | {"steps": [found(step, "calibration") for step in placed["steps"]]}
    if isinstance(placed.get("verify"), dict):
        placed = placed | {"verify": found(placed["verify"], "text")}
    output = placed.get("output")
    if isinstance(output, str) and output and not os.path.isabs(output):
        placed = placed | {"output": str(model)}
    return placed


def parse_recipe(content: Mapping[str, Any], where: str) -> Recipe:
    """Turn the contents of a recipe file into a recipe; see ``load_recipe``."""
    _known_keys(content, [f.name for f in fields(Recipe)], where)
    for key in NEEDED:
        if not content.get(key):
            raise InputError(f"{where} has no {key}; a recipe needs source, steps and output")
    steps = content["steps"]
    if not isinstance(steps, list):
        raise InputError(
            f"steps in {where} must be a list, each beginning like '- grow: hypercloning'"
        )
    chosen: dict[str, Any] = {
        "source": _typed(content, "source", str, where),
        "output": _typed(content, "output", str, where),
        "steps": tuple(
            _parse_step(step, f"step {number} of {where}") for number, step in enumerate(steps, 1)
        ),
    }
    texts = ("dtype", "shard_size", "base_model", "optimizer", "format")
    for key, kind in (("seed", int), *((name, str) for name in texts)):
        if key in content:
            chosen[key] = _typed(content, key, kind, where)
    if content.get("family") is not None:
        described(content["family"], f"family in {where}")
        chosen["family"] = content["family"]
    if "verify" in content:
        chosen["verify"] = _parse_verify(content["verify"], f"verify in {where}")
    return Recipe(**chosen)


def _parse_step(step: Any, where: str) -> Step:
    verbs = [verb for verb in STEPS if isinstance(step, dict) and verb in step]
    if len(verbs) != 1:
        keys = [key for key in step if nearest(key, STEPS)] if isinstance(step, dict) else []
        hint = perhaps(keys[0], STEPS) if keys and not verbs else ""
        raise InputError(
            f"{where} must be a mapping with either 'grow: METHOD' or 'convert: VARIANT'{hint}"
        )
    (verb,) = verbs
    name = _typed(step, verb, str, where)
    options = operation_of(verb, name).options
    known = {option.name: option for option in options}
    _known_keys(step, [verb, *known], where, config_key_aliases(options), having)
    given = {key: value for key, value in step.items() if key != verb}
    for key, value in given.items():
        known[key].check_kind(value, f"{key} in {where}", in_yaml)
    return STEPS[verb](name, given)


def _parse_verify(content: Any, where: str) -> Settings | None:
    if content is False:
        return None
    if content is True:
        return Settings()
    if not isinstance(content, dict):
        raise InputError(
            f"{where} must be true, false or a mapping like {{prompts: 8, length: 128}}"
        )
    kinds: dict[str, Any] = {"text": str, "prompts": int, "length": int, "seed": int}
    kinds |= {"device": str, "trainability": bool, "max_kl": (int, float), "steps": int}
    _known_keys(content, kinds, where)
    return Settings(**{key: _typed(content, key, kinds[key], where) for key in content})


def _known_keys(
    content: Mapping[str, Any],
    known: Collection[str],
    where: str,
    called: Mapping[str, str] = NOTHING,
    having: Callable[[str, Collection[str]], str] = lambda key, known: "",
) -> None:
    for key in content:
        if key not in known:
            meant = having(str(key), known) or did_you_mean(key, known, called)
            raise InputError(f"{where} has an unknown key {key!r}; {meant}")


def _typed(content: Mapping[str, Any], key: str, kind: Any, where: str) -> Any:
    value = content[key]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        kinds = cast("tuple[type, ...]", kind if isinstance(kind, tuple) else (kind,))
        names = {
            str: "text",
            int: "a whole number",
            float: "a number",
            list: "a list",
            bool: "true or false",
        }
        expected = dict.fromkeys(
            "a number such as 0.01" if float in kinds else names[k] for k in kinds
        )
        raise InputError(
            f"{key} in {where} is {in_yaml(value)}; {' or '.join(expected)} was expected"
        )
    return value
