"""Odd sources: config, weights, index, pickle, and what else may lie in a folder."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from random import Random
from typing import Any

from transformers import CONFIG_MAPPING

from growkit.families.family import families
from growkit.modeling.configuration_diff_transformer import DiffTransformerConfig
from tests.fuzz import steps
from tests.fuzz.case import Case
from tests.fuzz.contents import damaged, odd_safetensors
from tests.fuzz.pickles import odd_pickle
from tests.fuzz.places import KINDS, Place
from tests.fuzz.values import HOSTILE, change, json_text, words

Places = Mapping[str, Place]

VARIANTS = words(
    "diff diff-v2 dint gda shared-diff diffllama motif microsoft microsoft-v2 diff-transformer "
    "llama mistral"
)
CONFIG = "source/config.json"
WEIGHTS = "source/model.safetensors"
INDEX = "source/model.safetensors.index.json"
PICKLE = "source/pytorch_model.bin"
OTHER_KEYS = words(
    "model_type architectures auto_map dtype torch_dtype quantization_config attn_implementation "
    "_attn_implementation layer_types sliding_window num_experts transformers_weights text_config "
    "adapter_config num_local_experts use_cache rope_parameters rope_scaling rope_theta factor "
    "rope_type lambda_init num_noise_heads shared_rank shared_scope value_head_dim head_dim gamma "
    "low_freq_factor high_freq_factor original_max_position_embeddings beta_fast short_factor "
    "long_factor attention_factor partial_rotary_factor mscale grouped_ratio k_ratio hidden_act "
    "num_key_value_groups lambda_std_dev"
)
CANARY = b"open('canary', 'w').close()\nraise SystemExit(99)\n"
CANARIES = words(
    "canary.py modeling_canary.py configuration_canary.py tokenization_canary.py "
    "custom_generate/generate.py"
)
LINKS = words(
    "elsewhere ../elsewhere/secret.txt .. . /dev/zero /dev/stdin nowhere config.json ../source "
    "../recipe.yaml ../.. /proc/self/mem /etc/hostname"
)
OTHER_FILES = words(
    "adapter_config.json adapter_model.safetensors additional_chat_templates/a.jinja LICENSE "
    "tokenizer.model vocab.txt merges.txt shard-00001.safetensors model-00001-of-00001.safetensors "
    "model.safetensors.index.json pytorch_model.bin preprocessor_config.json tokenizer"
)


def shown(random: Random) -> tuple[str, ...]:
    """Mostly as JSON: tables take longer than all the rest."""
    return ("--json",) if random.random() < 0.9 else ()


def look(random: Random) -> tuple[str, ...]:
    """A command that reads a source and writes nothing."""
    if random.random() < 0.5:
        return ("inspect", "source", *shown(random))
    return (*make(random), "--dry-run", *shown(random))


def make(random: Random) -> tuple[str, ...]:
    """A command that makes something of a source."""
    if random.random() < 0.4:
        return steps.line(random)
    if random.random() < 0.5:
        to = random.choice(VARIANTS)
        rank = ("--rank", random.choice(["1", "2", "100"])) if to == "shared-diff" else ()
        return ("convert", "source", "out", "--to", to, *rank)
    grow = ("grow", "source", "out", "--hidden", random.choice(["x2", "x3", "16"]))
    if random.random() < 0.6:
        return (*grow, "--symmetry", "keep") if random.random() < 0.3 else grow
    return (*grow, "--method", "group-diff", "--signal-heads", random.choice(["x2", "x4", "8"]))


@functools.cache
def config_keys() -> list[str]:
    """Every key that a config may have, as far as one can list them."""
    kinds = {kind for family in families().values() for kind in family.model_types}
    known = {
        key for kind in kinds & set(CONFIG_MAPPING) for key in CONFIG_MAPPING[kind]().to_dict()
    }
    return sorted(known | set(DiffTransformerConfig().to_dict()) | set(OTHER_KEYS))


def config(random: Random, places: Places) -> Case:
    """An odd ``config.json``."""
    place = random.choice(KINDS)
    sound = places[place].content(CONFIG)
    if random.random() < 0.15:
        files = {CONFIG: damaged(random, sound)}
    else:
        files = {CONFIG: json_text(random, change(random, json.loads(sound), config_keys()))}
    if random.random() < 0.03:
        files |= {f"source/{random.choice(CANARIES)}": CANARY}
    return Case(place, look(random), files)


def weights(random: Random, places: Places) -> Case:
    """Odd weights in safetensors."""
    place = random.choice(KINDS)
    files = {WEIGHTS: odd_safetensors(random, places[place].content(WEIGHTS))}
    return Case(place, look(random), files)


def index(random: Random, places: Places) -> Case:
    """An odd index of shards."""
    sound = places["sharded"].content(INDEX)
    tree = json.loads(sound)
    names = list(tree["weight_map"])
    kind = random.random()
    if kind < 0.15:
        content = damaged(random, sound)
    elif kind < 0.5:
        shards = ["../elsewhere/secret.txt", "/dev/zero", "config.json", ".", "", "a/b", *HOSTILE]
        tree["weight_map"][random.choice(names)] = random.choice(shards)
        content = json_text(random, tree)
    else:
        keys = ["weight_map", "metadata", "../elsewhere/secret.txt", "config.json", *names]
        content = json_text(random, change(random, tree, keys))
    files: dict[str, Any] = {INDEX: content}
    if random.random() < 0.1:
        shard = random.choice(sorted(n for n in places["sharded"].files if "-of-" in n))
        files[shard] = odd_safetensors(random, places["sharded"].content(shard))
    if random.random() < 0.1:  # the same, for pickles
        files = {"source/pytorch_model.bin.index.json": content, INDEX: {"none": True}}
    return Case("sharded", look(random), files)


def pickled(random: Random, places: Places) -> Case:
    """An odd ``.bin``."""
    files = {PICKLE: odd_pickle(random, places["bin"].content(PICKLE))}
    return Case("bin", look(random), files)


def folder(random: Random, places: Places) -> Case:
    """Links, pipes and folders in place of files; files that are missing, or not expected."""
    place = random.choice(("llama", "words", "sharded", "bin", "pair", "diff"))
    names = [name for name in places[place].files if name.startswith(("source", "target"))]
    names += ["source", "out", *(f"source/{name}" for name in OTHER_FILES)]
    files: dict[str, Any] = {}
    for name in random.sample(names, random.choice([1, 1, 2])):
        if "source" in files or (name == "source" and files):
            continue  # nothing can be odd in a folder that is something else
        files[name] = _other_kind(random)
    line = look(random)
    if place == "pair" and random.random() < 0.5:
        quick = ("--prompts", "1", "--length", "8")
        line = random.choice(
            [("verify", "source", "target", "--json", *quick), ("inspect", "target")]
        )
    elif random.random() < 0.2:
        line = (*make(random), "--no-verify", "--json")
    return Case(place, line, files)


def _other_kind(random: Random) -> Any:
    kind = random.randrange(8)
    if kind < 4:
        return {"link": random.choice(LINKS)}
    if kind < 7:
        return {("folder", "none", "pipe")[kind - 4]: True}
    return random.choice([b"", b"{}", b"\0" * 50, b"version https://git-lfs.github.com/spec/v1"])


def growth(random: Random, places: Places) -> Case:
    """An odd config or odd weights, from which a model is really made."""
    drawn = random.choice([config, weights, weights, index, pickled])(random, places)
    quick = ("--prompts", "1", "--length", "8") if random.random() < 0.15 else ("--no-verify",)
    return Case(drawn.place, (*make(random), "--json", *quick), drawn.files)
