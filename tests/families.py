"""Random models of every family, and random growths of them.

``python -m tests.families`` grows each a few times; ``python -m tests.families --seeds 40 phi``
some of them, more often.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from tests.conftest import relative_error, save_random, seeded
from tests.sweeping import sweep

Config = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """How random models of a type are made, and what can be done to them.

    Attributes:
        any: a random config.
        hidden: factors by which hidden can grow.
        kv: whether it has key-value heads of their own, so that these can stay as they are.
        apart: whether heads can grow apart from hidden.
        grows: whether hidden can grow at all, in a model of this config.
        by_hidden: whether the width of its blocks is a multiple of hidden.
        ffn: whether the MLP can have a width of its own.
        centred: whether its norms take the mean away, which zeros beside it would move.
    """

    any: Callable[[Random], Config]
    hidden: tuple[int, ...] = (2, 3)
    kv: bool = True
    apart: bool = True
    grows: Callable[[Config], bool] = lambda config: True
    by_hidden: bool = False
    ffn: bool = True
    centred: bool = False


SIZES: Config = {
    "vocab_size": 29,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def coin(choose: Random) -> bool:
    return choose.random() < 0.5


def softmax(choose: Random, *switches: str, head_dim: bool = True, **more: Any) -> Config:
    """Sizes by the names that most configs have; of the switches, each is on or off."""
    kv_heads, group = choose.choice([1, 2, 3]), choose.choice([1, 2])
    heads, width = kv_heads * group, choose.choice([4, 8])
    sizes = {
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": choose.choice([7, 24]),
        "tie_word_embeddings": coin(choose),
    }
    if head_dim:
        sizes |= {"hidden_size": choose.choice([12, 16, 20]), "head_dim": width}
    return SIZES | sizes | {switch: coin(choose) for switch in switches} | more


def windows(choose: Random) -> Config:
    """A window in some layers."""
    types = [choose.choice(["sliding_attention", "full_attention"]) for _ in range(2)]
    return {"layer_types": types, "sliding_window": 5}


MOE: Config = {"intermediate_size": 16, "num_experts_per_tok": 2}
ROPE: Config = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}


def latent(choose: Random, *switches: str, **more: Any) -> Config:
    """Multi-head latent attention."""
    heads = choose.choice([1, 2, 3])
    return SIZES | {
        **MOE,
        "hidden_size": 72,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": choose.choice([None, 7]),
        "kv_lora_rank": 6,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "moe_intermediate_size": choose.choice([8, 16]),
        "n_shared_experts": choose.choice([1, 2]),
        "n_routed_experts": 4,
        "first_k_dense_replace": choose.choice([0, 1]),
        "attention_bias": coin(choose),
        "tie_word_embeddings": coin(choose),
        **{switch: coin(choose) for switch in switches},
        **more,
    }


def opt(choose: Random) -> Config:
    """Norms before or behind the blocks, and an embedding of its own width in some."""
    switches = ("do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")
    sizes = softmax(choose, *switches, head_dim=False)
    del sizes["num_key_value_heads"]
    sizes["ffn_dim"] = sizes.pop("intermediate_size")
    return sizes | {
        "word_embed_proj_dim": choose.choice([sizes["hidden_size"], 10]),
        "_remove_final_layer_norm": choose.random() < 0.2,
    }


def opt_grows(config: Config) -> bool:
    """Something with a weight stands before a tied head."""
    norm = not config["do_layer_norm_before"] or not config["_remove_final_layer_norm"]
    apart = config["word_embed_proj_dim"] != config["hidden_size"]
    weight = config["layer_norm_elementwise_affine"]
    return not config["tie_word_embeddings"] or apart or (norm and weight)


def falcon(choose: Random) -> Config:
    """In all three orders."""
    switches = ("new_decoder_architecture", "multi_query", "parallel_attn", "bias")
    sizes = softmax(choose, *switches, head_dim=False)
    sizes["ffn_hidden_size"] = sizes.pop("intermediate_size")
    kv_heads = sizes.pop("num_key_value_heads")
    if sizes["new_decoder_architecture"]:
        sizes |= {"num_kv_heads": kv_heads, "num_ln_in_parallel_attn": choose.choice([1, 2])}
        sizes["parallel_attn"] = True
    return sizes | {"alibi": choose.random() < 0.1}


def bloom(choose: Random) -> Config:
    """Any number of heads: slopes are of two kinds where it is no power of two."""
    heads = choose.choice([1, 2, 3, 5, 6, 8])
    return SIZES | {
        "hidden_size": heads * choose.choice([2, 3]),
        "n_head": heads,
        "tie_word_embeddings": coin(choose),
        "apply_residual_connection_post_layernorm": coin(choose),
    }


def gpt2(choose: Random) -> Config:
    heads = choose.choice([1, 2, 3])
    return SIZES | {
        "n_embd": heads * choose.choice([4, 6]),
        "n_inner": choose.choice([None, 7, 24]),
        "n_head": heads,
        "n_positions": 64,
        "scale_attn_by_inverse_layer_idx": coin(choose),
        "activation_function": choose.choice(["gelu_new", "relu"]),
        "tie_word_embeddings": coin(choose),
    }


FAMILIES: dict[str, Kind] = {
    "gpt2": Kind(gpt2, kv=False, apart=False, centred=True),
    "gemma": Kind(lambda c: softmax(c, "attention_bias"), hidden=(4, 16)),
    "qwen2": Kind(lambda c: softmax(c, head_dim=coin(c))),
    "smollm3": Kind(
        lambda c: softmax(
            c, "attention_bias", "mlp_bias", head_dim=coin(c), no_rope_layers=[1, int(coin(c))]
        )
    ),
    "ministral": Kind(lambda c: softmax(c, **windows(c))),
    "ministral3": Kind(lambda c: softmax(c)),
    "olmo": Kind(
        lambda c: softmax(c, "attention_bias", clip_qkv=c.choice([None, 0.8]), head_dim=coin(c)),
        grows=lambda config: not config["tie_word_embeddings"],
        centred=True,
    ),
    "olmo2": Kind(lambda c: softmax(c, "attention_bias", head_dim=coin(c))),
    "olmo3": Kind(lambda c: softmax(c, "attention_bias", head_dim=coin(c), **windows(c))),
    "phi3": Kind(lambda c: softmax(c, head_dim=coin(c))),
    "granite": Kind(
        lambda c: softmax(
            c,
            "attention_bias",
            "mlp_bias",
            head_dim=coin(c),
            embedding_multiplier=1.7,
            residual_multiplier=0.8,
            attention_multiplier=0.3,
            logits_scaling=1.3,
        )
    ),
    "starcoder2": Kind(lambda c: softmax(c, "use_bias", head_dim=coin(c)), centred=True),
    "nemotron": Kind(
        lambda c: softmax(c, "attention_bias", "mlp_bias", head_dim=coin(c)), centred=True
    ),
    "stablelm": Kind(
        lambda c: softmax(
            c, "use_qkv_bias", "use_parallel_residual", "qk_layernorm", head_dim=False
        ),
        apart=False,
        centred=True,
    ),
    "phi": Kind(lambda c: softmax(c, "qk_layernorm", head_dim=False), apart=False, centred=True),
    "gpt_neox": Kind(
        lambda c: softmax(c, "attention_bias", "use_parallel_residual", head_dim=False),
        kv=False,
        apart=False,
        centred=True,
    ),
    "qwen3_moe": Kind(
        lambda c: softmax(
            c,
            "attention_bias",
            **MOE,
            moe_intermediate_size=c.choice([8, 16]),
            num_experts=c.choice([2, 4]),
            decoder_sparse_step=c.choice([1, 2]),
            mlp_only_layers=c.choice([[], [0]]),
            hidden_size=16,
        )
    ),
    "qwen2_moe": Kind(
        lambda c: softmax(
            c,
            "qkv_bias",
            **MOE,
            moe_intermediate_size=c.choice([8, 16]),
            shared_expert_intermediate_size=c.choice([8, 24]),
            num_experts=c.choice([2, 4]),
            decoder_sparse_step=c.choice([1, 2]),
            hidden_size=16,
        )
    ),
    "olmoe": Kind(
        lambda c: softmax(c, "attention_bias", **MOE, num_experts=4, head_dim=False), apart=False
    ),
    "flex_olmo": Kind(
        lambda c: softmax(
            c, "attention_bias", **MOE, num_experts=4, norm_topk_prob=coin(c), hidden_size=16
        )
    ),
    "granitemoe": Kind(
        lambda c: softmax(
            c, "attention_bias", **MOE, num_local_experts=4, hidden_size=16, logits_scaling=1.3
        )
    ),
    "gpt_oss": Kind(
        lambda c: softmax(
            c, "attention_bias", **MOE, **windows(c), **ROPE, num_local_experts=4, hidden_size=16
        )
    ),
    "deepseek_v2": Kind(lambda c: latent(c, "mlp_bias"), kv=False),
    "deepseek_v3": Kind(lambda c: latent(c, n_group=2, topk_group=1), kv=False),
    "gemma2": Kind(
        lambda c: softmax(c, "attention_bias", **windows(c), hidden_size=72), hidden=(4,)
    ),
    "gemma3_text": Kind(
        lambda c: softmax(c, "attention_bias", **windows(c), hidden_size=72), hidden=(4,)
    ),
    "cohere": Kind(
        lambda c: softmax(c, "attention_bias", "use_qk_norm", head_dim=coin(c)), centred=True
    ),
    "cohere2": Kind(
        lambda c: softmax(c, "attention_bias", head_dim=False, **windows(c)),
        apart=False,
        centred=True,
    ),
    "opt": Kind(opt, kv=False, apart=False, grows=opt_grows, centred=True),
    "falcon": Kind(
        falcon, kv=False, apart=False, grows=lambda config: not config["alibi"], centred=True
    ),
    "bloom": Kind(bloom, kv=False, apart=False, ffn=False, centred=True),
    "mamba": Kind(
        lambda c: (
            SIZES
            | {
                "hidden_size": c.choice([12, 20]),
                "expand": c.choice([1, 2]),
                "state_size": 5,
                "time_step_rank": 3,
                "conv_kernel": c.choice([2, 4]),
                "use_bias": coin(c),
                "use_conv_bias": coin(c),
                "tie_word_embeddings": coin(c),
            }
        ),
        kv=False,
        apart=False,
        by_hidden=True,
    ),
}
"""By ``model_type``."""


class Case:
    """A random model of a kind, and a random growth of it."""

    def __init__(self, kind: Kind, choose: Random) -> None:
        self.kind = kind
        self.config = kind.any(choose)
        self.least = kind.hidden[0]
        self.dtype = choose.choice([torch.float32, torch.bfloat16])
        self.grows = kind.grows(self.config)
        self.first = "hidden" if self.grows else "ffn"
        self.symmetry = choose.choice(["break", "keep"])
        self.class_names = choose.random() < 0.3
        self.sizes = self._sizes(choose)
        self.base_names = choose.random() < 0.2

    def _sizes(self, choose: Random) -> dict[str, str]:
        still = [1] if self.kind.ffn else []
        factors = [*self.kind.hidden, self.kind.hidden[0], *still]
        hidden = choose.choice(factors) if self.grows else 1
        sizes: dict[str, int] = {}
        if self.kind.ffn:
            sizes["ffn"] = choose.choice([2, 3] if hidden == 1 else [1, 2, 3])
        if self.kind.by_hidden:
            sizes["ffn"] *= hidden
        if hidden > 1:
            sizes["hidden"] = hidden
        if self.kind.apart and self.grows and coin(choose):
            sizes["heads"] = choose.choice([1, 2, 3])
        if self.kind.kv and self.grows and coin(choose):
            sizes["kv_heads"] = 1
        return {name: f"x{factor}" for name, factor in sizes.items()}


def save(folder: Path, case: Case, seed: int) -> Path:
    """A lively random model, as transformers saves it."""
    kind = next(name for name, each in FAMILIES.items() if each is case.kind)
    save_random(folder, CONFIG_MAPPING[kind](**case.config), seed, case.dtype)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, each in tensors.items():
        if name.endswith("e_score_correction_bias"):  # a buffer, which starts as zeros
            each.copy_(torch.linspace(-0.3, 0.2, len(each)))
    save_file(tensors, file, {"format": "pt"})
    return folder


def with_class_names(folder: Path, dtype: torch.dtype) -> None:
    """The same model with the tensors as the class has them, where files have others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    state = {name: each.contiguous() for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def with_base_names(folder: Path) -> None:
    """The same model with the tensors as the class without a head has them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    prefix = next(name for name in tensors if ".0." in name).partition(".")[0] + "."
    tensors = {name.removeprefix(prefix): each for name, each in tensors.items()}
    save_file(tensors, file, {"format": "pt"})


def grow_any(kind: str, seed: int, folder: Path) -> float:
    """Grow a random model; the relative error of its logits in strict float64."""
    case = Case(FAMILIES[kind], seeded(seed))
    source, out = save(folder / "source", case, seed), folder / "out"
    if case.class_names:
        with_class_names(source, case.dtype)
    if case.base_names:
        with_base_names(source)
    growkit.grow(source, out, symmetry=case.symmetry, verify=False, **case.sizes)
    return relative_error(source, out)


def _sizes(kind: str, seed: int) -> object:
    return Case(FAMILIES[kind], seeded(seed)).sizes


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    wrong = 0
    for kind in arguments.kinds or list(FAMILIES):
        wrong += sweep(kind, seeds, partial(grow_any, kind), partial(_sizes, kind))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
