"""Growing while a model loads: every process computes its own part, and nothing is written.

Any part of a recipe's target can be computed without the rest, for ``from_pretrained`` or for
torch.distributed.checkpoint, which requests parts of tensors.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from growkit.base.errors import InputError
from growkit.base.tensors import TORCH_NAMES, Config, TensorInfo, Weights, full, main_dtype, slabs
from growkit.engine.class_weights import planned_parameters
from growkit.engine.device import check_subnormal_numbers
from growkit.engine.loader import check_class
from growkit.engine.recipe_planning import plan_recipe
from growkit.engine.transformers_class import fit_experts, parsed
from growkit.engine.transformers_internals import causal_class
from growkit.engine.written_config import config_to_write
from growkit.extras.optimizer.grow_state import GrownState, Optimizer
from growkit.model.checkpoint.folder import GENERATION, read_json
from growkit.model.checkpoint.publishing import own_hash
from growkit.model.checkpoint.reading import Checkpoint, outlined
from growkit.model.checkpoint.scratch import report_faults
from growkit.model.checkpoint.writing import sha256
from growkit.model.families.family import unlisted_family
from growkit.planning.own_class import runnable
from growkit.planning.recipe import Recipe, load_recipe, recipe_file
from growkit.planning.updates import law_of
from growkit.sources import family_for, find


class _Last:
    """Cache of the last tensor computed as a whole, since its parts are read one by one."""

    def __init__(self) -> None:
        self._entry: tuple[Weights, str] | None = None
        self._tensor: Tensor | None = None
        self._lock = Lock()  # transformers reads in several threads

    def read(self, weights: Weights, name: str) -> Tensor:
        with self._lock:
            if self._entry != (weights, name):
                self._entry = self._tensor = None  # never are two of them in memory
                self._tensor = weights.read(name)
                self._entry = weights, name
            assert self._tensor is not None
            return self._tensor


@dataclass(frozen=True)
class StateEntry:
    """A tensor that is computed when it is indexed, with the interface of safetensors' slices.

    Attributes:
        weights: the weights that compute it.
        name: name of the tensor in ``weights``.
        last: cache for tensors that can only be computed as a whole.
    """

    weights: Weights
    name: str
    last: _Last

    @property
    def info(self) -> TensorInfo:
        """Its shape and dtype."""
        return self.weights.tensors[self.name]

    def get_shape(self) -> list[int]:
        """Its shape."""
        return list(self.info.shape)

    def get_dtype(self) -> str:
        """Its dtype, a safetensors name."""
        return self.info.dtype

    def __getitem__(self, index: Any) -> Tensor:
        chosen = index if isinstance(index, tuple) else () if index is ... else (index,)
        where = full(self.info.shape, chosen)
        tensor = torch.empty(
            [span.stop - span.start for span in where], dtype=self.info.torch_dtype
        )
        self.fill(tensor, where)
        return tensor

    def fill(self, into: Tensor, where: list[slice]) -> None:
        """Write a part into a tensor of the part's shape, of the same dtype or a wider one.

        Raises:
            InputError: the source cannot be read.
        """
        cuts = self.weights.cuts(self.name)
        if not cuts:
            into.copy_(self.last.read(self.weights, self.name)[tuple(where)])
            return
        for slab in slabs(self.info.shape, cuts, where=where):
            inside = zip(slab, where, strict=True)
            place = tuple(slice(s.start - w.start, s.stop - w.start) for s, w in inside)
            into[place].copy_(self.weights.read(self.name, *slab))


def entries_of(weights: Weights, last: _Last) -> dict[str, StateEntry]:
    """Entries for all tensors, by name."""
    return {name: StateEntry(weights, name, last) for name in weights.tensors}


class Grown:
    """The target of a recipe, computed when it is read.

    The source is opened and planned as in ``growkit.run``.

    Args:
        recipe: see ``growkit.run``; a model's manifest requires the recorded source.
        source: replaces the recipe's source.
        together: whether all processes that torchrun has started take part; see
            ``check_recorded``.

    Attributes:
        recipe: the recipe.
        source: the source checkpoint.
        lineage: the operations from the source to the target.
        target: the weights of the target.
        entries: every tensor of the target's files.

    Raises:
        InputError: the recipe or the source cannot be used, or the target has to be written first,
            since its last bits depend on the machine.
    """

    @report_faults()
    def __init__(
        self,
        recipe: Recipe | str | Path,
        source: str | Path | None = None,
        *,
        together: bool = False,
    ) -> None:
        check_subnormal_numbers()
        manifest, chosen = None, None if source is None else str(source)
        if not isinstance(recipe, Recipe):
            file = recipe_file(Path(recipe))
            manifest = file if file.suffix == ".json" else None
            recipe = load_recipe(file, chosen)
        family = unlisted_family(recipe.family) if manifest else recipe.family
        origin = find(chosen or recipe.source)
        self.source = origin.open(family_for(origin, family))
        self.recipe = replace(recipe, source=chosen or recipe.source)
        self.source.opened.check_carried()
        if manifest:
            check_recorded(manifest, self.source, together=together)
        self.lineage = plan_recipe(self.recipe, self.source).lineage
        self.lineage.check_values()
        self.target = self.lineage.target
        self.config: Config = config_to_write(self.lineage)
        for name in self.target.tensors:
            if not self.lineage.repeatable(name):
                raise InputError(
                    f"tensor {name} is computed with singular vectors, whose last bits depend on "
                    "the machine, so that processes need not agree; write the model with growkit "
                    "run, and load that"
                )
        self._last = _Last()
        self.entries = entries_of(self.target, self._last)

    @cached_property
    def by_class(self) -> dict[str, StateEntry]:
        """Every parameter and persistent buffer of the model's class, by name.

        Raises:
            InputError: transformers has no class for the model, or the class does not fit.
        """
        weights, names = planned_parameters(self.target, self.config)
        plain = {name: weights.stored_as(of) for name, of in names.items()}
        return {
            name: self.entries[tensor] if tensor else StateEntry(weights, names[name], self._last)
            for name, tensor in plain.items()
        }

    @cached_property
    def optimizer(self) -> GrownState | None:
        """The state of the grown optimizer; None if the recipe has no optimizer.

        Raises:
            InputError: the state cannot be read, or belongs to another model.
        """
        if self.recipe.optimizer is None:
            return None
        with outlined(self.target, self.config) as outline:
            optimizer = Optimizer(Path(self.recipe.optimizer), self.source, self.lineage)
            return optimizer.grown(outline, law_of(self.lineage))

    def moments(self) -> dict[str, StateEntry]:
        """The optimizer's tensors, by the name ``parameter.kind``."""
        state = self.optimizer
        return {} if state is None else entries_of(state, self._last)


def load(
    recipe: Recipe | str | Path,
    *,
    source: str | Path | None = None,
    distributed_config: Any = None,
    **options: Any,
) -> Any:
    """Load the target of a recipe with transformers, without writing it.

    Its weights equal, bit for bit, those that ``from_pretrained`` would load from the folder that
    ``growkit.run`` writes. Every process reads only the parts of the source that it needs.

    Args:
        recipe: see ``growkit.run``. A model's manifest requires the recorded source, so that its
            proof covers the loaded model; the weights of that model need not be present.
        source: replaces the recipe's source.
        distributed_config: transformers' ``DistributedConfig``, which distributes the model over
            processes; None to load all of it in this process.
        **options: further options of ``from_pretrained``, e.g. ``dtype`` or ``device_map``.

    Returns:
        The model.

    Raises:
        InputError: the recipe or the source cannot be used, transformers has no causal language
            model for the target, or the target has to be written first.
    """
    grown = Grown(recipe, source, together=distributed_config is not None)
    opened, outcome = grown.source.opened, f"what {grown.source.where()} becomes"
    weights = runnable(grown.target)
    of_class = grown.config if weights is grown.target else weights.config
    config = parsed(of_class, f"the config of {outcome}")
    check_class(config, outcome)
    options.setdefault("dtype", config.dtype or TORCH_NAMES[main_dtype(weights.tensors)])
    if distributed_config is not None:
        options["distributed_config"] = distributed_config
    if opened.has(GENERATION):
        options.setdefault("generation_config", GenerationConfig.from_dict(opened.json(GENERATION)))
    state = entries_of(weights, _Last())
    model = causal_class(config).from_pretrained(None, config=config, state_dict=state, **options)
    fit_experts(model)
    return model


def check_recorded(manifest: Path, source: Checkpoint, *, together: bool = False) -> None:
    """Compare a source with the manifest of its target.

    Args:
        manifest: the manifest file.
        source: the checkpoint to compare.
        together: whether all processes that torchrun has started call this; the processes of one
            machine, which read the same files, then share the work.

    Raises:
        InputError: a file is not the recorded one, the model broke its promise, or the manifest was
            changed.
    """
    content = read_json(manifest)
    if "growkit" not in content:
        return  # a recipe of its own
    if content.get("kept") is False:
        raise InputError(
            f"the model of {manifest} did not keep its promise, so it should not be loaded; "
            "see the verification in there"
        )
    if not own_hash(content):
        raise InputError(
            f"{manifest} is not as growkit wrote it, so that what it makes need not be what was "
            "proved; copy it again, or give a recipe without a proof"
        )
    known = dict(content["source_files"])
    if GENERATION in content["files"]:
        known[GENERATION] = content["files"][GENERATION][1]  # as it was copied from the source
    names = [*source.model_files, *([GENERATION] if source.opened.has(GENERATION) else [])]
    if GENERATION in known and GENERATION not in names:
        raise InputError(
            f"{source.where()} has no {GENERATION}, and {manifest} was made from a model that had "
            "one; give that file, or a recipe without a proof"
        )
    for name in _shared(names) if together else names:
        if known.get(name) != sha256(source.folder / name):
            raise InputError(
                f"{source.where()}/{name} is not the file that {manifest} was made from, so its "
                "proof does not cover it; give that file, or a recipe without a proof"
            )


def _shared(names: list[str]) -> Iterable[str]:
    """The names assigned to this process, of those that torchrun has started on this machine."""
    rank, size = (os.environ.get(f"LOCAL_{name}", "") for name in ("RANK", "WORLD_SIZE"))
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        return names
    return names[int(rank) :: int(size)]
