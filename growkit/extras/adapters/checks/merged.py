"""Proof of a merged adapter: the target's weights are the source's with the adapter's updates.

PEFT merges the adapter into one module after the other, in float64. A merge in the dtype of the
files rounds the update and the sum, in an order that depends on the machine, so a number of the
target is taken for that of the merged source if it is as near as such roundings leave it.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import foreign
from growkit.base.limits import SPACING, within_each
from growkit.base.tensors import TensorInfo, cut, widened
from growkit.base.torch_internals import stored_dtypes
from growkit.engine.class_weights import class_weights, empty_model
from growkit.engine.device import CPU
from growkit.engine.lending import Lender
from growkit.engine.transformers_class import quiet
from growkit.extras.adapters.adapter_folder import AdapterFolder
from growkit.extras.adapters.checks.adapter import AdaptedWeights, is_merged
from growkit.extras.adapters.grow_adapter import Adapter
from growkit.extras.adapters.modules import Modules
from growkit.extras.formats.checks.diagnosis import MAX_TOLD, sentences_on
from growkit.extras.optimizer.stored_gradients import Unconverted
from growkit.model.checkpoint.reading import Checkpoint, View
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding, Section

OF_UPDATE, OF_PRODUCTS = 8, 64
"""Roundings of an update, whose factors may be rounded as well, and those in float32 of its sums
over up to 256 ranks, which reached 38."""

OF_SUM, OF_DORA = 1, 4
"""Roundings of a merged weight; DoRA also rounds norms and multiplies by them."""


class Merged(View):
    """A checkpoint into which an adapter is merged, rounded as a target is.

    Args:
        base: the checkpoint.
        adapter: the adapter, with the names of the class.
        after: the target.

    Attributes:
        wrong: for each adapted parameter that is another one in the target, what it has.
        dtypes: torch names of the dtypes whose rounding explains the other ones.
        adapted: the adapted parameters.

    Raises:
        InputError: PEFT does not accept the adapter.
    """

    def __init__(self, base: Checkpoint, adapter: AdapterFolder, after: Checkpoint) -> None:
        super().__init__(base)
        weights = AdaptedWeights(base, adapter)
        model, _, stored = empty_model(weights, torch.float64)
        self._lender = Lender(weights, stored, torch.float64, CPU)
        self._lender.stays = False
        self._modules, self._adapter = Modules(base), adapter
        self._was, self._now = class_weights(base), class_weights(after)
        self._wrappers = dict(_wrappers(model))
        self.adapted: dict[str, str] = {}
        self._wrapper_of: dict[str, str] = {}
        self.wrong: dict[str, str] = {}
        self.dtypes: set[str] = set()
        self.tensors = dict(base.tensors)
        for name, of in self._modules.stored.items():
            if wrapper := next((w for w in self._wrappers if name.startswith(f"{w}.")), None):
                conversion = self._modules.conversion(name)
                self.adapted[of] = wrapper
                for source in conversion.sources if conversion else ():
                    self._wrapper_of[source] = wrapper
                    if of in self._now.tensors:
                        shape = base.tensors[source].shape
                        self.tensors[source] = TensorInfo(shape, self._now.tensors[of].dtype)
        self._merged = lru_cache(1)(self._merge)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        wrapper = self._wrapper_of.get(name)
        return cut(self._merged(wrapper)[name], where) if wrapper else super().read(name, *where)

    def as_read(self, model: nn.Module) -> nn.Module:
        """See ``Checkpoint``."""
        with torch.no_grad():
            for name in self.adapted:
                model.get_parameter(name).copy_(class_weights(self).read(name))
        return model

    def judge(self) -> None:
        """Compare all adapted parameters with those of the target."""
        for wrapper in dict.fromkeys(self.adapted.values()):
            self._merged(wrapper)

    def _merge(self, wrapper: str) -> Mapping[str, Tensor]:
        """The stored tensors of a module after the merge."""
        module = deepcopy(self._wrappers[wrapper])
        names = {n: f"{wrapper}.{n}" for n, _ in module.named_parameters(remove_duplicate=False)}
        tensors: dict[str, Tensor] = {}
        where = f"PEFT cannot merge {self._adapter.opened}"
        with self._lender.lent(module, names), torch.no_grad(), stored_dtypes():
            with quiet(), foreign(where, "save it again with PEFT"):
                plain = _without_adapter(module)
            for end, parameter in plain.named_parameters():
                name = self._modules.stored[f"{wrapper}.{end}"]
                conversion = self._modules.conversion(name)
                assert conversion
                merged = self._as_in_target(name, parameter.detach())
                if conversion.transform is None:
                    tensors[conversion.sources[0]] = merged
                else:
                    separate = Unconverted(self.stored.tensors)(conversion, {name: merged})
                    tensors |= dict(separate or ())
        return tensors

    def _as_in_target(self, name: str, merged: Tensor) -> Tensor:
        """A merged parameter, with the target's numbers where rounding explains these."""
        was = self._was.read(name).double()
        if name not in self._now.tensors or self._now.tensors[name].shape != was.shape:
            return merged.to(self._was.tensors[name].torch_dtype)
        now, update = self._now.read(name), merged - was
        if merged.equal(was):  # an adapter that was not trained, or not for this parameter
            return was.to(now.dtype)
        exact = widened(now).double()
        dtypes = [now.dtype, self._was.tensors[name].torch_dtype]
        for dtype in dtypes:
            near = self._near(exact, was, update, 1.0, dtype)
            if near.all() and _fits(exact, was, merged, dtype):
                self.dtypes.add(str(dtype).removeprefix("torch."))
                return now
        part = float((exact - was).flatten() @ update.flatten() / update.square().sum())
        self.wrong[name] = "has another update than that of the adapter"
        if exact.equal(was):
            self.wrong[name] = "is not merged with the adapter"
        elif any(self._near(exact, was, update, part, dtype).all() for dtype in dtypes):
            self.wrong[name] = f"has {part:.2g} times the update of the adapter"
        return merged.to(now.dtype)

    def _near(
        self, now: Tensor, was: Tensor, update: Tensor, part: float, dtype: torch.dtype
    ) -> Tensor:
        """Which numbers are those of the source and a part of the update, but for rounding."""
        half, added = SPACING[str(dtype).removeprefix("torch.")] / 2, update.mul(part)
        sums = OF_DORA if self._adapter.config.get("use_dora") else OF_SUM
        expected = was + added
        limits = sums * half * expected.abs() * (1 + half) + torch.finfo(dtype).smallest_normal
        relative = OF_UPDATE * half + OF_PRODUCTS * SPACING["float32"] / 2
        limits += relative * (added.abs() + added.square().mean().sqrt())
        return within_each((now - expected).abs(), limits)


def _fits(now: Tensor, was: Tensor, merged: Tensor, dtype: torch.dtype) -> bool:
    """Whether a change is the update as a whole, also if rounding explains each number."""
    half = SPACING[str(dtype).removeprefix("torch.")] / 2
    update = merged.to(dtype).double() - was  # rounding may leave out a small one
    if not update.any():
        return True
    part = ((now - was) * update).sum() / update.square().sum()
    chance = merged.norm() / (update.norm() * update.numel() ** 0.5)
    return bool((part - 1).abs() <= half * (2 * OF_UPDATE + 4 * OF_DORA * chance))


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The outermost modules that PEFT put around modules of a model."""
    outer = "\n"
    for name, module in model.named_modules():
        around = hasattr(module, "base_layer") or hasattr(module, MERGES)
        if around and not name.startswith(outer):
            outer = f"{name}."
            yield name, module


MERGES = "unload_and_optionally_merge_module"


def _without_adapter(module: Any) -> nn.Module:
    """The module inside of a wrapper, after the merge."""
    if hasattr(module, MERGES):
        plain: nn.Module = getattr(module, MERGES)(True, True, None)
        return plain
    module.merge(safe_merge=True)
    inside: nn.Module = module.get_base_layer()
    return inside


def merge_first(pair: Pair) -> Pair | None:
    """Compare a target with the source and its adapter if it is not beside the target.

    Raises:
        InputError: the adapter is not one of the source.
    """
    if not is_merged(pair):
        return None
    assert pair.adapter
    adapter = Adapter(pair.adapter, pair.before, pair.lineage, "")
    source = Merged(pair.before, adapter.of_class, pair.after)
    return replace(pair, before=source, lineage=replace(pair.lineage, source=source))


def check_merged(pair: Pair, function: Function) -> Section | None:
    """Say which weights have the update of the adapter."""
    merged = pair.before
    if not isinstance(merged, Merged):
        return None
    merged.judge()
    sentence = (
        f"the adapter is merged into {len(merged.adapted)} weights, but for the rounding of "
        f"{' or '.join(sorted(merged.dtypes))}"
    )
    if merged.wrong:
        sentence = "; ".join(sentences_on(merged.wrong, merged.adapted)[:MAX_TOLD])
    first = min(merged.wrong, default=None)
    kept = not merged.wrong
    finding = Finding(name="merged", kept=kept, sentence=sentence, place=first, in_reason=True)
    if not kept:
        finding.advice = "merge this adapter into SRC again, with its lora_alpha, r and use_rslora"
    return Section(findings=[finding], notes=[])


CHECK = Check(check_merged, merge_first)
