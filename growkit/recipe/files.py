"""Recipes as files: strict YAML, or the manifest of a model.

::

    source: ./small
    steps:
      - grow: hypercloning
        hidden: x2
    output: ./large
    verify: {prompts: 8, length: 128, seed: 0}

A step is a growth (``grow: METHOD``) or a conversion (``convert: VARIANT``). ``family`` may name a
file that describes the source's family (``growkit.families.described``), or hold its contents.
Unknown keys are errors that name the nearest match. Paths are relative to the current folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import NOTHING, did_you_mean, nearest, perhaps
from growkit.base.parsing import in_yaml
from growkit.base.settings import Settings
from growkit.checkpoint.folder import Folder, read_yaml
from growkit.checkpoint.publishing import MANIFEST
from growkit.engine.user_family import load_description
from growkit.families.described import described
from growkit.recipe.recipe import STEPS, Recipe, Step

NEEDED = ("source", "steps", "output")

KINDS: dict[str, tuple[Any, str]] = {
    "str": (str, "text"),
    "int": (int, "a whole number"),
    "float": (int | float, "a number such as 0.01"),
    "bool": (bool, "true or false"),
}
"""The values of each type of field, and their name in messages."""


def shipped_recipes() -> dict[str, Path]:
    """The recipes that ship with growkit, by name."""
    package = Path(__file__).parent.parent
    # An installed package holds them, a checkout has them next to the package.
    folder = package / "recipes" if (package / "recipes").is_dir() else package.parent / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def shipped_recipe(name: str) -> Path:
    """The file of a shipped recipe.

    Raises:
        InputError: there is none of this name; names the nearest.
    """
    known = shipped_recipes()
    if name not in known:
        raise InputError(f"there is no recipe {name!r}; {did_you_mean(name, known, quoted=str)}")
    return known[name]


def recipe_file(name: Path) -> Path:
    """The file of a recipe.

    Args:
        name: a file, or the folder of a model, for its manifest; or, where there is no file of that
            name, the name of a recipe that ships with growkit.

    Raises:
        InputError: it is none of these; suggests what was meant.
    """
    if os.path.isdir(name):
        if os.path.lexists(name / MANIFEST):
            return name / MANIFEST
        raise InputError(
            f"{name} holds no {MANIFEST}, so growkit did not make it, and it is no recipe; give a "
            "recipe (YAML) or a folder that growkit wrote"
        )
    known = shipped_recipes()
    if os.path.lexists(name) or len(name.parts) != 1:
        return name
    if str(name) not in known:
        listed = "'growkit recipes list' lists those"
        meant = did_you_mean(name.stem, known, otherwise=listed, quoted=str)
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
        file: YAML, or the manifest of a model, whose recipe makes it again; or anything else by
            which ``recipe_file`` finds one.
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
    given: dict[str, Any] = {"source": source, "output": output}
    if isinstance(content.get("family"), str):
        given["family"] = load_description(content["family"])
    given = {key: value for key, value in given.items() if value is not None}
    return parse_recipe({**otherwise, **content} | given, str(file))


def _manifest(file: Path) -> Any:
    """The recipe in a manifest, or in JSON that is a recipe itself.

    A manifest names files without their folders: those that are not in the current folder are
    looked for next to the model. Its output is the model itself.
    """
    recipe: Any = Folder(file.parent).json(file.name)
    if "growkit" not in recipe:
        return recipe
    recipe = recipe.get("recipe")
    if not isinstance(recipe, dict):
        return recipe
    recipe = _placed(recipe, os.path.dirname(os.path.abspath(file.parent)))
    output = recipe.get("output")
    if isinstance(output, str) and output and not os.path.isabs(output):
        recipe["output"] = str(file.parent)
    return recipe


def _placed(content: Any, siblings: str) -> Any:
    """The same, with files that are not in the current folder by their path next to the model."""
    if isinstance(content, list):
        return [_placed(each, siblings) for each in content]
    if not isinstance(content, dict):
        return content
    found = {
        key: value if key == "family" else _placed(value, siblings)
        for key, value in content.items()
    }
    for key in ("source", "optimizer", "calibration", "text"):
        name = found.get(key)
        if isinstance(name, str) and name and not os.path.lexists(name):
            path = os.path.join(siblings, name)
            found[key] = path if os.path.lexists(path) else name
    return found


def parse_recipe(content: Mapping[str, Any], where: str) -> Recipe:
    """Turn the contents of a recipe file into a recipe; see ``load_recipe``."""
    chosen = _fields(Recipe, content, where)
    for key in NEEDED:
        if not content.get(key):
            raise InputError(f"{where} has no {key}; a recipe needs source, steps and output")
    if not isinstance(content["steps"], list):
        raise InputError(
            f"steps in {where} must be a list, each beginning like '- grow: hypercloning'"
        )
    chosen["steps"] = tuple(
        _parse_step(step, f"step {number} of {where}")
        for number, step in enumerate(content["steps"], 1)
    )
    if content.get("family") is not None:
        described(content["family"], f"family in {where}")
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
    _check_kind("str", step[verb], f"{verb} in {where}")
    for key in step:
        if step[key] is None:
            raise InputError(f"{key} in {where} is null; give a value, or leave it out")
    try:
        return STEPS[verb](step[verb], {key: step[key] for key in step if key != verb})
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _parse_verify(content: Any, where: str) -> Settings | None:
    if isinstance(content, bool):
        return Settings() if content else None
    if not isinstance(content, dict):
        raise InputError(
            f"{where} must be true, false or a mapping like {{prompts: 8, length: 128}}"
        )
    return Settings(**_fields(Settings, content, where))


def _fields(
    kind: type[Recipe | Settings], content: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Values of fields, each of the type that the class declares."""
    types = {each.name: str(each.type).removesuffix(" | None") for each in fields(kind)}
    for key, value in content.items():
        if key not in types:
            raise InputError(f"{where} has an unknown key {key!r}; {did_you_mean(key, types)}")
        if types[key] in KINDS:
            _check_kind(types[key], value, f"{key} in {where}")
    return dict(content)


def _check_kind(kind: str, value: Any, what: str) -> None:
    types, words = KINDS[kind]
    if not isinstance(value, types) or (isinstance(value, bool) and kind != "bool"):
        raise InputError(f"{what} is {in_yaml(value)}; {words} was expected")
