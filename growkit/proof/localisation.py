"""Where two models first part, inside a layer, and the most likely cause.

Both run once more up to the first layer that differs. What its modules hand on is compared row by
row: rows of the target are copies of rows of the source, as the named axes of the family say. The
first module in the order of computation that does not copy is at fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from growkit.algebra.axes import Dimension, Pattern, Role
from growkit.algebra.expansion import in_blocks, index_map, side_by_side
from growkit.checkpoint.tensors import TORCH_NAMES, Config, Weights, main_dtype
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.oracle import readable
from growkit.engine.strict import strict_float64
from growkit.errors import InputError
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.family import Family, stored_family
from growkit.planning.layouts import read_layout
from growkit.planning.plan import Planned
from growkit.results.proof import Fault

TOKENS = 64
"""Tokens of the prompt that are looked at."""

GIVEN = "given"
"""What the layer itself is given, beside what its modules hand on."""

ORDER = (
    "input_layernorm",
    "q_proj",
    "k_proj",
    "v_proj",
    "attention",
    "o_proj",
    "post_attention_layernorm",
    "mlp",
)
"""Components of a layer, in the order in which they are computed."""

COMPONENTS = {
    "lambda": "attention",
    "gamma": "attention",
    "head_norm": "head_norm",
    "groupnorm": "head_norm",
    "subln": "head_norm",
    "embed_tokens": "embedding",
    "model.norm": "norm",
    "lm_head": "lm_head",
} | {name: name for name in ORDER if name != "attention"}
"""What a part of a tensor's name says of where it belongs; the first that occurs counts."""


@dataclass(frozen=True)
class Part:
    """What one component hands on: rows of the source as the target should have them, and has."""

    component: str
    module: str
    expected: Tensor  # [tokens, rows of the target]
    found: Tensor  # [tokens, rows of the target]
    head_dim: int

    @property
    def error(self) -> float:
        """Largest difference, relative to the scale of what is expected."""
        scale = self.expected.square().mean().sqrt().clamp_min(torch.finfo(torch.float64).tiny)
        return float((self.found - self.expected).abs().max() / scale)


def component_of(tensor: str) -> str | None:
    """The component that a tensor belongs to, from its name."""
    return next((part for name, part in COMPONENTS.items() if name in tensor), None)


def find_fault(
    before: Weights, after: Weights, ids: Tensor, layer: int, tolerance: float, device: torch.device
) -> Fault:
    """Look into the first layer that differs.

    Args:
        before: the source.
        after: the target.
        ids: a prompt on which they differ, [tokens].
        layer: index of the layer.
        tolerance: relative error that is only rounding.
        device: where to run.

    Returns:
        The component, the tensor and the cause, as far as they can be told.
    """
    unknown = Fault(layer=layer, component=None, tensor=None, cause=None, factor=None)
    with suppress(InputError):
        pair = _comparable(before, after)
        keys = _differing_keys(*pair)
        for part in _parts(*pair, ids[:TOKENS], layer, device):
            if not part.error < tolerance:
                factor, cause = _cause(part, tolerance, spacing(after))
                if keys and part.component in ("input_layernorm", "attention", "mlp"):
                    cause = f"the configs differ in {', '.join(keys)}"
                weight = f"{part.module}.weight"
                return Fault(
                    layer=layer,
                    component=part.component,
                    tensor=weight if weight in after.tensors else None,
                    cause=cause,
                    factor=factor,
                )
    return unknown


def _comparable(before: Weights, after: Weights) -> tuple[Weights, Weights]:
    """Both in one pattern, so that their modules have the same names and meanings."""
    pair = readable(before), readable(after)
    families = [stored_family(each) for each in pair]
    if families[0] is families[1]:
        return pair
    one, other = (
        each if family is DIFF else Planned(each, read_layout(each))
        for each, family in zip(pair, families, strict=True)
    )
    return one, other


def _differing_keys(before: Weights, after: Weights) -> list[str]:
    """Keys of the config, other than sizes, in which two models of a family differ."""
    family = stored_family(before)
    one, other = (family.complete(each.config) for each in (before, after))
    free = {*family.size_keys, "dtype", "torch_dtype", "architectures", "transformers_version"}
    free |= {"auto_map", "use_cache", "_name_or_path", "max_position_embeddings"}
    return sorted(key for key in {*one, *other} - free if one.get(key) != other.get(key))


def _parts(
    before: Weights, after: Weights, ids: Tensor, layer: int, device: torch.device
) -> list[Part]:
    """What the components of a layer hand on, in the order of computation."""
    family = stored_family(before)
    expected = _outputs(before, ids, layer, device)
    found = _outputs(after, ids, layer, device)
    given, handed = expected.pop(GIVEN), found.pop(GIVEN)
    one = given.repeat_interleave(handed.shape[1] // given.shape[1], 1)
    tiled = given.repeat(1, handed.shape[1] // given.shape[1])
    # growkit repeats the whole space; others may put copies side by side.
    adjacent = float((handed - one).abs().max()) < float((handed - tiled).abs().max())
    copies = _Copies(family, before.config, after.config, adjacent=adjacent)
    parts = []
    for name, output in found.items():
        module, _, side = name.partition(":")
        if name not in expected:
            continue
        index = copies.of(module, Role.READ if side else Role.WRITTEN)
        if index is None:
            continue
        rows = index(expected[name])
        component = "attention" if side else component_of(module)
        if component is not None and rows.shape == output.shape:
            parts.append(Part(component, module, rows, output, copies.head_dim))
    return sorted(parts, key=lambda part: ORDER.index(part.component))


def _outputs(weights: Weights, ids: Tensor, layer: int, device: torch.device) -> dict[str, Tensor]:
    """What every module of a layer hands on, each [tokens, rows], and what o_proj is given."""
    found: dict[str, Tensor] = {}
    with strict_float64():
        model = Layerwise(weights, torch.float64, device, "eager")
        with _listening(model.model, model.names[layer + 1], found):
            for stage in model.stages([Call(ids)]):
                if stage.layer == layer:
                    break
    return found


@contextmanager
def _listening(model: nn.Module, layer: str, found: dict[str, Tensor]) -> Iterator[None]:
    def listen(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.dim() == 3 and name not in found:
                found[name] = output[0].detach()
            if name.endswith("o_proj") and inputs:
                found.setdefault(f"{name}:given", inputs[0][0].detach())

        return hook

    def keep_given(module: nn.Module, inputs: Any) -> None:
        found.setdefault(GIVEN, inputs[0][0].detach())

    hooks = [
        model.get_submodule(layer).register_forward_pre_hook(keep_given),
        *(
            module.register_forward_hook(listen(name))
            for name, module in model.named_modules()
            if name.startswith(f"{layer}.")
        ),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Copies:
    """Which row of the source each row of the target copies, by module."""

    def __init__(self, family: Family, before: Config, after: Config, *, adjacent: bool) -> None:
        self._old, self._new = family.sizes(before), family.sizes(after)
        self._tensors = {name: tensor for name, tensor, _ in family.members(before)}
        self.head_dim = self._old.get("head_dim", 1)
        self._expansions = {
            axis: (side_by_side if side else in_blocks)(size, self._new[axis] // size)
            for axis, size in self._old.items()
            for side in (axis in family.grouped or (adjacent and axis == "hidden"),)
            if size and axis in self._new and self._new[axis] % size == 0
        }

    def of(self, module: str, role: Role) -> Callable[[Tensor], Tensor] | None:
        """From the source's [tokens, rows] to the target's; None if that is not known."""
        tensor = self._tensors.get(f"{module}.weight") or self._tensors.get(f"{module}.up.weight")
        if tensor is None:
            return None
        dimension = _dimension(Pattern.parse(tensor.pattern), role)
        if dimension is None or not dimension.axes <= self._expansions.keys():
            return None
        order = tensor.order if role is Role.WRITTEN else None
        orders = (order(self._old), order(self._new)) if order else None
        index = index_map(dimension, self._old, self._expansions, orders).source
        return lambda rows: rows[:, index]


def _dimension(pattern: Pattern, role: Role) -> Dimension | None:
    return next((each for each in pattern.dimensions if each.role is role), None)


def spacing(weights: Weights) -> float:
    """Relative spacing of the numbers that most weights are stored in."""
    dtype: torch.dtype = getattr(torch, TORCH_NAMES[main_dtype(weights.tensors)])
    return float(torch.finfo(dtype).eps)


def _cause(part: Part, tolerance: float, spacing: float) -> tuple[float | None, str | None]:
    """The most likely cause of a difference, and the factor if it is one.

    Weights that were multiplied were rounded, too: to numbers that are ``spacing`` apart.
    """
    expected, found = part.expected, part.found
    product = float((expected * found).sum())
    factor = product / float(expected.square().sum().clamp_min(torch.finfo(torch.float64).tiny))
    off = abs(factor - 1)
    slack = tolerance + spacing
    if off > slack and _close(found, factor * expected, slack * (1 + off)):
        return factor, f"everything is multiplied by {factor:.6g}"
    if part.component == "attention":
        return None, (
            "queries, keys and values agree: λ, the head norm, the rotation or the mask differs"
        )
    scale = expected.square().mean().sqrt()
    # A NaN is not less than anything.
    wrong = (~((found - expected).abs().amax(0) < tolerance * scale)).nonzero()[:, 0]
    moved = _moved(expected, found, wrong, tolerance)
    if moved is not None:
        heads = part.component in ("q_proj", "k_proj", "v_proj")
        inside = bool((moved // part.head_dim == wrong // part.head_dim).all())
        if heads and inside:
            return None, "rows inside of heads stand in another order, as RoPE patterns do"
        if heads and bool((moved % part.head_dim == wrong % part.head_dim).all()):
            return None, "heads stand in another order"
        return None, f"{len(wrong)} rows stand in another order"
    ratio = (found * expected).sum(0) / expected.square().sum(0).clamp_min(1e-300)
    by_row = _close(found, expected * ratio, slack * (1 + float((ratio - 1).abs().max())))
    share = f"{len(wrong)} of {expected.shape[1]} rows"
    if by_row:
        one = ratio[wrong]
        if bool(((one - one[0]).abs() <= slack * one[0].abs()).all()):
            return float(one[0]), f"{share} are multiplied by {float(one[0]):.6g}"
        return None, f"{share} are multiplied, each by a number of its own"
    return None, f"{share} have other weights"


def _close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    scale = expected.square().mean().sqrt()
    return bool((found - expected).abs().max() <= tolerance * scale)


def _moved(expected: Tensor, found: Tensor, wrong: Tensor, tolerance: float) -> Tensor | None:
    """For rows that are wrong, those whose place they took; None if they are no others' at all."""
    if len(wrong) < 2:
        return None
    # By products of matrices, which is faster, small distances would drown in rounding.
    exactly = "donot_use_mm_for_euclid_dist"
    distances = torch.cdist(found[:, wrong].T, expected[:, wrong].T, compute_mode=exactly)
    nearest = distances.argmin(1)
    scale = expected.square().mean().sqrt() * expected.shape[0] ** 0.5
    if bool((distances.amin(1) > tolerance * scale).any()):
        return None
    return wrong[nearest]


def find_fault_before_layers(
    source: Layerwise, target: Layerwise, ids: Tensor, tolerance: float, spacing: float
) -> Fault:
    """Look into embeddings that differ; in strict float64.

    Args:
        source: the source.
        target: the target.
        ids: a prompt on which they differ, [tokens].
        tolerance: relative error that is only rounding.
        spacing: of the numbers that the target is stored in.
    """
    one, other = (next(model.stages([Call(ids)])).after[0] for model in (source, target))
    copies = other.view(len(ids), -1, one.shape[1]).transpose(0, 1)  # [copies, tokens, hidden]
    expected, found = one.repeat(1, len(copies)), torch.cat(list(copies), -1)
    part = Part("embedding", target.names[0], expected, found, 1)
    rows = (found - expected).abs().amax(1) > tolerance * expected.square().mean().sqrt()
    factor, cause = _cause(part, tolerance, spacing)
    if factor is None:
        cause = f"the embeddings of {int(rows.sum())} of {len(ids)} tokens differ"
    return Fault(
        layer=None,
        component="embedding",
        tensor=f"{target.names[0]}.weight",
        cause=cause,
        factor=factor,
    )


def find_fault_behind_layers(
    source: Layerwise,
    target: Layerwise,
    ends: tuple[Tensor, Tensor],
    tolerance: float,
    factor: float | None,
) -> Fault:
    """Look behind the layers, where all of them agree; in strict float64.

    Args:
        source: the source.
        target: the target.
        ends: what the last layers hand on, each [tokens, hidden].
        tolerance: relative error that is only rounding.
        factor: by which all logits are multiplied, if that is all.
    """
    models = source, target
    one, other = (_given_to_head(model, end) for model, end in zip(models, ends, strict=True))
    copies = other.view(len(one), -1, one.shape[1])  # [tokens, copies, hidden]
    name = f"{target.names[-1]}.weight"
    # The norm writes copies, or for a tied head parts that sum up to the source's.
    untied = source.stores(f"{source.names[-1]}.weight")
    rest = copies - one[:, None] if untied else copies.sum(1) - one
    agree = bool(rest.abs().max() <= tolerance * one.square().mean().sqrt())
    return Fault(
        layer=None,
        component="lm_head" if agree else "norm",
        tensor=name if agree and target.stores(name) else None,
        cause=None if factor is None else f"all logits are multiplied by {factor:.6g}",
        factor=factor,
    )


def _given_to_head(model: Layerwise, end: Tensor) -> Tensor:
    given: list[Tensor] = []
    head = model.model.get_submodule(model.names[-1])
    hook = head.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0][0]))
    try:
        with model.head() as run:
            run(end[:TOKENS])
    finally:
        hook.remove()
    return given[0]
