"""A tiny random model of every causal language model that transformers has."""

import inspect
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import growkit
from growkit.base.errors import InputError
from growkit.engine.long_text_settings import OTHERS, THRESHOLD
from tests.files import listed

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

LARGEST = 3_000_000
"""Parameters of a model that is still tiny, at most."""

WINDOW = 64
"""Tokens of windows, chunks, blocks and budgets, and tokens that an indexer chooses."""

SIZES: dict[str, Any] = listed("architectures", "sizes")
"""Values of config keys, wherever a config has them."""

TOKEN = re.compile(r"_token_(id|index)$")
"""Names of keys for special tokens, of images, say: as they are, none is in a prompt."""

KINDS: dict[str, dict[str, Any]] = listed("architectures", "single")
"""Values of config keys of single types."""

TEXT = {"fuyu": "persimmon", "got_ocr2": "qwen2", "moss_transcribe_diarize": "qwen3"}
"""What speaks in models that see or hear as well, where their configs take anything."""


ALTERNATING: dict[str, Any] = listed("architectures", "alternating")
"""Values of config keys with which every kind of layer occurs twice in four layers."""

TWICE: dict[str, dict[str, Any]] = listed("architectures", "twice")
"""Likewise of single types."""


def config_of(kind: str, alternating: bool = False, **more: Any) -> Any:
    """A small config of a type, with other values of some keys; see ``small``."""
    return CONFIG_MAPPING[kind](**small(CONFIG_MAPPING[kind], alternating) | more)


def layers_of(config_class: Any, values: dict[str, Any]) -> dict[str, Any]:
    """Values of keys with which a model of a class has each kind of layer twice; none if alike."""
    default = vars(config_class())
    known = {each.name for each in fields(config_class)}
    twice = {key: value for key, value in ALTERNATING.items() if key in known}
    for key in known - SIZES.keys():
        value = values.get(key, default.get(key))
        if isinstance(value, list) and all(isinstance(kind, str) for kind in value):
            kinds = list(dict.fromkeys(value))
            kinds = kinds if len(kinds) > 1 else named_kinds(config_class, kinds)
            if len(kinds) > 1 and len(value) in (2, default.get("num_hidden_layers")):
                twice[key] = 2 * kinds
    single: dict[str, Any] = TWICE.get(config_class.model_type, {})
    if not (twice or single):
        return {}
    count = max([4, *(len(value) for value in twice.values() if isinstance(value, list))])
    return dict.fromkeys({"num_hidden_layers", "num_layers"} & {*default}, count) | twice | single


def named_kinds(config_class: Any, kinds: list[str]) -> list[str]:
    """The kinds of layers, of attention or of MLPs as these are, that the code of a class names."""
    names = config_class.__module__, config_class.__module__.replace("configuration_", "modeling_")
    code = "".join(inspect.getsource(sys.modules[name]) for name in names if name in sys.modules)
    for allowed in (ALLOWED_ATTN_LAYER_TYPES, ALLOWED_MLP_LAYER_TYPES):
        if {*kinds} <= {*allowed}:
            return sorted({*kinds, *(kind for kind in allowed if f'"{kind}"' in code)})
    return kinds


def small(config_class: Any, alternating: bool = False) -> dict[str, Any]:
    """Small values of the keys of a class of configs.

    Args:
        config_class: the class.
        alternating: whether its models have each kind of layer twice, if they have several.
    """
    found: dict[str, Any] = {}
    known = {each.name: each for each in fields(config_class)}
    subs = getattr(config_class, "sub_configs", {}) or {}
    for name, sub in subs.items():
        if sub is AutoConfig:  # the class chooses it
            sub = type(getattr(config_class(), name, None))
        if isinstance(sub, type) and getattr(sub, "model_type", None) in CONFIG_MAPPING:
            found[name] = {"model_type": sub.model_type, **small(sub, alternating)}
    for name, each in known.items():
        if name in SIZES and name not in subs:
            found[name] = SIZES[name]
        elif type(each.default) is int and each.default > 64 and not TOKEN.search(name):
            threshold = THRESHOLD.search(name) and not OTHERS.search(name)
            found[name] = WINDOW if threshold else 16
    kind = config_class.model_type
    if kind in TEXT:
        found["text_config"] = {
            "model_type": TEXT[kind],
            **small(CONFIG_MAPPING[TEXT[kind]], alternating),
        }
    if "kv_lora_rank" in known:
        found["num_key_value_heads"] = 4
    found |= KINDS.get(kind, {})
    return found | layers_of(config_class, found) if alternating else found


def build(kind: str, seed: int = 0, **more: Any) -> PreTrainedModel:
    """A random model of a type; no bias of it is zero and no norm is one, so faults show.

    Args:
        kind: the type.
        seed: of its weights.
        **more: other values of some keys of its config.
    """
    torch.manual_seed(seed)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config_of(kind, **more))
    if sum(parameter.numel() for parameter in empty.parameters()) > LARGEST:
        raise ValueError(f"{kind} stays large")
    model = AutoModelForCausalLM.from_config(config_of(kind, **more))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            else:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # the experts of every token
                experts = model.config.num_local_experts
                rows = torch.rand(len(buffer), experts, generator=generator)
                buffer.copy_(rows.topk(buffer.shape[1]).indices)
    return model.eval()


def save(kind: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """A random model of a type in a folder; see ``build``."""
    build(kind, seed, **more).save_pretrained(folder)
    return folder


def with_fault(source: Path, folder: Path) -> str | None:
    """A copy of a model with a matrix of which logits depend times 1.01; its name.

    None if there is no such matrix, or the class cannot compute the logits of a text alone.
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    try:
        expected = _logits(source)
    except (RuntimeError, ValueError):
        return None
    for name in sorted(tensors, key=lambda name: (-tensors[name].dim(), name)):
        if tensors[name].dim() > 1 and tensors[name].is_floating_point():
            spoiled = tensors | {name: tensors[name] * 1.01}
            save_file(spoiled, folder / "model.safetensors", {"format": "pt"})
            found = _logits(folder)
            if (found - expected).abs().max() > 1e-4 * expected.square().mean().sqrt():
                return name
    return None


def _logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.arange(2, 14)[None], use_cache=False).logits[0]


def outcome(source: Path, target: Path) -> str:
    """What ``verify`` says: preserved, not preserved, or why it cannot say."""
    try:
        found = growkit.verify(source, target, prompts=2, length=16)
    except InputError as error:
        return f"refused: {error}"
    return ("preserved: " if found["kept"] else "not preserved: ") + found["reason"]
