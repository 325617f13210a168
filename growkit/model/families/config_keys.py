"""Keys of configs, recognised by their names."""

import re
from typing import Any

from growkit.base.tensors import Config

WIDTH = re.compile(r"(?i)intermediate|ffn|feed_forward|d_ff|dff|dim_ff|inner|mlp_dim|mlp_size")
"""Names of keys that are widths of an MLP."""

LAYERS = re.compile(r"(?i)layer|block|depth")
"""Names of keys that may be a number of layers."""

EXPERTS = re.compile(r"(?i)^(moe_)?(num|n)_(routed_|local_)?experts$")
"""Names of keys for the number of experts in a layer."""

KV_HEADS = re.compile(r"(?i)kv(_n)?_heads|key_value_heads|multi_query_group_num")
"""Names of keys for the number of key-value heads."""

HEADS = re.compile(r"(?<!d_)(?<!dim_)heads?$")
"""Names of keys for a number of heads; ``d_head`` and ``dim_head`` are the size of one."""

PERIODS = re.compile(r"(?i)period|interval|freq|pattern|every_n|sparse_step")
"""Names of keys of periods, in which kinds of layers alternate."""

PLACES = re.compile(rf"{PERIODS.pattern}|offset|index$")
"""Names of keys that decide the kind of each layer."""

TOP_K = re.compile(r"experts_per_tok(en)?$|^moe_(top_?)?k$|^top_?k_experts$")
"""Names of keys for the number of experts that a token uses."""

SCALING = re.compile(r"rout\w*_scal(e|ing_factor)$")
"""Names of keys for a factor of the output of all experts."""

GROUPS = "n_group", "num_expert_group", "topk_group"
"""Names of keys for the number of groups of experts, and of the groups that a token may use."""

EPS = ("eps", "epsilon", "norm_eps")
"""Suffixes of config keys for the number that a norm adds to a mean."""


def last_part(key: str) -> str:
    """A key without the part of the config that it is in."""
    return key.rpartition(".")[2]


def earlier_keys(config: Config) -> Config:
    """What a config says in the keys that it had before transformers 5, which others still read.

    Args:
        config: a config as its class completes it.
    """
    keys = dict[str, Any]()
    match config:
        case {
            "rope_parameters": {"full_attention": dict(rope), "sliding_attention": dict(local)},
            "layer_types": list(kinds),
        }:
            full = [index for index, kind in enumerate(kinds, 1) if kind == "full_attention"]
            period = full[0] if full else len(kinds) + 1
            keys["rope_local_base_freq"] = local.get("rope_theta")
            if full == [*range(period, len(kinds) + 1, period)]:
                keys["sliding_window_pattern"] = period
        case {"rope_parameters": {"rope_theta": _} as rope}:
            pass
        case _:
            return keys
    keys["rope_theta"] = rope.get("rope_theta")
    if rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {key: rope[key] for key in rope if key != "rope_theta"}
    return keys
