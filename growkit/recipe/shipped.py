"""Recipes that ship with growkit."""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path

from growkit.errors import InputError


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
        nearest = get_close_matches(name, known, n=1)
        hint = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(known)}"
        raise InputError(f"there is no recipe {name!r}; {hint}")
    return known[name]
