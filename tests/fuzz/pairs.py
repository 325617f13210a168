"""Odd files beside the weights of a source and of what was made of it."""

from __future__ import annotations

import functools
import json
from random import Random
from typing import Any

from transformers import GenerationConfig

from tests.fuzz.case import Case
from tests.fuzz.contents import damaged
from tests.fuzz.lines import RECIPE_KEYS
from tests.fuzz.sources import CANARIES, CANARY, Places, config_keys
from tests.fuzz.values import change, json_text, words

MANIFEST = "target/growkit.json"
QUICK = ("--prompts", "1", "--length", "8")
VERIFY = ("verify", "source", "target", "--json", *QUICK)
GROW = ("grow", "source", "out", "--hidden", "x2", "--json")
MANIFEST_KEYS = [*RECIPE_KEYS, "recipe", "verification", "source_files", "files", "promise", "kept"]
MANIFEST_KEYS += ["kl_by_rank", "growkit", "versions", "created", "lost", "dropped", "copies"]
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
TOKENIZER_KEYS = words(
    "model vocab merges normalizer pre_tokenizer post_processor decoder added_tokens type content "
    "id special auto_map tokenizer_class model_max_length chat_template padding_side "
    "unk_token extra_special_tokens truncation padding added_tokens_decoder"
)


def _odd_manifest(random: Random, places: Places) -> bytes:
    sound = places["pair"].content(MANIFEST)
    if random.random() < 0.1:
        return damaged(random, sound)
    tree = json.loads(sound)
    if random.random() < 0.7:
        tree["recipe"] = change(random, tree["recipe"], MANIFEST_KEYS)
    else:
        tree = change(random, tree, MANIFEST_KEYS)
    return json_text(random, tree)


def manifest(random: Random, places: Places) -> Case:
    """An odd ``growkit.json`` in an output, where nothing is proved."""
    lines = [
        ("grow", "source", "target", "--hidden", "x2", "--overwrite", "--dry-run", "--json"),
        ("run", MANIFEST, "--output", "out", "--dry-run", "--json"),
        ("run", MANIFEST, "--dry-run", "--overwrite"),
        ("inspect", "target", "--json"),
    ]
    return Case("pair", random.choice(lines), {MANIFEST: _odd_manifest(random, places)})


def proof(random: Random, places: Places) -> Case:
    """An odd manifest, or an odd config on either side, of a pair that is proved."""
    name = random.choice([MANIFEST, "target/config.json", "source/config.json"])
    files: dict[str, Any] = {}
    if name == MANIFEST:
        files[name] = _odd_manifest(random, places)
    else:
        tree = json.loads(places["pair"].content(name))
        files[name] = json_text(random, change(random, tree, config_keys()))
        files |= {MANIFEST: {"none": True}} if random.random() < 0.3 else {}
    return Case("pair", VERIFY, files)


def tokenizer(random: Random, places: Places) -> Case:
    """An odd file of a tokenizer, where a text is read with it or two are compared."""
    name = f"{random.choice(('source', 'target'))}/{random.choice(TOKENIZER)}"
    sound = places["pair"].content(name)
    files: dict[str, Any] = {name: damaged(random, sound)}
    if random.random() < 0.8:
        files[name] = json_text(random, change(random, json.loads(sound), TOKENIZER_KEYS))
    files |= {f"source/{random.choice(CANARIES)}": CANARY} if random.random() < 0.1 else {}
    files |= {MANIFEST: {"none": True}} if random.random() < 0.3 else {}
    lines = [
        (*VERIFY, "--text", "text.txt"),
        VERIFY,
        (*GROW, "--text", "text.txt", *QUICK),
        (*GROW, "--no-verify"),
        (*GROW, "--dry-run", "--text", "text.txt"),
    ]
    return Case("pair", random.choice(lines), files)


@functools.cache
def _generation_keys() -> list[str]:
    return sorted(GenerationConfig().to_dict())


def generation(random: Random, places: Places) -> Case:
    """Odd generation settings."""
    name = f"{random.choice(('source', 'target'))}/generation_config.json"
    sound = places["pair"].content(name)
    content = damaged(random, sound)
    if random.random() < 0.85:
        content = json_text(random, change(random, json.loads(sound), _generation_keys()))
    return Case("pair", random.choice([VERIFY, (*GROW, *QUICK)]), {name: content})


def text(random: Random, places: Places) -> Case:
    """An odd text."""
    content = damaged(random, places["words"].content("text.txt")) * random.choice([1, 1, 1, 100])
    convert = ("convert", "source", "out", "--to", "shared-diff", "--rank", "1")
    lines = [
        (*GROW, "--dry-run", "--text", "text.txt"),
        (*GROW, "--text", "text.txt", *QUICK),
        (*convert, "--calibration", "text.txt", "--dry-run", "--json"),
    ]
    chosen = random.choices(lines, [8, 1, 2])[0]
    return Case(random.choice(("words", "llama")), chosen, {"text.txt": content})
