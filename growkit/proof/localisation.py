"""Where two models first part, inside a layer, and the most likely cause.

Both run once more up to the first layer that differs. What its modules hand on is compared row by
row: rows of the target are copies of rows of the source, as the maps of the plan say; or, where no
plan is known, the named axes of the family. The first module in the order of computation that does
not copy is at fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growkit.algebra.axes import Pattern, Role
from growkit.algebra.expansion import index_map, side_by_side
from growkit.base.errors import InputError
from growkit.base.limits import within, within_each
from growkit.base.tensors import TORCH_NAMES, Config, Weights, main_dtype
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.oracle import lacks_class
from growkit.engine.strict import strict_float64
from growkit.families.description import Tensor as Described
from growkit.families.description import component_of
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.family import Family, stored_family
from growkit.growth.expanding import placed_copies
from growkit.planning.lineage import Lineage
from growkit.proof.config import SHARED, different_settings
from growkit.proof.copies import AsClass, Copied, Copies, copied_states, error_of
from growkit.results.proof import Fault

GIVEN = "given"
"""Key of the input of the layer itself, next to the outputs of its modules."""

TINY = torch.finfo(torch.float64).tiny
"""Keeps zeros from being divided by."""


def module_outputs(model: Layerwise, layer: str, ids: Tensor) -> dict[str, Tensor]:
    """What every module of a layer is given and returns, each [tokens, rows]."""
    found: dict[str, Tensor] = {}

    def keep(name: str, values: Any) -> None:
        first = values[0] if isinstance(values, tuple) and values else values
        rows = first[0] if isinstance(first, Tensor) and first.dim() == 3 else first
        if isinstance(rows, Tensor) and rows.dim() == 2 and len(rows) == len(ids):
            found.setdefault(name, rows.detach())

    def before(name: str, module: nn.Module, inputs: Any) -> None:
        keep(f"{name}:{GIVEN}" if name else GIVEN, inputs)

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        keep(name, output)

    with ExitStack() as hooks:
        for name, module in model.model.get_submodule(layer).named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name)))
            hooks.enter_context(module.register_forward_hook(partial(after, name)))
        for stage in model.stages([Call(ids)]):
            if stage.name == layer:
                break
    return found


TOKENS = 64
"""Tokens of the prompt that are looked at."""


def find_fault(
    before: Checkpoint,
    after: Checkpoint,
    lineage: Lineage | None,
    ids: Tensor,
    layer: tuple[int, str],
    tolerance: float,
    device: torch.device,
) -> Fault:
    """Look into the first layer that differs.

    Args:
        before: the source.
        after: the target.
        lineage: how the target was made, if that is known.
        ids: a prompt on which they differ, [tokens].
        layer: index of the layer in the target, and the name of the source's layer that it was
            compared with.
        tolerance: relative error that is only rounding.
        device: where to run.

    Returns:
        The component, the tensor and the cause, as far as they are known.
    """
    with suppress(InputError):
        one, other = _in_one_pattern(before, after)
        keys = _differing_keys(one, other, lineage)
        copies = Copies(lineage, one, other) if lineage else None
        inside = _LayerOutputs(one, other, copies, ids[:TOKENS], layer, device)
        for part in inside.parts(tolerance):
            if not within(part.error, tolerance):
                factor, cause = cause_of(part, tolerance, spacing(after))
                if keys and part.component in (inside.first, "attention", "mlp"):
                    cause = f"the configs differ in {', '.join(keys)}"
                weight = other.stored(f"{part.module}.weight")
                return Fault(
                    layer=layer[0],
                    component=part.component,
                    tensor=weight.tensor if weight else None,
                    cause=cause,
                    factor=factor,
                )
    return Fault(layer=layer[0], component=None, tensor=None, cause=None, factor=None)


def _in_one_pattern(before: Checkpoint, after: Checkpoint) -> tuple[AsClass, AsClass]:
    """Both models, so that their modules have the same names and meanings."""
    models = before, after
    families = [DIFF if lacks_class(each.config) else stored_family(each) for each in models]
    apart = families[0].name != families[1].name and all(each.form for each in families)
    one, other = (
        AsClass(each, as_diff=apart and family is not DIFF)
        for each, family in zip(models, families, strict=True)
    )
    return one, other


def _differing_keys(before: AsClass, after: AsClass, lineage: Lineage | None) -> list[str]:
    """Keys of the config, other than sizes, in which a target is not what it should be.

    The reference is the plan's config, or the source's if there is no plan.
    """
    expected, found = before.weights.config, after.weights.config
    if lineage:
        expected = after.config_of(lineage.target.config)
    family = stored_family(after.weights)
    changed, named = different_settings(family.complete(expected), family.complete(found))
    return sorted({*changed, *named} - (SHARED - {"rope_parameters"}) - {"use_cache"})


class _LayerOutputs:
    """The outputs of the modules of a layer, in both models."""

    def __init__(
        self,
        before: AsClass,
        after: AsClass,
        copies: Copies | None,
        ids: Tensor,
        layer: tuple[int, str],
        device: torch.device,
    ) -> None:
        self._copies = copies
        self._weights = before.weights, after.weights
        families = [stored_family(each) for each in self._weights]
        # Only where no plan is known: sizes say what may be a copy of what.
        self._family = families[0]
        self._before, self._after = (
            {name: tensor for name, tensor, _ in family.members(each.config)}
            for family, each in zip(families, self._weights, strict=True)
        )
        with strict_float64():
            models = [
                Layerwise(each.to_be_run, torch.float64, device, "eager")
                for each in (before, after)
            ]
            self._embeddings = [f"{model.names[0]}.weight" for model in models]
            self._inside = layer[1], models[1].names[layer[0] + 1]
            self._expected, self._found = (
                module_outputs(model, name, ids)
                for model, name in zip(models, self._inside, strict=True)
            )
        self.first = next(iter(self._components(self._inside[1])), None)

    def parts(self, tolerance: float) -> Iterator[ComponentOutput]:
        """The outputs of the components of the layer, in the order of computation.

        Nothing, if the two layers are given different things: they do not belong together.
        """
        given, handed = self._expected.pop(GIVEN), self._found.pop(GIVEN)
        hidden = self._copies and self._copies.of(self._embeddings[1], self._embeddings[0], 1)
        if (
            hidden
            and len(hidden.source) == handed.shape[1]
            and not within(error_of(handed, hidden.expected(given)), tolerance)
        ):
            return
        grown = handed.shape[1] // given.shape[1]
        one, tiled = given.repeat_interleave(grown, 1), given.repeat(1, grown)
        # growkit repeats the whole space; other tools may put copies next to each other.
        adjacent = one.shape == handed.shape and error_of(handed, one) < error_of(handed, tiled)
        configs = [each.config for each in self._weights]
        # Copies of heads may be in one of two orders: the right one explains more modules.
        orders = [
            _BySize(self._family, *configs, adjacent=adjacent, whole_groups=whole)
            for whole in (False, True)
        ]
        sizes = orders[0] if self._copies else min(orders, key=self._apart)
        for name, rows, output in self._compared(sizes):
            module = ".".join(filter(None, (self._inside[1], name.partition(":")[0])))
            components = set(self._components(module))
            if len(components) == 1:
                component = "attention" if ":" in name else components.pop()
                yield ComponentOutput(component, module, rows, output, sizes.head_dim)

    def _apart(self, sizes: _BySize) -> float:
        """How much of the modules' outputs would be no copy."""
        compared = self._compared(sizes)
        return sum(
            min(1.0, float((rows - found).abs().max() / found.abs().max().clamp_min(TINY)))
            for _, rows, found in compared
        )

    def _components(self, module: str) -> list[str]:
        described = (each for name, each in self._after.items() if name.startswith(f"{module}."))
        return [component_of(each) for each in described]

    def _compared(self, sizes: _BySize) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Every output that the target should have, as far as that is known, and has."""
        for name, output in self._found.items():
            rows = self._rows(name, sizes) if name in self._expected else None
            if rows is not None and rows.shape == output.shape:
                yield name, rows, output

    def _rows(self, name: str, sizes: _BySize) -> Tensor | None:
        """The expected output of the target, [tokens, rows]; None if that is not known."""
        inner, _, side = name.partition(":")
        role = Role.READ if side else Role.WRITTEN
        given, width = self._expected[name], self._found[name].shape[1]
        prefixes = [f"{each}.{inner}." for each in self._inside]
        for tensor, described in reversed(self._after.items()):
            if not tensor.startswith(prefixes[1]):
                continue
            rest = tensor.removeprefix(prefixes[1])
            dimensions = Pattern.parse(described.pattern).dimensions
            shape = self._weights[1].tensors[tensor].shape
            chosen = [i for i, each in enumerate(dimensions) if each.role is role]
            place = next((i for i in chosen if shape[i] == width), None)
            if place is None:
                continue
            axes = dimensions[place].axes
            if role is Role.READ and not (axes & self._family.grouped and "." not in rest):
                continue
            source = prefixes[0] + rest
            copied = None
            if self._copies and axes == {"hidden"}:  # also where tensors are put together
                copied = self._copies.of(self._embeddings[1], self._embeddings[0], 1)
            elif self._copies:
                copied = self._copies.of(tensor, source, place)
            if copied is None or len(copied.source) != width:
                # What the source holds in several matrices has the rows that it has in one.
                copied = sizes.of(self._before.get(source, described), role)
            if copied is not None and int(copied.source.max()) < given.shape[1]:
                rows = copied.expected(given)
                return rows / copied.factor if role is Role.READ else rows
        return None


class _BySize:
    """Which row of the source each row of the target copies, as far as sizes say."""

    def __init__(
        self, family: Family, before: Config, after: Config, *, adjacent: bool, whole_groups: bool
    ) -> None:
        self._old, self._new = family.sizes(before), family.sizes(after)
        self.head_dim = self._old.get("head_dim", 1)
        grown = {
            axis: self._new[axis]
            for axis, size in self._old.items()
            if size and self._new.get(axis) and self._new[axis] % size == 0
        }
        self._expansions = placed_copies(
            family, before, self._old, grown, whole_groups=whole_groups
        )
        if adjacent and "hidden" in grown:
            times = grown["hidden"] // self._old["hidden"]
            self._expansions["hidden"] = side_by_side(self._old["hidden"], times)

    def of(self, tensor: Described, role: Role) -> Copied | None:
        """The source's row of every row of the target; None if that is not known."""
        dimensions = Pattern.parse(tensor.pattern).dimensions
        dimension = next((each for each in dimensions if each.role is role), None)
        if dimension is None or not dimension.axes <= self._expansions.keys():
            return None
        order = tensor.order if role is Role.WRITTEN else None
        orders = (order(self._old), order(self._new)) if order else None
        index = index_map(dimension, self._old, self._expansions, orders)
        return Copied(torch.from_numpy(index.source))


@dataclass(frozen=True)
class ComponentOutput:
    """The output of one component: rows of the source as the target should have them, and has."""

    component: str
    module: str
    expected: Tensor  # [tokens, rows of the target]
    found: Tensor  # [tokens, rows of the target]
    head_dim: int = 1

    @property
    def error(self) -> float:
        """Largest difference, relative to the scale of what is expected."""
        return error_of(self.found, self.expected)


def spacing(weights: Weights) -> float:
    """Relative spacing of the numbers that most weights are stored in."""
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[main_dtype(weights.tensors)])
    return float(torch.finfo(dtype).eps)


def cause_of(
    part: ComponentOutput, tolerance: float, spacing: float
) -> tuple[float | None, str | None]:
    """The most likely cause of a difference, and the factor if it is one.

    Weights that were multiplied were rounded, too: to numbers that are ``spacing`` apart.
    """
    expected, found = part.expected, part.found
    product = float((expected * found).sum())
    factor = product / float(expected.square().sum().clamp_min(TINY))
    slack = tolerance + spacing
    room = slack * (1 + abs(factor - 1))
    if not within(abs(factor - 1), slack) and _close(found, factor * expected, room):
        return factor, f"everything is multiplied by {factor_said(factor, spacing)}"
    if part.component == "attention":
        return None, (
            "queries, keys and values agree: λ, the head norm, the rotation or the mask differs"
        )
    off = (found - expected).abs().amax(0)
    wrong = (~within_each(off, tolerance * _scale(expected))).nonzero()[:, 0]
    moved = _moved(expected, found, wrong, tolerance)
    if moved is not None:
        heads = part.component in ("q_proj", "k_proj", "v_proj")
        inside = bool((moved // part.head_dim == wrong // part.head_dim).all())
        if heads and inside:
            return None, "rows inside heads are in another order, as in RoPE layouts"
        if heads and bool((moved % part.head_dim == wrong % part.head_dim).all()):
            return None, "heads are in another order"
        return None, f"{len(wrong)} rows are in another order"
    ratio = (found * expected).sum(0) / expected.square().sum(0).clamp_min(1e-300)
    by_row = _close(found, expected * ratio, slack * (1 + float((ratio - 1).abs().max())))
    share = f"{len(wrong)} of {expected.shape[1]} rows"
    if by_row:
        one = ratio[wrong]
        if bool(within_each((one - one[0]).abs(), slack * one[0].abs()).all()):
            first = float(one[0])
            return first, f"{share} are multiplied by {factor_said(first, spacing)}"
        return None, f"{share} are multiplied, each by a number of its own"
    return None, f"{share} have other weights"


def factor_said(factor: float, spacing: float) -> str:
    """A factor in words, with the digits that weights have whose numbers are so far apart."""
    digits = min(6, math.ceil(-math.log10(spacing)))
    return f"{'about ' if digits < 6 else ''}{factor:.{digits}g}"


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether every row and every token is as expected, on average over the other.

    The rounding of weights grows with what they are multiplied with: single products of a large
    activation are further off than the average, so no single one decides. Rows and tokens that are
    smaller than the average may be off by as much as that.
    """
    for over in (0, 1):
        off, scale = ((found - expected).square().mean(over).sqrt(), expected.square().mean(over))
        limit = tolerance * scale.sqrt().clamp_min(_scale(expected))
        if not bool(within_each(off, limit).all()):
            return False
    return True


def _scale(values: Tensor) -> Tensor:
    """The root mean square of all values."""
    return values.square().mean().sqrt()


def _moved(expected: Tensor, found: Tensor, wrong: Tensor, tolerance: float) -> Tensor | None:
    """For each wrong row, the row whose place it took; None if they are not permuted rows."""
    if len(wrong) < 2:
        return None
    # By products of matrices, which is faster, small distances would drown in rounding.
    exactly = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(found[:, wrong].T, expected[:, wrong].T, compute_mode=exactly)
    nearest = distances.argmin(1)
    scale = _scale(expected) * expected.shape[0] ** 0.5
    if not bool(within_each(distances.amin(1), tolerance * scale).all()):
        return None
    return wrong[nearest]


def find_fault_outside_layers(
    source: Layerwise,
    target: Layerwise,
    copied: Copied | None,
    given: tuple[Tensor, Tensor] | Tensor,
    tolerance: float,
    factor: float | None,
    spacing: float,
) -> Fault:
    """Look at the embeddings; or behind the layers, where all of them agree. In strict float64.

    Args:
        source: the source.
        target: the target.
        copied: what the target's hidden states hold, if that is known.
        given: a prompt whose embeddings differ, [tokens]; or the outputs of both last layers, each
            [tokens, hidden].
        tolerance: relative error that is only rounding.
        factor: by which all logits are multiplied, if that is all.
        spacing: relative spacing of the numbers that the target is stored in.
    """
    models = source, target
    if isinstance(given, Tensor):
        one, other = (next(model.stages([Call(given)])).after[0] for model in models)
    else:
        one, other = (_given_to_head(model, end) for model, end in zip(models, given, strict=True))
    copied = copied_states(one, other, copied)
    if copied is None:
        return Fault(layer=None, component=None, tensor=None, cause=None, factor=factor)
    expected = copied.expected(one)
    if isinstance(given, Tensor):
        name, component = f"{target.names[0]}.weight", "embedding"
        part = ComponentOutput(component, name, expected, other)
        rows = ~within_each((other - expected).abs().amax(1), tolerance * _scale(expected))
        factor, cause = cause_of(part, tolerance, spacing)
        if factor is None:
            cause = f"the embeddings of {int(rows.sum())} of {len(given)} tokens differ"
        return Fault(layer=None, component=component, tensor=name, cause=cause, factor=factor)
    # The norm writes copies, or for a tied head parts that sum up to the source's.
    if not source.stores(f"{source.names[-1]}.weight"):
        expected, other = one, copied.summed(other, one.shape[1]) * copied.factor
    agree = within(error_of(other, expected), tolerance)
    name = f"{target.names[-1]}.weight"
    times = "" if factor is None else factor_said(factor, spacing)
    return Fault(
        layer=None,
        component="lm_head" if agree else "norm",
        tensor=name if agree and target.stores(name) else None,
        cause=f"all logits are multiplied by {times}" if times else None,
        factor=factor,
    )


def _given_to_head(model: Layerwise, end: Tensor) -> Tensor:
    given: list[Tensor] = []
    head = model.model.get_submodule(model.names[-1])
    hook = head.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0][0]))
    with hook, model.head() as run:
        run(end[:TOKENS])
    return given[0]
