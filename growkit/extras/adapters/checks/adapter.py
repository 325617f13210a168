"""Proof of an adapter: the target with its adapter computes the same as the source with its own.

The tensors of the source's adapter must be recovered bit for bit, and the grown config must be the
one that growkit writes. Then both models run with their adapters in PEFT, one layer at a time in
strict float64. Nothing else needs PEFT.
"""

import re
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, foreign
from growkit.base.limits import within
from growkit.base.tensors import TensorInfo
from growkit.base.torch_internals import buffers_of, parameters_of
from growkit.engine.calls import CallError
from growkit.engine.class_weights import Extended, class_weights, tied_names
from growkit.engine.metrics import finite
from growkit.engine.transformers_class import quiet
from growkit.extras.adapters.adapter_folder import AdapterFolder
from growkit.extras.adapters.adapter_tensors import PREFIX, AdapterTensors
from growkit.extras.adapters.grow_adapter import Adapter
from growkit.extras.adapters.modules import Modules
from growkit.extras.composed_transforms import Computed
from growkit.model.checkpoint.folder import ADAPTER, ADAPTER_FOLDER
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.plan import Plan, Planned, Rule
from growkit.planning.transforms import Kept
from growkit.proof.check import Check
from growkit.proof.control import MAX_TOKENS
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.proof.weights import compare_weights
from growkit.results.proof_result import Finding, Section

NAME = "adapter"

FOLDER_KEYS = ("base_model_name_or_path", "revision")
"""Config keys that name the model's folder."""


def refuse_adapter(pair: Pair) -> None:
    """Refuse an adapter that could not be compared.

    Raises:
        InputError: the target was grown without it, or it is not known how both were.
    """
    inside = pair.after.folder / ADAPTER_FOLDER
    if pair.adapter is None or is_merged(pair):
        return
    if not inside.exists():
        raise InputError(
            f"{pair.after.folder} has no folder {ADAPTER_FOLDER} to compare with {pair.adapter}; "
            "leave out --adapter, or grow the model with it"
        )
    if pair.lineage.unknown:
        raise InputError(
            f"{inside} can be compared with {pair.adapter} only if it is known how it was made, "
            f"but {pair.lineage.unknown}; leave out --adapter"
        )


def is_merged(pair: Pair) -> bool:
    """Whether the source's adapter should be in the target's weights, as it is not beside them."""
    beside = (pair.after.folder / ADAPTER_FOLDER).exists()
    return bool(pair.adapter and pair.lineage.unknown) and not beside


def check_adapter(pair: Pair, function: Function) -> Section | None:
    """Compare source and target, each with its adapter.

    Raises:
        InputError: PEFT does not accept the adapter.
    """
    if pair.adapter is None or is_merged(pair):
        recipe = pair.recipe
        untried = "its adapter was not tried, as that of the source was not named (--adapter)"
        return Section(findings=[], notes=[untried]) if recipe and recipe.adapter else None
    planned = Adapter(pair.adapter, pair.before, pair.lineage, "")
    written = AdapterFolder(pair.after.folder / ADAPTER_FOLDER)
    finding = _tensors_finding(pair, planned, written)
    finding = finding or _logits_finding(pair, function, planned, written)
    finding.verdict, finding.in_reason = "preserved, but not with its adapter", True
    return Section(findings=[finding], notes=[])


def _tensors_finding(pair: Pair, planned: Adapter, written: AdapterFolder) -> Finding | None:
    """The finding on tensors and config of a grown adapter, if they are not as planned."""
    tensors = AdapterTensors(written, Modules(pair.after))
    lost = compare_weights(planned.lineage, tensors).lost
    if not lost and _settings(planned.config) == _settings(written.config):
        return None
    does = "does not recover the source's adapter" if lost else "is not what growkit writes"
    place = lost or f"{ADAPTER_FOLDER}/{ADAPTER}"
    return Finding(name=NAME, kept=False, sentence=f"{place} {does}", place=place)


def _logits_finding(
    pair: Pair, function: Function, planned: Adapter, written: AdapterFolder
) -> Finding:
    """The finding on the logits of both models with their adapters."""
    adapted = (
        AdaptedWeights(pair.before, planned.of_class),
        AdaptedWeights(pair.after, written),
    )
    side, prompt = function.strict.side, pair.prompts.windows[0][:MAX_TOKENS]
    try:
        compared, controls = side.compare_prompt(prompt, side.place, adapted, only="default")
    except CallError as error:
        failure = str(error).partition(";")[0]
        raise InputError(
            f"with the adapter in {pair.adapter}, {failure}; train one for other modules, or leave "
            "out --adapter"
        ) from error
    relative, own = compared.prefill.relative, controls.limit.largest
    largest = own if pair.exact else function.limit and function.limit.largest
    kept = within(relative, largest)
    sentence = f"with the adapter, they differ by {relative:.1e}"
    if within(controls.control.relative, own):
        kept = False
        sentence = f"with the adapter, a deliberate fault ({controls.fault}) went unnoticed"
    return Finding(
        name=NAME, kept=kept, sentence=sentence, measured=finite(relative), limit=largest
    )


CHECK = Check(check_adapter, refuse_adapter, if_kept=True)


def _settings(config: dict[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in FOLDER_KEYS}


AROUND = re.compile(r"\.(base_layer|token_adapter|original_module|modules_to_save\.\w+)(?=\.)")
"""Parts of names that PEFT inserts for a model's own parameters."""


class AdaptedWeights(Planned, Extended):
    """A checkpoint to which PEFT itself applies an adapter, with the names that it gives the class.

    Only known settings of the adapter's config are used. The adapter is entirely in memory.

    Args:
        checkpoint: the model.
        adapter: the adapter.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: AdapterFolder) -> None:
        self._base, self._adapter = class_weights(checkpoint), adapter
        super().__init__(self._base, Plan(checkpoint.config, ()))

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        own = name is not None and not self.plan.by_target[name].sources
        return str(self._adapter.file.path) if own else super().where(name)

    def extend(self, model: Any) -> None:
        """See ``Extended``.

        Raises:
            InputError: PEFT does not accept the adapter.
        """
        adapter, ties = self._adapter, getattr(model, "all_tied_weights_keys", None) or {}
        loaded = self._loaded(model)
        named = [*model.named_parameters(remove_duplicate=False)]
        own = {id(parameter): loaded[name] for name, parameter in named if name in loaded}
        rules = []
        for name, parameter in named:
            if (tensor := own.get(id(parameter))) is not None:
                path, _, last = name.rpartition(".")
                info = TensorInfo.of_torch(parameter.shape, tensor.dtype)
                rules.append(Rule(name, info, Computed((), NAME, partial(Tensor.detach, tensor))))
                empty = torch.empty(parameter.shape, dtype=model.dtype, device="meta")
                parameters_of(model.get_submodule(path))[last] = nn.Parameter(empty)
                continue
            alike = tied_names(AROUND.sub("", name), ties)
            held = next((alias for alias in alike if alias in self._base.tensors), None)
            if held is None:
                raise InputError(
                    f"{adapter.file.path} has nothing for {name} of a {type(model).__name__}; give "
                    "the adapter of this model"
                )
            rules.append(Rule(name, self._base.tensors[held], Kept(held)))
        super().__init__(self._base, Plan(self.config, tuple(rules)))
        for module in model.modules():  # buffers with which PEFT would unload an adapter
            for key, buffer in buffers_of(module).items():
                if buffer is not None and buffer.is_meta:
                    buffers_of(module)[key] = torch.zeros_like(buffer, device="cpu")

    def _loaded(self, model: Any) -> dict[str, Tensor]:
        """Apply the adapter to a model without weights; return its tensors by parameter name.

        Raises:
            InputError: PEFT does not accept the adapter.
        """
        adapter, loaded = self._adapter, dict[str, Tensor]()

        def load(state: dict[str, Tensor], **options: Any) -> None:
            loaded.update(state)

        with quiet(), foreign(f"PEFT cannot load {adapter.opened}", "save it again with PEFT"):
            import peft

            settings = {k: v for k, v in adapter.config.items() if k in adapter.method.settings}
            kind: Any = peft.PEFT_TYPE_TO_CONFIG_MAPPING[adapter.config["peft_type"]]
            peft.inject_adapter_in_model(kind(**settings), model, low_cpu_mem_usage=True)
            held = adapter.tensors
            tensors = {n.removeprefix(PREFIX): held.read(n) for n in held.tensors}
            with patch.object(model, "load_state_dict", load):
                peft.set_peft_model_state_dict(model, tensors)
        known = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in loaded.items():
            if name not in known or known[name].shape != tensor.shape:
                raise InputError(
                    f"{adapter.file.path} has {name} of shape {list(tensor.shape)}, which does not "
                    f"fit a {type(model).__name__}; give the adapter of this model"
                )
        return loaded
