"""Any size: random models of every family, in sizes that are no multiples, and with more tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from transformers import CONFIG_MAPPING

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from tests.conftest import TOKENS, load_strict, save_random, seeded
from tests.families import FAMILIES, Case, Kind, save, softmax

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""What one rounding of weights may do to the logits of such small models."""

NORMS_OVER_HEADS = {"olmo2", "olmo3", "olmoe"}

ROOTS = {"gemma", "gemma2", "gemma3_text"}
"""Those that multiply their embedding by the root of hidden."""

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 24}

OTHERS: dict[str, Kind] = {
    "llama": Kind(lambda c: softmax(c, "attention_bias", "mlp_bias", **HEADS)),
    "mistral": Kind(lambda c: softmax(c, **HEADS)),
    "diffllama": Kind(lambda c: softmax(c, **(HEADS | {"num_attention_heads": 8}))),
}
"""Those that have tests of their own, by ``model_type``."""

KINDS = FAMILIES | OTHERS


@dataclass(frozen=True)
class Asked:
    """A growth that is asked for.

    Attributes:
        options: of the growth.
        promise: what is promised; None where it is refused in the plan.
        may_refuse: whether the class may not have such sizes.
    """

    options: dict[str, Any]
    promise: str | None = "exact"
    may_refuse: bool = False


def asked(kind: str, config: dict[str, Any], choose: Random) -> list[Asked]:
    """What is asked of a model: a width, heads, tokens, a head of its own, a hidden size."""
    tied = config["tie_word_embeddings"]
    tokens = {"vocab": choose.choice([30, 37, 64]), "new_tokens": choose.choice(["mean", "zero"])}
    found = [Asked(tokens), Asked({"untie": True} | tokens, "exact" if tied else None)]
    if kind not in ("mamba", "bloom"):  # whose width is a multiple of hidden
        keys = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
        ffn = next((config[key] for key in keys if config.get(key)), 4 * config.get("n_embd", 0))
        options = {"ffn": ffn + choose.randrange(1, 2 * ffn)} | tokens
        # Products with experts of an odd width do not run in bfloat16.
        found.append(Asked(options, may_refuse=any("expert" in key for key in config)))
        found += _heads(kind, config, choose)
    found += _hidden(kind, config)
    return found


def _heads(kind: str, config: dict[str, Any], choose: Random) -> list[Asked]:
    """More heads beside each other; some classes want hidden to be a multiple."""
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv = config.get("num_key_value_heads", config.get("num_kv_heads"))
    each = 2 * kv if kind == "diffllama" else kv or 1
    options: dict[str, Any] = {"heads": heads + each * choose.choice([1, 2])}
    if kv and not kind.startswith("deepseek"):
        options["kv_heads"] = "x1"
    promise = None if kind in NORMS_OVER_HEADS and options["heads"] % heads else "exact"
    return [Asked(options, promise, may_refuse=kind not in OTHERS)]


def _hidden(kind: str, config: dict[str, Any]) -> list[Asked]:
    """Half as much again, by zeros; and twice as much, where a head of its own is needed."""
    rounded = None if KINDS[kind].centred else "bounded"
    tied = config["tie_word_embeddings"]
    found = [
        Asked({"hidden": "x3/2", "promise": "bounded"}, rounded, may_refuse=True),
        Asked({"hidden": "x3/2"}, None),
        Asked({"hidden": "x2"} | ({"untie": True} if tied else {}), may_refuse=True),
    ]
    if kind in ROOTS:
        found[2] = Asked({"hidden": "x2", "promise": "bounded"}, "bounded")
    return found


def error(source: Path, target: Path) -> float:
    """Largest difference of the old tokens' logits, relative to their scale."""
    before, after = load_strict(source), load_strict(target)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(before.config.vocab_size, (1, TOKENS), generator=generator)
    with strict_float64(), torch.no_grad():
        expected, found = before(ids).logits[0], after(ids).logits[0]
    found = found[:, : expected.shape[1]]
    return float((expected - found).abs().max() / expected.square().mean().sqrt())


def model(folder: Path, kind: str, seed: int) -> tuple[Path, Case]:
    """A lively random model, and what it is."""
    case = Case(KINDS[kind], seeded(seed))
    if kind in FAMILIES:
        return save(folder, case, seed), case
    return save_random(folder, CONFIG_MAPPING[kind](**case.config), seed, case.dtype), case


def grown(source: Path, out: Path, wanted: Asked, dtype: torch.dtype) -> float | None:
    """The error of a growth; None where it is refused as it should be."""
    quick = growkit.Settings(prompts=1, length=16)
    try:
        result = growkit.grow(source, out, verify=quick, **wanted.options)
    except InputError:
        if wanted.promise is None or wanted.may_refuse:
            return None
        raise
    assert result["promise"] == wanted.promise, result["promise"]
    assert result["kept"], result["verification"]
    found = error(source, out)
    assert found < (1e-12 if wanted.promise == "exact" else ROUNDING[dtype]), found
    return found if wanted.promise == "exact" else 0.0
