"""Configs that are legal but rare, of every family: one key of a random model at a time.

A model that transformers' class refuses, or that computes no number, is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from tests.conftest import load_strict, save_random, seeded
from tests.families import DENSE, SPARSE
from tests.sizes import KINDS

LENGTH = 40
"""Tokens of a prompt: more than any window of these models."""

QUICK = growkit.Settings(prompts=1, length=LENGTH, trainability=True)

THETA = {"rope_theta": 1e4}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16, **THETA}
ROPES = (
    {"rope_type": "default", **THETA, "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 3.0, **THETA},
    {"rope_type": "dynamic", "factor": 2.0, **THETA},
    {"rope_type": "yarn", **YARN},
    {"rope_type": "yarn", **YARN, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "llama3", **YARN, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
)
ODD: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), (1,)),
    **dict.fromkeys(("num_hidden_layers", "n_layer"), (1, 3)),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), ("relu", "gelu")),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"), (0.1,)),
    **dict.fromkeys(("layer_norm_bias", "norm_epsilon", "norm_topk_prob"), (True, False)),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), (41,)),
    **dict.fromkeys(("eos_token_id", "bos_token_id"), (3, [3, 5])),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (3, 0.25)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping"), (None, 0.5)),
    **dict.fromkeys(("n_shared_experts", "shared_expert_intermediate_size"), (None, 0, 1)),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"), (1, None)),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), (1, 2, 3)),
    "attention_multiplier": (1, 0.01),
    "clip_qkv": (None, 0.1),
    "conv_kernel": (1,),
    "decoder_sparse_step": (1, 2, 3),
    "first_k_dense_replace": (0, 1, 2),
    "head_dim": (2, 6, 10),
    "layer_types": (
        ["sliding_attention", "full_attention"],
        ["full_attention", "sliding_attention"],
        ["sliding_attention"] * 2,
    ),
    "logit_scale": (1, 0.5),
    "max_window_layers": (0, 1),
    "mlp_only_layers": ([], [1], [0, 1]),
    "no_rope_layers": ([0, 1], [0, 0], None),
    "num_experts_per_tok": (1, 2, 4),
    "num_ln_in_parallel_attn": (1, 2, None),
    "partial_rotary_factor": (0.25, 0.5, 1.0),
    "q_lora_rank": (None, 5),
    "qk_rope_head_dim": (2,),
    "query_pre_attn_scalar": (1, 7),
    "rope_parameters": ROPES,
    "routed_scaling_factor": (0.3, 2),
    "rotary_dim": (2,),
    "scoring_func": ("softmax", "sigmoid"),
    "sliding_window": (None, 1, 5),
    "swiglu_limit": (0.5,),
    "time_step_rank": (1,),
    "topk_group": (1, 2),
    "topk_method": ("greedy", "group_limited_greedy"),
    "v_head_dim": (2, 6),
}
"""Values of keys that are no switches."""

WINDOW = {"sliding_window": 5, "use_sliding_window": True}

SILENT = ("output_attentions", "output_hidden_states", "return_dict", "use_cache", "is_decoder")
"""Switches of how a model is called, and of another kind of model."""
ELSEWHERE = ("add_cross_attention", "is_encoder_decoder", "chunk_size_feed_forward")


def odd_values(kind: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every change of one key, with what it takes to mean something."""
    complete = CONFIG_MAPPING[kind](**config).to_dict()
    complete.setdefault("rope_parameters", None)
    for key, value in complete.items():
        if key in SILENT or key in ELSEWHERE:
            continue
        values = ODD.get(key, (not value,) if isinstance(value, bool) else ())
        window = WINDOW if key in ("layer_types", "use_sliding_window", "max_window_layers") else {}
        for each in values:
            if each != value:
                yield {n: on for n, on in window.items() if n in complete} | {key: deepcopy(each)}


def operations(kind: str, config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """What is done to a model: options of ``growkit.grow``."""
    first = KINDS[kind].hidden[0]
    wider = {"hidden": f"x{first}"}
    if KINDS[kind].by_hidden:
        wider["ffn"] = wider["hidden"]
    found: dict[str, dict[str, Any]] = {"wider": wider}
    if KINDS[kind].ffn and not KINDS[kind].by_hidden:
        found["ffn"] = {"ffn": "x2"}
    found["deeper"] = {"method": "depth", "layers": "x2"}
    if kind in SPARSE:
        found["experts"] = {"method": "experts", "experts": "x2"}
    if kind in DENSE:
        found["upcycled"] = {"method": "upcycle", "experts": 4, "top_k": 2}
    return found


def numbers(folder: Path) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt in strict float64, and what the model writes behind half of it."""
    model = load_strict(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, LENGTH), generator=generator)
    with strict_float64(), torch.no_grad():
        logits = model(ids).logits[0]
        written = model.generate(
            ids[:, : LENGTH // 2], do_sample=False, max_new_tokens=6, use_cache=False
        )
    return logits, written[0].tolist()


def check(source: Path, out: Path, expected: tuple[torch.Tensor, list[int]], **options: Any) -> str:
    """``exact``, ``refused: …``; or what is wrong, with an exclamation mark."""
    try:
        result = growkit.grow(source, out, verify=QUICK, **options)
    except InputError as error:
        return f"refused: {error}"
    if not result["kept"]:
        reason = result["verification"] and result["verification"]["reason"]
        return f"! not kept: {reason}"
    if result["promise"] != "exact":
        return str(result["promise"])
    logits, written = numbers(out)
    error = float((logits - expected[0]).abs().max() / expected[0].square().mean().sqrt())
    if error >= 1e-12:
        return f"! logits differ by {error:.2g}"
    return "exact" if written == expected[1] else "! it writes another text"


def outcome(kind: str, number: int, folder: Path) -> str:
    """What becomes of one odd config of a type, in one of the ways to grow it."""
    choose = seeded(number)
    base = KINDS[kind].any(choose)
    changes = list(odd_values(kind, base))
    change, source = changes[number % len(changes)], folder / "source"
    try:
        config = CONFIG_MAPPING[kind](**(base | change))
        save_random(source, config, number)
        expected = numbers(source)
    except Exception as error:  # whatever the class raises: it has no such models
        return f"illegal: {error}"
    if not expected[0].isfinite().all():
        return "illegal: no numbers"
    name, options = choose.choice([*operations(kind, config).items()])
    return f"{check(source, folder / 'out', expected, **options)} ({change}, {name})"
