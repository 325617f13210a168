"""Configs that leave keys out: what its class assumes for them, the target resolves."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from random import Random
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig

from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.modeling import register
from growkit.planning.layouts import as_diff_transformer
from growkit.planning.operation import operations
from growkit.proof.config import different_settings
from growkit.recipe.planner import plan_recipe
from growkit.recipe.recipe import ConvertStep, GrowStep, Recipe, Step
from tests.conftest import save_model, save_random, seeded
from tests.sizes import KINDS

Config = dict[str, Any]

MEANINGS = (
    *("max_position_embeddings", "rope_parameters", "sliding_window", "use_sliding_window"),
    *("layer_types", "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"),
    *("hidden_act", "rms_norm_eps", "attention_dropout", "initializer_range", "attention_bias"),
    *("mlp_bias", "norm_topk_prob", "clip_qkv", "final_logit_softcapping", "rope_theta"),
    *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    *("temperature", "top_p", "do_sample", "max_length", "min_length", "repetition_penalty"),
)
"""Keys that mean the same in every class that has them, and that no growth changes."""

DIFFERENTIAL: dict[str, Config] = {
    "diff": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    "dint": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
    | {"integral": "causal", "gamma": "gated"},
    "v2": {"num_attention_heads": 4, "num_noise_heads": 2, "num_key_value_heads": 1}
    | {"noise_keys": "shared", "lambda_type": "projected", "head_norm": "none"}
    | {"head_dim": 8, "value_head_dim": 8},
}
"""Models of the DIFF Transformer's class, by what they are."""

STEPS: tuple[Step, ...] = (
    GrowStep("hypercloning", {"hidden": "x2"}),
    GrowStep("hypercloning", {"hidden": "x4"}),
    GrowStep("hypercloning", {"ffn": "x2"}),
    GrowStep("depth", {"layers": "x2"}),
    GrowStep("experts", {"experts": "x2"}),
    GrowStep("upcycle", {"experts": "4"}),
    GrowStep("group-diff", {"signal_heads": "x2"}),
)


@dataclass(frozen=True)
class Outcome:
    """What became of some keys that were left out.

    Attributes:
        keys: of the config.
        step: what was done.
        wrong: a key, what the source resolves it to, and what the target does; None if all is well.
    """

    keys: tuple[str, ...]
    step: str
    wrong: tuple[str, Any, Any] | None


def steps() -> Iterator[Step]:
    """All that is tried."""
    yield from STEPS
    for name, each in operations("convert").items():
        yield ConvertStep(name, {"rank": 1} if any(o.name == "rank" for o in each.options) else {})


def model(folder: Path, kind: str) -> Path:
    """A random model; numbers that are left out would have other defaults than these."""
    if kind in DIFFERENTIAL:
        return save_model(folder, "diff_transformer", **DIFFERENTIAL[kind])
    return save_random(folder, CONFIG_MAPPING[kind](**KINDS[kind].any(seeded(1))))


def resolve(config: Config, folder: Path) -> Config:
    """What transformers makes of a file with this config."""
    register()
    if config["model_type"] not in CONFIG_MAPPING:  # a layout that runs as a DIFF Transformer
        config = as_diff_transformer(config, "the config")
    plain = {key: value for key, value in config.items() if key != "auto_map"}
    (folder / "config.json").write_text(json.dumps(plain))
    found: Config = AutoConfig.from_pretrained(folder).to_dict()
    return found


def outcomes(kind: str, pairs: int, singles: int | None = None, seed: int = 0) -> Iterator[Outcome]:
    """Leave out keys of a model of a kind, and some pairs of keys.

    Args:
        kind: of the model.
        pairs: how many pairs, drawn at random.
        singles: how many keys, drawn at random; None for every one.
        seed: of what is drawn.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = model(folder / "source", kind)
        file = source / "config.json"
        whole = json.loads(file.read_text())
        keys = sorted(whole.keys() - {"model_type", "architectures", "transformers_version"})
        two = list(combinations(keys, 2))
        draw = Random(seed)
        one = keys if singles is None else draw.sample(keys, singles)
        chosen = draw.sample(two, min(pairs, len(two)))
        takes = [step for step in steps() if _target(source, step) is not None]
        for left_out in ((), *((key,) for key in one), *chosen):
            file.write_text(json.dumps({k: v for k, v in whole.items() if k not in left_out}))
            yield from _tried(source, folder, left_out, takes)


def _tried(
    source: Path, scratch: Path, left_out: tuple[str, ...], takes: Sequence[Step]
) -> Iterator[Outcome]:
    try:
        was = resolve(json.loads((source / "config.json").read_text()), scratch)
    except Exception:  # the class needs the key
        return
    for step in takes:
        made = _target(source, step)
        if made is None:  # a size, without which the weights do not fit
            continue
        now = resolve(made, scratch)
        wrong = _apart(was, now, step)
        words = f"{step.verb} {step.name} {dict(step.options)}"
        yield Outcome(left_out, words, wrong[0] if wrong else None)
        if len(left_out) < 2:
            yield from _by_hand(was, made, step, scratch, words)


def _by_hand(was: Config, made: Config, step: Step, scratch: Path, words: str) -> Iterator[Outcome]:
    """Leave keys out of the target's file alone: what that changes is named."""
    for key in sorted({*MEANINGS} & made.keys()):
        try:
            now = resolve({k: v for k, v in made.items() if k != key}, scratch)
        except Exception:  # the class needs the key
            continue
        apart = _apart(was, now, step)
        said = [*chain(*different_settings(was, now))]
        silent = [each for each in apart if each[0] not in said]
        yield Outcome((f"target's {key}",), words, silent[0] if silent else None)


def _apart(was: Config, now: Config, step: Step) -> list[tuple[str, Any, Any]]:
    """What two configs resolve otherwise; a window of 0 tokens is none."""

    def value(config: Config, key: str) -> Any:
        return config[key] or None if key == "sliding_window" else config[key]

    both = [key for key in MEANINGS if key in was and key in now]
    found = [(key, was[key], now[key]) for key in both if value(was, key) != value(now, key)]
    return [each for each in found if step.name != "depth" or each[0] != "layer_types"]


def _target(source: Path, step: Step) -> Config | None:
    """The config that a step plans; None if the model is refused."""
    try:
        recipe = Recipe(str(source), (step,), "out", verify=None)
        return plan_recipe(recipe, Checkpoint(source)).lineage.target.config
    except InputError:
        return None
