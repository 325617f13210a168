"""The plan of a recipe without its run: files, disk, memory and time, also of huge models."""

from dataclasses import replace
from pathlib import Path

from growkit.base import tensors
from growkit.base.lazy import usual_torch
from growkit.engine import recipe_planning
from growkit.extras.inspection.results.inspection_result import LargePlan
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.reading import View
from growkit.model.checkpoint.scratch import report_faults
from growkit.model.checkpoint.writing import parse_bytes, shards_of
from growkit.model.model import Headers
from growkit.pipeline.costs import estimate
from growkit.planning import recipe as recipes
from growkit.planning.companions import companions
from growkit.results.proof_result import counted
from growkit.sources import family_for, find


@report_faults()
@usual_torch()
def plan(
    recipe: recipes.Recipe | str | Path,
    *,
    bandwidth: str | None = None,
) -> LargePlan:
    """Estimate the files, disk, memory and time of a recipe. Nothing is written.

    Args:
        recipe: as in ``growkit.run``. Only headers of its source are read, with the few tensors
            whose values decide, or only its ``config.json`` if it has no weights; weights on the
            Hub are not downloaded.
        bandwidth: bytes per second of reading and writing, e.g. ``2GB``; None if only computation
            limits the speed.

    Raises:
        InputError: the recipe cannot be executed, or its plan needs weights; or a number cannot be
            used.
    """
    limit = None if bandwidth is None else parse_bytes(bandwidth, "bandwidth")
    if isinstance(recipe, str | Path):
        recipe = recipes.load_recipe(recipes.recipe_file(Path(recipe)))
    origin = find(recipe.source, weights=False)
    source = origin.headers(family_for(origin, recipe.family))
    extra = Folder(origin.folder).carried_bytes()
    recipe = replace(recipe, source=origin.name)
    prepared = recipe_planning.plan_recipe(recipe, source)
    described = recipe_planning.planned_result(recipe, source, prepared)
    if not isinstance(source, Headers):
        prepared.lineage.check_values()
    elif deciding := prepared.lineage.deciding:
        described.warnings.append(
            f"whether this is possible depends on the values of {counted(len(deciding), 'tensor')} "
            f"(first {deciding[0]}), which this folder does not have"
        )
    target, exact = prepared.lineage.target, described.promise == "exact"
    stored = source.stored if isinstance(source, View) else source
    shards = shards_of(target.tensors, parse_bytes(recipe.shard_size))
    files = [tensors.total_bytes(shard.tensors) for shard in shards]
    sizes = (source, target), recipe.output_path, recipe.verify, extra
    for companion in companions():
        if path := companion.path(recipe):
            described.warnings.append(
                f"the estimate of the disk leaves out the grown {companion.what}, {path}; growkit "
                "run --dry-run includes it"
            )
    return LargePlan(
        **described | estimate(*sizes, exact=exact, bandwidth=limit),
        bandwidth=limit,
        read=tensors.total_bytes(stored.tensors),
        files=len(files),
        largest_file=max(files),
    )
