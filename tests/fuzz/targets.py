"""What is made odd, how often, and the command that then runs."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import typer
from transformers import CONFIG_MAPPING, GenerationConfig

from growkit.cli.app import app
from growkit.families.family import families
from growkit.modeling.configuration_diff_transformer import DiffTransformerConfig
from tests.fuzz import steps
from tests.fuzz.odd import (
    HOSTILE,
    WHOLE,
    WORDS,
    change,
    damaged,
    json_text,
    odd_archive,
    odd_safetensors,
    words,
    yaml_text,
)
from tests.fuzz.places import KINDS, Case, Place

Places = Mapping[str, Place]

CONFIG, WEIGHTS = "source/config.json", "source/model.safetensors"
INDEX, PICKLE = "source/model.safetensors.index.json", "source/pytorch_model.bin"
MANIFEST = "target/growkit.json"
VARIANTS = words(
    "diff diff-v2 dint gda shared-diff diffllama motif microsoft microsoft-v2 "
    "diff-transformer llama mistral"
)
CONFIG_KEYS = words(
    "model_type architectures auto_map dtype torch_dtype quantization_config "
    "attn_implementation _attn_implementation layer_types sliding_window num_experts "
    "transformers_weights text_config adapter_config num_local_experts use_cache "
    "rope_parameters rope_scaling rope_theta factor rope_type lambda_init num_noise_heads "
    "shared_rank shared_scope value_head_dim head_dim gamma low_freq_factor "
    "high_freq_factor original_max_position_embeddings beta_fast short_factor long_factor "
    "attention_factor partial_rotary_factor mscale grouped_ratio k_ratio hidden_act"
)
RECIPE_KEYS = words(
    "source output steps verify seed dtype shard_size grow convert hidden ffn heads "
    "kv_heads signal_heads noise_heads symmetry rank snr_db text prompts length device "
    "trainability energy tolerance calibration shrinkage gamma head_norm scope"
)
MANIFEST_KEYS = RECIPE_KEYS + words(
    "recipe verification source_files files promise kept kl_by_rank growkit versions created lost"
)
TOKENIZER_KEYS = words(
    "model vocab merges normalizer pre_tokenizer post_processor decoder added_tokens type "
    "content id special auto_map tokenizer_class model_max_length chat_template "
    "padding_side unk_token"
)
CANARY = b"open('canary', 'w').close()\nraise SystemExit(99)\n"
CANARIES = words(
    "canary.py modeling_canary.py configuration_canary.py tokenization_canary.py "
    "custom_generate/generate.py"
)
LINKS = words(
    "elsewhere ../elsewhere/secret.txt .. . /dev/zero /dev/stdin nowhere config.json "
    "../source ../recipe.yaml ../.. /proc/self/mem /etc/hostname"
)
OTHER_FILES = words(
    "adapter_config.json adapter_model.safetensors additional_chat_templates/a.jinja "
    "LICENSE tokenizer.model vocab.txt merges.txt shard-00001.safetensors "
    "model-00001-of-00001.safetensors model.safetensors.index.json pytorch_model.bin "
    "preprocessor_config.json tokenizer"
)
QUICK = ("--prompts", "1", "--length", "8")
VERIFY = ("verify", "source", "target", "--json", *QUICK)
GROW = ("grow", "source", "out", "--hidden", "x2", "--json")


@functools.cache
def config_keys() -> list[str]:
    """Every key that a config may have, as far as one can list them."""
    kinds = {kind for family in families().values() for kind in family.model_types}
    known = {key for kind in kinds & {*CONFIG_MAPPING} for key in CONFIG_MAPPING[kind]().to_dict()}
    return sorted(known | {*DiffTransformerConfig().to_dict()} | {*CONFIG_KEYS})


def look(random: Random) -> tuple[str, ...]:
    """A command that reads a source and writes nothing; mostly as JSON, which is fast."""
    shown = ("--json",) if random.random() < 0.9 else ()
    if random.random() < 0.5:
        return ("inspect", "source", *shown)
    return (*make(random), "--dry-run", *shown)


def make(random: Random) -> tuple[str, ...]:
    """A command that makes something of a source."""
    if random.random() < 0.4:
        return steps.line(random)
    if random.random() < 0.5:
        to = random.choice(VARIANTS)
        rank = ("--rank", random.choice(["1", "2", "100"])) if to == "shared-diff" else ()
        return ("convert", "source", "out", "--to", to, *rank)
    grow = ("grow", "source", "out", "--hidden", random.choice(["x2", "x3", "16"]))
    grouped = ("--method", "group-diff", "--signal-heads", random.choice(["x2", "x4", "8"]))
    return (*grow, *random.choice([(), (), ("--symmetry", "keep"), grouped]))


def odd_json(random: Random, sound: bytes, keys: list[str]) -> bytes:
    """A JSON file, changed in its values or in its bytes."""
    if random.random() < 0.15:
        return damaged(random, sound)
    return json_text(random, change(random, json.loads(sound), keys))


def config(random: Random, places: Places) -> Case:
    """An odd ``config.json``."""
    place = random.choice(KINDS)
    files = {CONFIG: odd_json(random, places[place].content(CONFIG), config_keys())}
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
    content = odd_json(random, sound, ["weight_map", "metadata", "config.json", *names])
    if random.random() < 0.4:
        shards = ["../elsewhere/secret.txt", "/dev/zero", "config.json", ".", "", "a/b", *HOSTILE]
        tree["weight_map"][random.choice(names)] = random.choice(shards)
        content = json_text(random, tree)
    files: dict[str, Any] = {INDEX: content}
    if random.random() < 0.1:  # the same, for pickles
        files = {"source/pytorch_model.bin.index.json": content, INDEX: {"none": True}}
    return Case("sharded", look(random), files)


def pickled(random: Random, places: Places) -> Case:
    """An odd ``.bin``."""
    files = {PICKLE: odd_archive(random, places["bin"].content(PICKLE))}
    return Case("bin", look(random), files)


def folder(random: Random, places: Places) -> Case:
    """Links, pipes and folders in place of files; files that are missing, or not expected."""
    place = random.choice(("llama", "words", "sharded", "bin", "pair", "diff"))
    names = [name for name in places[place].files if name.startswith(("source", "target"))]
    names += ["source", "out", *(f"source/{name}" for name in OTHER_FILES)]
    files: dict[str, Any] = {}
    for name in random.sample(names, random.choice([1, 1, 2])):
        if "source" not in files and not (name == "source" and files):
            link = {"link": random.choice(LINKS)}
            contents: list[Any] = [b"", b"{}", b"\0" * 50, {"folder": True}, {"none": True}]
            files[name] = random.choice([link, link, {"pipe": True}, random.choice(contents)])
    line = look(random)
    if place == "pair" and random.random() < 0.5:
        line = random.choice([VERIFY, ("inspect", "target")])
    elif random.random() < 0.2:
        line = (*make(random), "--no-verify", "--json")
    return Case(place, line, files)


def growth(random: Random, places: Places) -> Case:
    """An odd config or odd weights, from which a model is really made."""
    drawn = random.choice([config, weights, weights, index, pickled])(random, places)
    quick = QUICK if random.random() < 0.15 else ("--no-verify",)
    return Case(drawn.place, (*make(random), "--json", *quick), drawn.files)


# --- Recipes and command lines --------------------------------------------------------------------

RECIPES: list[dict[str, Any]] = [
    {
        "source": "source",
        "output": "out",
        "steps": [{"grow": "hypercloning", "hidden": "x2", "symmetry": "keep"}],
        "verify": {"prompts": 1, "length": 8, "seed": 0, "device": "cpu", "trainability": False},
        "seed": 3,
        "dtype": "float64",
        "shard_size": "1KB",
    },
    {
        "source": "source",
        "output": "out",
        "steps": [
            {"convert": "diff", "head_norm": "none"},
            {"grow": "group-diff", "hidden": "x2", "signal_heads": "x2", "snr_db": 20},
        ],
        "verify": False,
    },
    {
        "source": "source",
        "output": "out",
        "steps": [{"convert": "shared-diff", "rank": "auto", "calibration": "text.txt"}],
    },
]
YAML = [
    "a: &a [x, x, x]\nb: &b [*a, *a, *a, *a, *a, *a]\nc: [*b, *b, *b, *b, *b, *b]\n",
    "? !!python/object/apply:os.system ['touch canary']\n: 1\n",
    "&a [*a]\n",
    "source: source\nsource: other\noutput: out\nsteps: [{grow: hypercloning, hidden: x2}]\n",
    "<<: {source: source, output: out}\nsteps: [{grow: hypercloning, hidden: x2}]\n",
    "--- a\n--- b\n",
    "source: 2026-11-22\noutput: 12:30:45\nsteps: [{grow: 0o17}]\n",
    "source: !!binary aGVsbG8=\noutput: !!set {a, b}\nsteps: !!omap [a: 1]\n",
    "? [a, b]\n: c\n",
    "- " * 1500 + "a",
    "steps: &a\n  - *a\nsource: source\noutput: out\n",
    "verify: {seed: 1e400, prompts: .inf, length: .nan}\nsource: source\noutput: out\nsteps: []\n",
    "seed: 0x" + "f" * 6000 + "\nsource: source\noutput: out\nsteps: [{grow: hypercloning}]\n",
]
LINES = [
    shlex.split(line)
    for line in (
        "inspect source --json",
        "grow source out --hidden x2 --dry-run --json",
        "grow source out --hidden 8 --kv-heads x1 --seed 7 --dtype float64 --dry-run",
        "grow source out --method group-diff --signal-heads x2 --snr-db 20 --dry-run --json",
        "grow source out --ffn x4 --text text.txt --prompts 2 --length 8 --device cpu --dry-run",
        "grow source out --hidden x2 --report proof.html --overwrite --dry-run",
        "grow source out --hidden x2 --shard-size 1KB --no-verify --trainability --dry-run --json",
        "convert source out --to diff --head-norm none --dry-run --json",
        "convert source out --to shared-diff --rank auto --tolerance 0.1 --dry-run",
        "convert source out --to shared-diff --rank 1 --calibration text.txt --dry-run",
        "run recipe.yaml --source source --output out --dry-run --json",
        "recipes show grow-llama",
        "recipes copy grow-llama elsewhere",
        "verify source nowhere --prompts 1 --length 8 --json",
        "probe source --candidates wider-mlp hypercloning-x2 --text text.txt --lr 1e-3 --json",
        "probe source --candidates recipe.yaml --text text.txt --seeds 2 --work elsewhere/work",
        "demo --hidden q --signal-heads q",
    )
]
ARGUMENTS = [word for word in HOSTILE if "\0" not in word] + [str(n) for n in WHOLE] + WORDS
ARGUMENTS += words(
    "source out text.txt recipe.yaml elsewhere source/config.json nowhere x1 x2 x1000000 "
    "1e9 -x2 0x2 1KB 0B 1e400GB nanGB /dev/null /dev/null/x /proc/self/mem /proc/1/x "
    "out/a/b source/out"
)
ARGUMENTS += ["a" * 100_000]


def recipe(random: Random, places: Places) -> Case:
    """An odd recipe."""
    place = random.choice(("llama", "llama", "diffllama", "diff"))
    sound = RECIPES[random.randrange(3) if place == "llama" else 0]
    content = random.choice(
        [
            *[yaml_text(random, change(random, sound, RECIPE_KEYS))] * 8,
            damaged(random, yaml_text(random, sound)),
            random.choice(YAML).encode(),
        ]
    )
    return Case(place, ("run", "recipe.yaml", "--dry-run", "--json"), {"recipe.yaml": content})


@functools.cache
def _options() -> dict[str, list[str]]:
    """Every option of every command."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: [word for p in command.params for word in p.opts if word.startswith("-")]
        for name, command in commands.items()
    }


def arguments(random: Random, places: Places) -> Case:
    """An odd command line."""
    line = list(random.choice(LINES))
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        at = random.randrange(1, len(line) + 1)
        what = random.randrange(8)
        option = random.choice(_options().get(line[0]) or ["--json"])
        odd_one = random.choice(ARGUMENTS)
        if what < 4:
            line[at : at + 1] = [odd_one]
        elif what < 6:
            line[at:at] = [option] if what == 4 else [option, odd_one]
        else:
            line[at : at + what - 6] = [odd_one] if what == 6 else []
    if line[0] in ("grow", "convert", "run") and "--dry-run" not in line:
        line.insert(1, "--dry-run")
    # A demo takes ten seconds unless a size makes no sense, and a probe trains for any steps.
    line += {"demo": ["--signal-heads", "q"], "probe": ["--steps", "0"]}.get(line[0], [])
    return Case(random.choice(("llama", "diffllama", "diff", "words", "pair")), tuple(line))


# --- Pairs ----------------------------------------------------------------------------------------


def _odd_manifest(random: Random, places: Places) -> bytes:
    tree = json.loads(places["pair"].content(MANIFEST))
    if random.random() < 0.6:
        tree["recipe"] = change(random, tree["recipe"], MANIFEST_KEYS)
        return json_text(random, tree)
    return odd_json(random, places["pair"].content(MANIFEST), MANIFEST_KEYS)


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
    if name == MANIFEST:
        return Case("pair", VERIFY, {name: _odd_manifest(random, places)})
    content = odd_json(random, places["pair"].content(name), config_keys())
    none = {MANIFEST: {"none": True}} if random.random() < 0.3 else {}
    return Case("pair", VERIFY, {name: content, **none})


def tokenizer(random: Random, places: Places) -> Case:
    """An odd file of a tokenizer, where a text is read with it or two are compared."""
    files = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    name = f"{random.choice(('source', 'target'))}/{random.choice(files)}"
    odd: dict[str, Any] = {name: odd_json(random, places["pair"].content(name), TOKENIZER_KEYS)}
    odd |= {f"source/{random.choice(CANARIES)}": CANARY} if random.random() < 0.1 else {}
    odd |= {MANIFEST: {"none": True}} if random.random() < 0.3 else {}
    text = ("--text", "text.txt")
    lines = [(*VERIFY, *text), VERIFY, (*GROW, *text, *QUICK), (*GROW, "--dry-run", *text)]
    return Case("pair", random.choice([*lines, (*GROW, "--no-verify")]), odd)


def generation(random: Random, places: Places) -> Case:
    """Odd generation settings."""
    name = f"{random.choice(('source', 'target'))}/generation_config.json"
    content = odd_json(random, places["pair"].content(name), sorted(GenerationConfig().to_dict()))
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


TARGETS: dict[str, tuple[Callable[[Random, Places], Case], float]] = {
    "config": (config, 30),
    "weights": (weights, 18),
    "index": (index, 8),
    "pickled": (pickled, 8),
    "folder": (folder, 2),
    "recipe": (recipe, 13),
    "arguments": (arguments, 13),
    "steps": (steps.steps, 20),
    "manifest": (manifest, 4),
    "growth": (growth, 0.6),
    "text": (text, 0.3),
    "proof": (proof, 0.15),
    "tokenizer": (tokenizer, 0.15),
    "generation": (generation, 0.05),
}
"""Every target, and its share of the inputs: what runs models takes a hundred times as long."""


def draw(seed: int, number: int, places: Places, only: str | None = None) -> tuple[str, Case]:
    """The input of a number: its target, and what is odd."""
    random = Random(f"{seed}/{number}")
    target = only or random.choices(list(TARGETS), [share for _, share in TARGETS.values()])[0]
    return target, TARGETS[target][0](random, places)
