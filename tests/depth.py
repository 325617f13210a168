"""Random models of every family, random growths of them in depth, and everything that must hold."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import growkit
from tests.conftest import edit_json, edit_weights, relative_error, seeded
from tests.families import FAMILIES, coin, gpt2, save_lively, softmax

Config = dict[str, Any]

FULL, WINDOW = "full_attention", "sliding_attention"


def diff(choose: Random, **more: Any) -> Config:
    return softmax(choose, "attention_bias", head_dim=False) | {
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": choose.choice([2, 4]),
        **more,
    }


def diff_transformer(choose: Random) -> Config:
    switches = {
        "integral": choose.choice(["none", "causal"]),
        "gamma": choose.choice(["unified", "gated"]),
        "head_norm": choose.choice(["affine", "plain", "none"]),
        "lambda_type": choose.choice(["vectors", "projected"]),
        "hidden_act": choose.choice(["silu", "poly_norm"]),
        "num_noise_heads": 2,
    }
    if coin(choose):
        switches |= {"qk_projection": "shared", "shared_rank": choose.choice([2, [1, 2, 3, 1]])}
    return diff(choose, num_key_value_heads=2, **switches)


KINDS: dict[str, Callable[[Random], Config]] = {
    **{kind: each.any for kind, each in FAMILIES.items()},
    "llama": lambda c: softmax(c, "attention_bias", "mlp_bias", head_dim=False),
    "mistral": lambda c: softmax(c, sliding_window=c.choice([None, 5])),
    "gpt2": lambda c: gpt2(c) | {"scale_attn_by_inverse_layer_idx": False},
    "diffllama": diff,
    "diff_transformer": diff_transformer,
}
"""By ``model_type``."""

LAYERS = 4

IDENTITY = {"do_layer_norm_before": True, "apply_residual_connection_post_layernorm": False}
"""Without these OPT and BLOOM have no blocks that change nothing."""


class Case:
    """A random model of a kind, and what is to become of it."""

    def __init__(self, kind: str, seed: int) -> None:
        choose = seeded(seed)
        self.kind, self.seed = kind, seed
        self.config = KINDS[kind](choose)
        self.config["num_hidden_layers"] = LAYERS
        if "layer_types" in self.config:
            self.config["layer_types"] = [choose.choice([FULL, WINDOW]) for _ in range(LAYERS)]
            if coin(choose):  # what the class makes of the number of a layer
                del self.config["layer_types"]
        if "no_rope_layers" in self.config:
            self.config["no_rope_layers"] = [int(coin(choose)) for _ in range(LAYERS)]
            if coin(choose):
                self.config |= {"no_rope_layers": None, "no_rope_layer_interval": 2}
        if kind in ("qwen2", "qwen3", "qwen2_moe"):
            used = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
            self.config |= used if coin(choose) else {}
        if "mlp_only_layers" in self.config:
            self.config["mlp_only_layers"] = choose.choice([[], [0], [1, 3]])
        if "first_k_dense_replace" in self.config:
            self.config["first_k_dense_replace"] = choose.choice([0, 1, 2])
        self.config |= {key: on for key, on in IDENTITY.items() if key in self.config}
        self.dtype = choose.choice([torch.float32, torch.bfloat16])
        if self.config.get("hidden_size", 8) % 8:  # products with experts need whole 16 bytes
            self.dtype = torch.float32
        self.without_lists = coin(choose)
        self.options: Config = choose.choice(
            [
                {"layers": "x1.5"},
                {"layers": "x2"},
                {"layers": 5, "place": "end"},
                {"place": [0, 1, 1, 3]},
                {"layers": 5, "place": choose.choice([0, 1, 2])},
            ]
        )

    def save(self, folder: Path) -> Path:
        """The model, as transformers saves it; or as files from before lists were written."""
        save_lively(folder, self.kind, self.config, self.seed, self.dtype)
        if self.without_lists:
            with edit_json(folder / "config.json") as config:
                for key in ("layer_types", "no_rope_layers"):
                    if self.config.get(key) is None:
                        config.pop(key, None)
        return folder

    def grow(self, folder: Path, **more: Any) -> tuple[Path, Path]:
        """The source and what it became."""
        source, out = self.save(folder / "source"), folder / "out"
        growkit.grow(source, out, method="depth", **{"verify": False, **self.options, **more})
        return source, out

    @property
    def new(self) -> list[int]:
        """The numbers of the new layers."""
        place = self.options.get("place", "even")
        behind = {"x1.5": [1, 3], "x2": [0, 1, 2, 3]}.get(str(self.options.get("layers")), [3])
        if place not in ("even", "end"):
            behind = place if isinstance(place, list) else [place]
        order = [layer for layer in range(LAYERS) for _ in range(1 + behind.count(layer))]
        return [place for place in range(1, len(order)) if order[place] == order[place - 1]]


def spoiled(folder: Path, layer: int, choose: Random) -> str:
    """Multiply what a layer writes by 1.5; the name of the tensor."""
    endings = ("o_proj.weight", "dense.weight", "out_proj.weight", "attn.c_proj.weight")
    with edit_weights(folder) as tensors:
        written = [name for name in tensors if f".{layer}." in name and name.endswith(endings)]
        name = choose.choice(sorted(written))
        tensors[name] *= 1.5
    return name


def without_gradient(folder: Path, new: list[int], steps: int = 3) -> list[str]:
    """Parameters of new layers that get no gradient after some steps of AdamW."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager", attn_implementation="eager"
    )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = torch.randint(29, (4, 16), generator=torch.Generator().manual_seed(0))
    for step in range(steps + 1):
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        if step < steps:
            optimizer.step()
    return [
        name
        for name, each in model.named_parameters()
        if any(f"s.{layer}." in name or f"h.{layer}." in name for layer in new)
        and (each.grad is None or not each.grad.any())
    ]


def check(kind: str, seed: int, folder: Path) -> None:
    """Everything that must hold of a growth in depth."""
    case = Case(kind, seed)
    quick = growkit.Settings(prompts=1, length=16, trainability=True)
    source, out = case.grow(folder, verify=quick)
    assert out.is_dir(), "rejected"
    error = relative_error(source, out)
    assert error < 1e-12, f"error {error}"
    silent = without_gradient(out, case.new)
    assert not silent, f"no gradient for {silent}"
    choose = seeded(seed)
    total = LAYERS + len(case.new)
    layer = choose.choice([each for each in range(total) if each not in case.new])
    name = spoiled(out, layer, choose)
    for manifest in (True, False):
        if not manifest:
            (out / "growkit.json").unlink()
        found = growkit.verify(source, out, prompts=1, length=16)
        assert not found["kept"], f"{name} was spoiled"
        if manifest:
            place = found["fault"] or {"layer": None, "tensor": None}
            assert (place["layer"], place["tensor"]) == (layer, name), f"{name}: {found['fault']}"
