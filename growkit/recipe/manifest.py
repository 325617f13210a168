"""Manifests: what a folder says of how it was made.

A manifest that growkit finds is a stranger's word. Its recipe is planned again, to know what the
weights must be; nothing else of it is believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from growkit.base.dates import given, today
from growkit.base.errors import InputError, reason
from growkit.base.paths import by_name, name_of, without_paths
from growkit.checkpoint.hashing import sha256
from growkit.checkpoint.made import MANIFEST
from growkit.checkpoint.reading import Checkpoint
from growkit.recipe.files import parse_recipe
from growkit.recipe.recipe import Recipe
from growkit.results.operation import GrowResult, OptimizerResult
from growkit.results.proof import RankCost, VerifyResult
from growkit.results.result import versions
from growkit.version import __version__

FORMAT = 2
"""Of manifests: from 2 on, the recipe of a random split gives the same bits for ever."""

MOST_COSTS = 10_000
"""Ranks, at most, whose costs are taken over from a manifest."""


def manifest_of(
    recipe: Recipe,
    result: GrowResult,
    source_files: Mapping[str, str],
    other_files: Mapping[str, str],
) -> dict[str, Any]:
    """What the manifest says of how a model was made, fit to be published: it holds no path.

    Args:
        recipe: how it was made.
        result: what was done.
        source_files: the SHA-256 of each file of the source, by its path in the source.
        other_files: the SHA-256 of each other file that was read, by its path.
    """
    return {
        "growkit": __version__,
        "format": FORMAT,
        "versions": versions(),
        "created": today(),
        "recipe": recipe.by_names().as_dict(),
        "papers": [step.paper for step in recipe.steps],
        "source_files": dict(source_files),
        "other_files": by_name(other_files),
        "promise": result["promise"],
        "lost": result["lost"],
        "kept": result["kept"],
        "source_parameters": result["source_parameters"],
        "parameters": result["parameters"],
        "bytes": result["bytes"],
        "dtype": result["dtype"],
        "rounded": result["rounded"],
        "loads_with": result["loads_with"],
        "warnings": without_paths(_paths(result["verification"], recipe))(result["warnings"]),
        "copies": result["copies"],
        "dropped": result["dropped"],
        "updates": result["updates"],
        "optimizer": _named(result["optimizer"]),
        "verification": _public(result["verification"], recipe),
    }


def _named(optimizer: OptimizerResult | None) -> dict[str, Any] | None:
    """What became of an optimizer, whose state is called by its name."""
    return {**optimizer, "path": name_of(optimizer["path"])} if optimizer else None


def _public(proof: VerifyResult | None, recipe: Recipe) -> dict[str, Any] | None:
    """A proof whose sentences and files are those of no machine.

    Where a date is given, it also says nothing of how long it took.
    """
    if proof is None:
        return None
    files = _files(proof)
    public = without_paths(_paths(proof, recipe))
    took = proof["seconds"] if given() is None else None
    named = {key: name_of(path) for key, path in files.items()}
    return {**public(proof), **named, "seconds": took}


def _files(proof: VerifyResult) -> dict[str, str]:
    """What a proof read, by what it is."""
    return {key: proof[key] for key in ("source", "target", "text") if proof[key] is not None}


def _paths(proof: VerifyResult | None, recipe: Recipe) -> list[str]:
    """Folders and files that sentences may name."""
    return [recipe.source, recipe.output, *(_files(proof).values() if proof else ())]


@dataclass(frozen=True)
class Record:
    """What a manifest says.

    Attributes:
        recipe: how the folder was made; None if there is no manifest.
        kl_by_rank: what ranks cost that were tried for it.
    """

    recipe: Recipe | None = None
    kl_by_rank: tuple[RankCost, ...] = ()


def read_record(target: Checkpoint) -> Record:
    """What the manifest of a folder says, if there is one.

    Raises:
        InputError: it is damaged, or says nothing of how the folder was made.
    """
    if not target.opened.has(MANIFEST):
        return Record()
    file = target.folder / MANIFEST
    manifest = target.opened.json(MANIFEST)
    recipe = manifest.get("recipe")
    if not isinstance(recipe, dict):
        raise InputError(f"{file} holds no recipe; remove the file to compare logits alone")
    try:
        found = parse_recipe(recipe, str(file))
    except InputError:
        raise
    except Exception as error:  # a stranger's values may raise anything
        raise InputError(
            f"the recipe in {file} cannot be read ({reason(error)}); remove the file to compare "
            "without it"
        ) from None
    return Record(found, _costs(manifest.get("verification")))


def changed_since(target: Checkpoint, names: Sequence[str]) -> list[str]:
    """Those of some files of a folder that are not what its manifest recorded; none without one."""
    if not target.opened.has(MANIFEST):
        return []
    recorded = target.opened.json(MANIFEST).get("files")
    known = recorded if isinstance(recorded, dict) else {}
    return [
        name
        for name in names
        if known.get(name)
        != [target.opened.require(name).stat().st_size, sha256(target.folder / name)]
    ]


def _costs(verification: Any) -> tuple[RankCost, ...]:
    """What ranks cost, as far as a manifest gives whole ranks and finite costs."""
    costs = verification.get("kl_by_rank") if isinstance(verification, dict) else None
    if not isinstance(costs, list):
        return ()
    found = [each for each in costs[:MOST_COSTS] if isinstance(each, Mapping) and _is_cost(each)]
    return tuple(
        RankCost(rank=each["rank"], kl_nats_per_token=each["kl_nats_per_token"]) for each in found
    )


def _is_cost(each: Mapping[str, Any]) -> bool:
    rank, cost = each.get("rank"), each.get("kl_nats_per_token")
    if not isinstance(rank, int) or not isinstance(cost, int | float):
        return False
    return not isinstance(rank, bool) and 0 < rank < 2**31 and abs(cost) < 1e300
