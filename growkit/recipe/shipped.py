"""Recipes that ship with growkit."""

from __future__ import annotations

from pathlib import Path

from growkit.errors import InputError
from growkit.names import did_you_mean


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
