"""Comparison of what two multimodal models have around their language models.

The rest of the proof compares the language models. Towers and projectors must be the same bits, and
all other keys of the config must have the same values.
"""

import torch
from torch import Tensor

from growkit.base.torch_internals import stored_dtypes
from growkit.engine.transformers_class import PROVENANCE_KEYS, resolved
from growkit.extras.multimodal.inside import Inside
from growkit.model.families.family_parts import without_keys
from growkit.proof.check import Check
from growkit.proof.logits import Function
from growkit.proof.pair import Pair
from growkit.results.proof_result import Finding, Section


def compare_other_parts(pair: Pair, function: Function) -> Section | None:
    """Compare the parts of two multimodal models, except the language models inside."""
    source, target = pair.stored, pair.after
    if not isinstance(target, Inside):
        return None
    kept, place = None, None
    sentence = (
        f"{' and '.join(target.left_out)} of the target were not compared: the source has none"
    )
    if isinstance(source, Inside):
        tensors = [f"tensor {name}" for name in _different_tensors(source, target)]
        keys = [f"{key} in config.json" for key in _different_keys(source, target)]
        place = next(iter(tensors + keys), None)
        kept = place is None
        sentence = f"config and {len(target.others)} tensors around the language model are the same"
        if place:
            sentence = f"{place} around the language model is not what it is in the source"
    finding = Finding(name="other_parts", kept=kept, sentence=sentence, place=place, in_reason=True)
    return Section(findings=[finding], notes=[])


CHECK = Check(compare_other_parts)


def _different_tensors(source: Inside, target: Inside) -> list[str]:
    """The tensors outside the language model that are not the same, bit for bit."""
    before, after = source.stored, target.stored
    with stored_dtypes():  # stored dtypes, also in strict float64
        return [
            name
            for name in sorted(source.others | target.others)
            if before.tensors.get(name) != after.tensors.get(name)
            or not torch.equal(*(_bytes(model.read(name)) for model in (before, after)))
        ]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _different_keys(source: Inside, target: Inside) -> list[str]:
    """The keys of the config with other values, except for those of the language model."""
    configs = (model.stored.config for model in (source, target))
    before, after = (
        without_keys(resolved(config) or config, PROVENANCE_KEYS | {"dtype"}) for config in configs
    )
    keys = (before.keys() | after.keys()) - {"text_config"}
    return [key for key in sorted(keys) if before.get(key) != after.get(key)]
