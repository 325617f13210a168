"""Random sound models with shared bases and low-rank updates: the proof must find no fault in them.

The suite takes a sample; ``python -m tests.sound_parts --count 1000`` draws as many as one likes.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.cli.demo import MODEL
from growkit.proof.weights import Origin, Recovered, compare_weights
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import ConvertStep, GrowStep, Recipe, Step
from tests.conftest import save_model, seeded
from tests.sweeping import sweep

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SCOPES = ["head", "layer", "all_heads"]
HEAD_DIM = 8
HEADS: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": HEAD_DIM,
    "hidden_size": 32,
}


def compared(recipe: Recipe) -> Recovered:
    """What comes back from the files that a recipe has made."""
    source = Checkpoint(recipe.source)
    way = plan_recipe(recipe, source)
    return compare_weights(Origin(way.lineage), Checkpoint(recipe.output))


def made(folder: Path, source: Path, *steps: Step, dtype: str | None = None) -> Recipe:
    """A recipe that has been carried out."""
    recipe = Recipe(str(source), steps, str(folder / "target"), verify=None, dtype=dtype)
    growkit.run(recipe)
    return recipe


def most_useful(folder: Path, source: Path, *steps: Step) -> int:
    """Rank 8, or the rank that is named where 8 is refused."""
    refusal = ""
    try:
        plan_recipe(
            Recipe(str(source), steps, str(folder / "target"), verify=None), Checkpoint(source)
        )
    except InputError as error:
        refusal = str(error)
    named = re.fullmatch(r"rank 8 is of no use: .*; choose at most ([1-7])", refusal)
    assert bool(named) == bool(refusal), refusal
    return int(named[1]) if named else 8


def check_sound_parts(seed: int, folder: Path) -> None:
    """Draw a model and steps, write it into a folder, and hold the proof to finding no fault."""
    choose = seeded(seed)
    scope = choose.choice(SCOPES)
    grouped = scope != "layer" and choose.random() < 0.5
    kind = "diff_transformer" if grouped else choose.choice(["diff_transformer", "diffllama"])
    config = HEADS | {"attention_bias": choose.random() < 0.5, "vocab_size": 256}
    if grouped:
        config |= {"num_attention_heads": 9, "num_noise_heads": 3, "num_key_value_heads": 6}
    source = save_model(folder / "source", kind, seed, choose.choice(DTYPES), **config)
    rank: Any = choose.choice([1, 2, 3, 4, 5, 8, "2,3"])
    options: dict[str, Any] = {"scope": scope, "rank": rank}
    calibrated = choose.random() < 0.2
    if calibrated:
        for file in MODEL.glob("tokenizer*"):
            shutil.copy(file, source)
        text = folder / "text.txt"
        text.write_text("Growing keeps what was learned. " * 20)
        options |= {"calibration": str(text), "shrinkage": choose.choice([0, 0.5, 1])}
    wider = GrowStep("group-diff", {"hidden": "x2"})
    before = [[], [wider], [ConvertStep("dint")]] if not grouped else [[], [wider]]
    after = [[], [wider], [GrowStep("group-diff", {"signal_heads": "x2"})]]
    if scope == "layer":
        after.pop()
    first, last = choose.choice(before), choose.choice(after)
    dtype = choose.choice([None, None, "float64"])
    if rank == 8:  # more than these heads can use, mostly; what is named instead must do
        options["rank"] = most_useful(folder, source, *first, ConvertStep("shared-diff", options))
    steps = [*first, ConvertStep("shared-diff", options), *last]
    recipe = made(folder, source, *steps, dtype=dtype)
    found = compared(recipe)
    assert found.lost is None
    assert not found.unchecked
    assert len(found.spectra) == 4
    for spectrum in found.spectra:
        assert spectrum["singular_values"] == sorted(spectrum["singular_values"], reverse=True)
        assert calibrated or spectrum["residual"] <= 1.01 * spectrum["best"] + 1e-3


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.count)
    sys.exit(bool(sweep("sound parts", seeds, check_sound_parts)))


if __name__ == "__main__":
    main()
