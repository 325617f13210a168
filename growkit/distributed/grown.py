"""A model that a recipe makes, any part of which can be computed without writing the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from growkit.base.errors import InputError
from growkit.checkpoint.model_files import check_carried
from growkit.checkpoint.reading import outlined
from growkit.checkpoint.tensors import Config, Weights
from growkit.distributed.entries import Entries, Entry
from growkit.distributed.recorded import check_recorded
from growkit.families.added import stranger, temporary_family
from growkit.families.family import family_of
from growkit.recipe.files import load_recipe, recipe_file
from growkit.recipe.planner import plan
from growkit.recipe.recipe import Recipe
from growkit.sources import find

if TYPE_CHECKING:
    from growkit.optimizer.growing import GrownState


class Grown:
    """What a recipe makes of its source, computed when it is read.

    The source is opened as ``growkit.run`` opens it, and the same plan is made.

    Args:
        recipe: see ``growkit.run``; of a model's manifest the source must be the recorded one.
        source: replaces the recipe's source.
        together: whether all processes that torchrun has started make it; see ``check_recorded``.

    Attributes:
        recipe: what is done.
        source: the checkpoint.
        lineage: from the source to the target.
        entries: every tensor of the target's files.

    Raises:
        InputError: the recipe or the source cannot be used, or what it makes has to be written
            first, since its last bits depend on the machine.
    """

    def __init__(
        self,
        recipe: Recipe | str | Path,
        source: str | Path | None = None,
        *,
        together: bool = False,
    ) -> None:
        file = None if isinstance(recipe, Recipe) else recipe_file(Path(recipe))
        chosen = None if source is None else str(source)
        if not isinstance(recipe, Recipe):
            recipe = load_recipe(Path(recipe), chosen)
        manifest = file is not None and file.suffix == ".json"
        family = stranger(recipe.family) if manifest else recipe.family
        self.recipe = replace(recipe, source=chosen or recipe.source, family=family)
        with temporary_family(self.recipe.family):
            self.source = find(self.recipe.source).open()
            check_carried(self.source.opened)
            if file is not None and manifest:
                check_recorded(file, self.source, together=together)
            self.lineage = plan(self.recipe, self.source).lineage
            self._check()
            named = family_of(self.target.config, self.recipe.output).named(self.target.config)
            self.config: Config = dict(named)
        self.entries = entries_of(self.target)

    @property
    def target(self) -> Weights:
        """What is made."""
        return self.lineage.target

    @property
    def whole(self) -> list[str]:
        """Tensors that every process computes as a whole, to take its part of them."""
        return [name for name, entry in self.entries.items() if not entry.cuts]

    def beside(self, name: str) -> Config | None:
        """A JSON file beside the weights of the source; None if there is none."""
        return self.source.opened.json(name) if self.source.opened.has(name) else None

    def _check(self) -> None:
        self.lineage.check_duplicates()
        for name in self.target.tensors:
            if not self.lineage.repeatable(name):
                raise InputError(
                    f"tensor {name} is computed with singular vectors, whose last bits depend on "
                    "the machine, so that processes need not agree; write the model with growkit "
                    "run, and load that"
                )

    @cached_property
    def by_class(self) -> Entries:
        """Every parameter and persistent buffer that the model's class makes of the files.

        Raises:
            InputError: transformers has no class for the model, or it does not fit.
        """
        import torch

        from growkit.engine.class_weights import ClassWeights, empty_model
        from growkit.engine.loader import loading

        found: dict[str, Entry] = {}
        with temporary_family(self.recipe.family), outlined(self.target, self.config) as outline:
            model, _, stored = empty_model(outline, torch.float32, "eager")
            weights = ClassWeights(cast(Any, self.target), loading(outline).conversions)
            for name in model.state_dict():
                of = stored(name)  # of tied parameters, files hold one
                if of in weights.tensors:
                    plain = weights.stored_as(of)
                    found[name] = self.entries[plain] if plain else Entry(weights, of)
        return Entries(found)

    @cached_property
    def optimizer(self) -> GrownState | None:
        """The state of the grown optimizer; None if the recipe takes none along.

        Raises:
            InputError: it cannot be read, or is of another model.
        """
        if self.recipe.optimizer is None:
            return None
        from growkit.optimizer.optimizer import Optimizer
        from growkit.planning.updates import law_of

        with temporary_family(self.recipe.family), outlined(self.target, self.config) as outline:
            optimizer = Optimizer(Path(self.recipe.optimizer), self.source, self.lineage)
            return optimizer.grown(outline, law_of(self.lineage))

    def moments(self) -> Mapping[str, Entry]:
        """The optimizer's tensors, by the name ``parameter.kind``."""
        state = self.optimizer
        return {} if state is None else entries_of(state)


def entries_of(weights: Weights) -> Entries:
    """All tensors, by their own names."""
    return Entries({name: Entry(weights, name) for name in weights.tensors})
