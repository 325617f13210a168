"""What the configs of two folders make of their class: everything that it resolves, key by key.

Of a pair about which no manifest says anything, all settings must be the same, but for sizes, which
the shapes of the weights hold, and for numbers that every logit depends on, which the logits judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from growkit.checkpoint.tensors import TORCH_NAMES, Config
from growkit.checkpoint.widening import rounds
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.family import families

OF_THE_SAVING = frozenset(
    {
        *("transformers_version", "_name_or_path", "name_or_path", "torch_dtype", "auto_map"),
        *("_attn_implementation", "_attn_implementation_autoset", "transformers_weights"),
    }
)
"""Keys that say how a file came about; or are compared elsewhere."""

SHARED = frozenset(
    {
        *("vocab_size", "max_position_embeddings", "rope_parameters", "sliding_window"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
    }
)
"""Keys that mean the same in every class that has them."""

SIZES = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "num_noise_heads", "d_model", "d_ff", "d_kv"),
        *("n_embd", "n_inner", "n_layer", "n_head", "num_layers", "num_heads", "ffn_dim", "n_ctx"),
        *("ffn_hidden_size", "embedding_size", "word_embed_proj_dim", "hidden_dim", "rotary_dim"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "kv_channels"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"),
        *("v_head_dim", "num_experts", "num_local_experts", "n_routed_experts"),
        *("num_kv_heads", "n_head_kv", "block_ff_dim", "mlp_hidden_size", "max_window_layers"),
        *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"),  # names say the same
    }
).union(key for family in families().values() for key in family.size_keys if key not in SHARED)
"""Keys that a larger model of the same function may have other numbers for."""

OF_TRAINING = re.compile(
    r"initializer_.*|.*dropout.*|.*_pdrop|pretraining_tp|.*aux_loss.*|router_jitter_noise|"
    r"output_router_logits|output_attentions|output_hidden_states|use_cache|return_dict|"
    r"problem_type|num_labels|id2label|label2id|lambda_std_dev|.*init_std|gradient_checkpointing"
)
"""Keys that change nothing of what a trained model computes."""

JUDGED = re.compile(
    r".*(eps|epsilon)|.*multiplier.*|logits?_scal.*|scale_.*|.*_scale|query_pre_attn_scalar|"
    r"dim_model_base|mup_.*|tie_word_embeddings|final_logit_softcapping|attn_logit_softcapping"
)
"""Keys that every logit of every prompt depends on, so that logits judge whether they fit."""

SWITCHES = frozenset(DIFF.choices) | {"lambda_init", "shared_rank", "num_noise_heads"}
"""The variants of differential attention, likewise."""


def different_settings(first: Config, second: Config) -> tuple[list[str], list[str]]:
    """The keys that two configs resolve to other values.

    Args:
        first: the source's, complete.
        second: the target's.

    Returns:
        Those that make another model, and those that are only to be named.
    """
    alike = first.get("model_type") == second.get("model_type")
    deeper = first.get("num_hidden_layers") != second.get("num_hidden_layers")
    changed: list[str] = []
    named: list[str] = []
    missing: Any = object()
    for key in sorted(first.keys() | second.keys()):
        was, now = first.get(key, missing), second.get(key, missing)
        if was == now or key in OF_THE_SAVING or key in SIZES or key == "model_type":
            continue
        if not alike and (key not in SHARED or missing in (was, now)):
            continue
        if isinstance(was, dict) and isinstance(now, dict) and key.endswith("config"):
            inside = different_settings(was, now)
            changed += [f"{key}.{name}" for name in inside[0]]
            named += [f"{key}.{name}" for name in inside[1]]
        elif _harmless(key, was, now, deeper):
            named.append(key)
        else:
            changed.append(key)
    return changed, named


def _harmless(key: str, was: Any, now: Any, deeper: bool) -> bool:
    if key == "dtype":
        return _holds(was, now)
    if key == "vocab_size":  # of more tokens, the logits of the old ones are compared
        return isinstance(was, int) and isinstance(now, int) and was < now
    if key == "architectures":
        return not was or not now
    if OF_TRAINING.fullmatch(key) or JUDGED.fullmatch(key) or key in SWITCHES:
        return True
    return deeper and isinstance(was, list) and isinstance(now, list)  # one entry for each layer


def _holds(was: Any, now: Any) -> bool:
    """Whether a dtype holds every number of another."""
    names: Mapping[str, str] = {name: short for short, name in TORCH_NAMES.items()}
    if was is None or now is None:
        return True
    both = [names[each] for each in (was, now) if isinstance(each, str) and each in names]
    return len(both) == 2 and not rounds(*both)
