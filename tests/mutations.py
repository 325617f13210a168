"""Random sound pairs of all kinds: the proof must keep every one of them.

The faults that it must not keep are in ``tests/test_mutations.py``, all of them. Of the pairs, the
suite takes a sample; ``python -m tests.mutations --count 1000`` draws as many as one likes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random
from typing import Any

import growkit
from growkit.recipe.recipe import ConvertStep, GrowStep, Recipe, Step
from tests.conftest import save_model, seeded
from tests.sweeping import sweep
from tests.test_group_diff import draw_factors, draw_source, legal
from tests.test_llama import DTYPES, draw_diffllama
from tests.test_llama import draw as draw_llama


def draw_pair(choose: Random) -> tuple[str, dict[str, Any], tuple[Step, ...]]:
    """A random model, and random steps that promise to be exact."""
    symmetry = choose.choice(["break", "keep"])
    way = choose.choice(["llama", "mistral", "diffllama", "group-diff", "softmax", "diff"])
    if way == "diffllama":
        config, sizes = draw_diffllama(choose)
        return "diffllama", config, (GrowStep("hypercloning", sizes, symmetry=symmetry),)
    if way == "group-diff":
        kind, config, counts = draw_source(choose)
        factors = draw_factors(choose)
        while not legal(counts, factors):
            factors = draw_factors(choose)
        sizes = {name: f"x{factor}" for name, factor in factors.items()}
        return kind, config, (GrowStep("group-diff", sizes, symmetry=symmetry),)
    if way == "diff":
        return draw_conversion(choose, symmetry)
    config, sizes = draw_llama(choose)
    if way == "softmax":
        return "llama", config, (ConvertStep(choose.choice(["diff", "diff-v2"])),)
    if way == "mistral":
        del config["attention_bias"], config["mlp_bias"]
        config["sliding_window"] = choose.choice([None, 5])
    return way, config, (GrowStep("hypercloning", sizes, symmetry=symmetry),)


def draw_conversion(choose: Random, symmetry: str) -> tuple[str, dict[str, Any], tuple[Step, ...]]:
    """A random differential model, and a conversion that is exact, alone or after a growth."""
    kind, config, _ = draw_source(choose)
    wider = (GrowStep("group-diff", {"hidden": "x2"}, symmetry=symmetry),) * choose.choice([0, 1])
    if kind == "diffllama":
        return kind, config, (*wider, ConvertStep("diff-transformer"))
    config |= {"integral": "none", "qk_projection": "full"}
    grouped = config["num_attention_heads"] > 2 * config["num_noise_heads"]
    if grouped and choose.random() < 0.5:
        return kind, config, (*wider, ConvertStep("diff"))
    integral = choose.choice(["causal", "column_mean"])
    return kind, config, (*wider, ConvertStep("dint", {"integral": integral}))


def check_sound(seed: int, folder: Path) -> None:
    """Draw a pair, write it into a folder, and hold the proof to keeping it."""
    choose = seeded(seed)
    kind, config, steps = draw_pair(choose)
    config["num_hidden_layers"] = 2
    if "lambda_init" in config:
        config["lambda_init"] = [choose.uniform(0.1, 0.9) for _ in range(2)]
    source = save_model(folder / "source", kind, seed, choose.choice(DTYPES), **config)
    target = str(folder / "target")
    wider = choose.choice([None, None, None, "float64"])
    growkit.run(Recipe(str(source), steps, target, verify=None, seed=seed, dtype=wider))
    asked: dict[str, Any] = {"prompts": choose.choice([1, 2]), "length": choose.randint(12, 16)}
    result = growkit.verify(source, target, seed=seed, **asked)
    assert result["promise"] == "exact"
    assert result["kept"], result["reason"]
    assert result["weights_recovered"]


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    sys.exit(bool(sweep("sound pairs", seeds, check_sound)))


if __name__ == "__main__":
    main()
