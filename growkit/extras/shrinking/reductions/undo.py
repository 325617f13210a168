"""The model from which a folder was grown, from the grown weights and the folder's manifest.

Growing writes several copies of what a layer writes, and parts of what it reads, whose sum is the
weight. So the mean of copies and the sum of parts give the source back: bit for bit if nothing has
changed the grown weights, else by least squares. What a growth added besides, such as layers that
return their input, and routers, is left out.

The promise is *exact* only if the result, grown again, gives every bit of the grown model. The
distance between the two says how far training has moved the grown model from all models that could
have been grown.
"""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from growkit.algebra.update_law import Update
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor
from growkit.base.tensors import STORED_NAMES, Weights, same_numbers
from growkit.base.workers import workers
from growkit.extras.shrinking.inverse_plan import Inverse, Undone, inverses, sources_of
from growkit.extras.shrinking.kept_tokens import kept_tokens
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.publishing import MANIFEST
from growkit.model.checkpoint.reading import Widened, rounded
from growkit.model.families.family import Family, Layer, family_of
from growkit.model.model import Headers, Model
from growkit.planning.manifest import read_record, without_searches
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Lineage, Plan, Planned
from growkit.planning.transforms import Slices, Transform


class Undo(Operation):
    """See the module."""

    name = "undo"
    paper = "-"

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        growth = _growth_of(source)
        plan = _plan(source, growth)
        lineage = growth.lineage
        away = _distance(source, growth.again(Planned(source, plan)))
        lost = [lineage.lost] if lineage.lost else []
        if away.total:
            lost.append(
                f"what copies differ in: the weights are {away.total:.2g} of their norm from those "
                f"of any grown model (most, {away.largest:.2g}, in {away.tensor})"
            )
        return Change(
            [plan],
            "different" if away.total else lineage.promise,
            "; ".join(lost),
            by_rounding=lineage.by_rounding and not away.total,
            by_ties=lineage.by_ties and not away.total,
        )


@dataclass(frozen=True)
class _Growth:
    """How a model was grown.

    Attributes:
        before: headers of what it was grown from, rounded if the recipe rounds it.
        dtype: the dtype in which it was grown; None for its own.
        lineage: the steps, from headers alone.
        steps: the way back.
    """

    before: Model
    dtype: str | None
    lineage: Lineage
    steps: Sequence[Inverse]

    def again(self, source: Model) -> Lineage:
        """Grow a model like that from which the model was grown."""
        wide = Widened(source, self.dtype) if self.dtype else source
        return Lineage(wide, self.lineage.plans)


def _growth_of(source: Model) -> _Growth:
    """Read how a model was grown.

    Raises:
        InputError: no manifest says it, or it is that of another model.
    """
    from growkit.engine.recipe_planning import plan_recipe  # imports torch
    from growkit.engine.user_family import described_family
    from growkit.model.families.family import unlisted_family

    folder = Folder(source.where())
    if isinstance(source, Planned):
        raise InputError(
            f"only the growth of {folder} itself can be undone, not what steps before made of it; "
            "make shrink: undo the first step"
        )
    recipe = read_record(folder)
    if recipe is None:
        raise InputError(
            f"{folder} has no {MANIFEST}, which says how it was grown; copy that of the model that "
            "was grown next to its weights, or leave out what changes nothing (--method unused)"
        )
    if any(step.verb == "shrink" for step in recipe.steps):
        raise InputError(f"{folder} was made smaller itself, which cannot be undone")
    family = described_family(unlisted_family(recipe.family))
    headers = source_headers(folder, source.tensors, family)
    lineage = plan_recipe(without_searches(recipe, source), headers).lineage
    planned, stored = (
        {name: [*info.shape] for name, info in model.tensors.items()}
        for model in (lineage.target, source)
    )
    for name in sorted(planned.keys() | stored.keys()):
        if planned.get(name) != stored.get(name):
            raise InputError(
                f"tensor {name} in {source.where()} has shape {stored.get(name)}, but "
                f"{planned.get(name)} by its {MANIFEST}; copy that of the model that was grown"
            )
    narrower = rounded(headers, recipe.dtype)
    before = lineage.source if narrower else headers
    return _Growth(before, recipe.dtype, lineage, inverses(lineage))


ADDED = "growth added it"
"""Reason to drop a tensor."""


def _plan(source: Model, growth: _Growth) -> Plan:
    """The plan of the model from which another was grown.

    Raises:
        InputError: a tensor of it cannot be recovered.
    """
    before = growth.before
    family = before.family
    transforms: dict[str, Transform] = {}
    for name in family.patterns(before.config):
        if name not in growth.steps[-1].copies:
            raise InputError(
                f"{name} of {before.where()} cannot be recovered, since a step computed something "
                "else from it; only steps that copy weights can be undone"
            )
        names = sources_of(growth.steps, name)
        transforms[name] = _Recovered(name, tuple(names), growth, dtype=before.tensors[name].dtype)
    computed = [layer.computes for layer in growth.lineage.layers or ()]
    layers = [Layer(computed.index(of)) for of in range(before.sizes["layers"]) if computed]
    old = before.sizes["vocab"]
    return Plan.checked(
        source,
        before.config,
        transforms,
        family,
        ADDED,
        layers=tuple(layers) or None,
        tokens=kept_tokens(range(old)) if old < source.sizes["vocab"] else None,
        again=growth.again,
    )


@dataclass(frozen=True, eq=False)
class _Recovered(Transform):
    """A tensor of the model from which another was grown.

    Attributes:
        name: its name.
        names: the tensors of the grown model from which it is recovered.
        growth: the growth.
        dtype: see ``Transform``.
    """

    name: str
    names: tuple[str, ...]
    growth: _Growth
    dtype: str | None = None
    why: str = "as it was before it was grown"

    @property
    def sources(self) -> tuple[str, ...]:
        """See ``Transform``."""
        return self.names

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``."""
        weights = source
        stages = self.growth.lineage.stages[-2::-1]
        for step, stage in zip(self.growth.steps, stages, strict=True):
            weights = Undone(weights, step, stage.tensors)
        return weights.read(self.name, *where).to(self.growth.before.tensors[self.name].torch_dtype)

    def update(self, before: Sequence[Update]) -> Update:
        """See ``Transform``; it trains like the model from which the other was grown."""
        return Update()


class _Distance(NamedTuple):
    """How far a model is from another, in norms of the model.

    Attributes:
        total: of all weights.
        largest: of the weights of a tensor.
        tensor: name of that tensor.
    """

    total: float
    largest: float
    tensor: str


def _distance(model: Model, again: Lineage) -> _Distance:
    """Compare a model with what grows again, except for what differs from machine to machine."""
    names = [name for name in again.target.tensors if again.repeatable(name)]
    with workers(os.cpu_count() or 1) as pool:
        squares = [*pool.map(partial(_squares, model, again.target), names)]
    away, size = map(sum, zip(*squares, strict=True))
    parts = [(one / of) ** 0.5 if of else float(one > 0) for one, of in squares]
    largest = max(parts)
    return _Distance((away / size) ** 0.5, largest, names[parts.index(largest)])


def _squares(model: Model, other: Model, name: str) -> tuple[float, float]:
    """The sums of the squares of differences and of weights of a tensor, in two models."""
    away = size = 0.0
    start = 0
    for block in other.blocks(name):
        rows = slice(start, start + (len(block) if block.dim() else 1))
        start = rows.stop
        stored = model.read(name, rows)
        size += float(stored.double().square().sum())
        if not same_numbers(stored, block):
            away += float((stored.double() - block.double()).square().sum())
    return away, size


def source_headers(target: Folder, names: Collection[str], described: Family | None) -> Headers:
    """The headers of the model from which a folder was made, as its manifest records them.

    Args:
        target: the folder, with a manifest.
        names: the names of its tensors, which are stored in the form of the source's.
        described: a family that the manifest describes.

    Raises:
        InputError: the manifest is damaged, or of a version that does not record them.
    """
    file, recorded = target.path / MANIFEST, target.json(MANIFEST).get("source_model")
    match recorded:
        case {"config": dict(config), "dtype": str(main), "other_dtypes": dict(others)} if {
            main,
            *others.values(),
        } <= STORED_NAMES.keys():
            pass
        case _:
            raise InputError(
                f"{file} does not record the config and the dtypes of the source "
                f"('source_model'); make the folder again with 'growkit run {file}'"
            )
    where = f"the model from which {target} was made"
    family = family_of(config, where, described).as_stored(config, names)
    headers = Headers(family, config, where)
    headers.tensors = {
        name: replace(info, dtype=others.get(name, main)) for name, info in headers.tensors.items()
    }
    return headers


OPERATION = Undo()
