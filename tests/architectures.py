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
from growkit.engine.thresholds import OTHERS, THRESHOLD

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

LARGEST = 3_000_000
"""Parameters of a model that is still tiny, at most."""

WINDOW = 64
"""Tokens of windows, chunks, blocks and budgets, and tokens that an indexer chooses."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "n_inner", "d_ff", "ffn_dim"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 512),
    **dict.fromkeys(("max_seq_length", "seq_length", "max_sequence_length"), 512),
    **dict.fromkeys(("context_length", "max_target_positions"), 512),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "emb_dim", "input_embedding_size"), 32),
    **dict.fromkeys(("adapter_in_dim", "adapter_input_size", "adapter_out_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_hidden_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "moe_intermediate_size", "dim_ff"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_blocks"), 2),
    **dict.fromkeys(("num_encoder_layers", "num_decoder_layers", "num_mtp_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "attention_head_dim", "kv_channels", "d_kv", "dim_head"), 8),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    "block_multiple_of": 16,
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": WINDOW},
    "forced_eos_token_id": None,
    "index_block_size": WINDOW // 4,
    "index_topk_blocks": 4,
    "is_decoder": True,
    "max_window_layers": 1,
    "sliding_window": WINDOW,  # some classes have none by default
    "use_sliding_window": True,
}
"""Values of config keys, wherever a config has them."""

TOKEN = re.compile(r"_token_(id|index)$")
"""Names of keys for special tokens, of images, say: as they are, none is in a prompt."""

LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    "axk1": {"n_group": 2, "topk_group": 1},
    "bailing_hybrid": {**LINEAR, "n_group": 2, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1]},
    "beam": {"mlp_layer_types": ["dense", "sparse"], "n_group": 2, "topk_group": 1},
    "blt": {"vocab_size": 260},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4}
            for kind in ("sliding_attention", "full_attention")
        }
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
    "deepseek_v32": {"n_group": 2, "topk_group": 1},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
    },
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**LINEAR, "linear_num_heads": 4, "q_lora_rank": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": {"num_layers": 1, "head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8},
    "mellum": {"num_mtp_layers": None},
    "moshi": {"audio_vocab_size": 32},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "qwen4_exp_text": {
        **LINEAR,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 4,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": WINDOW,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"block_types": ("recurrent", "attention")},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ("local", "local"),
        "local_attn_chunk_length": WINDOW,
        "attention_head_size": 8,
    },
    "xlstm": {"hidden_size": 64, "num_heads": 2, "qk_dim_factor": 1.0},  # else no second chunk
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zamba2": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values of config keys of single types."""

TEXT = {"fuyu": "persimmon", "got_ocr2": "qwen2", "moss_transcribe_diarize": "qwen3"}
"""What speaks in models that see or hear as well, where their configs take anything."""


ALTERNATING: dict[str, Any] = {
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 2),
    "attention_types": [[["global", "local"], 2]],
    "attn_layer_indices": [1, 3],
    "attn_layer_period": 2,
    "block_types": ("recurrent", "attention"),
    "indexer_types": ["full", "shared"] * 2,
    "max_window_layers": 2,
    "mlp_only_layers": [0, 2],
    "moe_layers": [1, 3],
    "no_rope_layers": [1, 0] * 2,
}
"""Values of config keys with which every kind of layer occurs twice in four layers."""

FOUR = {"num_hidden_layers": 4}
EIGHT = {"num_hidden_layers": 8, "num_dense_layers": 4}
TWICE: dict[str, dict[str, Any]] = {
    "afmoe": {**EIGHT, "layer_types": ["sliding_attention", "full_attention"] * 4},
    "dots3_note_text": {
        "layer_types": ["indexed_attention", "sliding_attention"] * 2,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 16),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_v_head_dim"), 8),
    },
    "lfm3": {
        "num_hidden_layers": 6,
        "layer_types": ["conv", "full_attention", "sliding_attention"] * 2,
    },
    "lfm2_moe": {**EIGHT, "layer_types": ["conv", "full_attention"] * 4},
    "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "mlp"] * 2},
    "zamba": {**FOUR, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {**FOUR, "layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {**FOUR, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}
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
    return model.eval()


def save(kind: str, folder: Path, seed: int = 0, **more: Any) -> Path:
    """A random model of a type in a folder; see ``build``."""
    build(kind, seed, **more).save_pretrained(folder)
    return folder


def with_fault(source: Path, folder: Path) -> str | None:
    """A copy of a model with a matrix of which logits depend times 1.01; its name.

    None if there is no such matrix.
    """
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    expected = _logits(source)
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
