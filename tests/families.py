"""Random models of every family, and random growths of them.

``python -m tests.families`` grows each a few times; ``python -m tests.families --seeds 40 phi olmo``
some of them, more often.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from safetensors.torch import save_file

import growkit
from tests.conftest import relative_error, save_random, seeded

Config = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """How random models of a type are made, and what can be done to them.

    Attributes:
        any: a random config.
        hidden: factors by which hidden can grow.
        kv: whether it has key-value heads of their own, so that these can stay as they are.
        heads: whether heads can grow apart from hidden.
        grows: whether hidden can grow at all, in a model of this config.
    """

    any: Callable[[Random], Config]
    hidden: tuple[int, ...] = (2, 3)
    kv: bool = True
    apart: bool = True
    grows: Callable[[Config], bool] = lambda config: True
    ffn: bool = True


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


LESS = {"intermediate_size": 24}

FAMILIES: dict[str, Kind] = {
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
    "starcoder2": Kind(lambda c: softmax(c, "use_bias", head_dim=coin(c))),
    "stablelm": Kind(
        lambda c: softmax(c, "use_qkv_bias", "use_parallel_residual", head_dim=False), apart=False
    ),
    "phi": Kind(lambda c: softmax(c, "qk_layernorm", head_dim=False), apart=False),
    "gpt_neox": Kind(
        lambda c: softmax(c, "attention_bias", "use_parallel_residual", head_dim=False),
        kv=False,
        apart=False,
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

    def _sizes(self, choose: Random) -> dict[str, str]:
        hidden = choose.choice([*self.kind.hidden, self.kind.hidden[0], 1]) if self.grows else 1
        sizes: dict[str, int] = {}
        if self.kind.ffn:
            sizes["ffn"] = choose.choice([2, 3] if hidden == 1 else [1, 2, 3])
        if hidden > 1:
            sizes["hidden"] = hidden
        heads = hidden
        if self.kind.apart and self.grows and coin(choose):
            heads = sizes["heads"] = choose.choice([1, 2, 3])
        if self.kind.kv and self.grows and coin(choose):
            sizes["kv_heads"] = 1
        return {name: f"x{factor}" for name, factor in sizes.items()}


def save(folder: Path, case: Case, seed: int) -> Path:
    """A lively random model, as transformers saves it."""
    kind = next(name for name, each in FAMILIES.items() if each is case.kind)
    return save_random(folder, CONFIG_MAPPING[kind](**case.config), seed, case.dtype)


def with_class_names(folder: Path, dtype: torch.dtype) -> None:
    """The same model with the tensors as the class has them, where files have others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    state = {name: each.contiguous() for name, each in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        state.pop("lm_head.weight")
    save_file(state, folder / "model.safetensors", {"format": "pt"})


def grow_any(kind: str, seed: int, folder: Path) -> float:
    """Grow a random model; the relative error of its logits in strict float64."""
    case = Case(FAMILIES[kind], seeded(seed))
    source, out = save(folder / "source", case, seed), folder / "out"
    if case.class_names:
        with_class_names(source, case.dtype)
    growkit.grow(source, out, symmetry=case.symmetry, verify=False, **case.sizes)
    return relative_error(source, out)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*", default=list(FAMILIES))
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    wrong = 0
    for kind in arguments.kinds or list(FAMILIES):
        largest, begin = 0.0, time.time()
        for seed in range(arguments.first, arguments.first + arguments.seeds):
            with tempfile.TemporaryDirectory() as folder:
                try:
                    error = grow_any(kind, seed, Path(folder))
                except Exception as problem:
                    case = Case(FAMILIES[kind], seeded(seed))
                    print(f"{kind} seed {seed}: {type(problem).__name__}: {problem} {case.sizes}")
                    wrong += 1
                    continue
            if error >= 1e-12:
                print(f"{kind} seed {seed}: {error:.2g} {Case(FAMILIES[kind], seeded(seed)).sizes}")
                wrong += 1
            largest = max(largest, error)
        print(f"{kind:12} {largest:.1e}  {time.time() - begin:.1f} s", flush=True)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
