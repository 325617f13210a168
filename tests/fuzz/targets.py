"""What is made odd: one drawer of inputs for every kind of file, and for the command line."""

from __future__ import annotations

import functools
import json
import shlex
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import typer
from transformers import DiffLlamaConfig, GenerationConfig, LlamaConfig, MistralConfig

from growkit.cli import app
from growkit.modeling.configuration_diff_transformer import DiffTransformerConfig
from tests.fuzz.case import Case
from tests.fuzz.contents import YAML, damaged, odd_pickle, odd_safetensors, yaml_text
from tests.fuzz.places import Place
from tests.fuzz.values import HOSTILE, WHOLE, WORDS, change, json_text, odd

Places = Mapping[str, Place]
Drawer = Callable[[Random, Places], Case]

MODELS = ("llama", "mistral", "diffllama", "diff", "v2", "shared", "dint", "motif", "microsoft")
MODELS += ("microsoft-v2",)
CONFIG = "source/config.json"
WEIGHTS = "source/model.safetensors"
INDEX = "source/model.safetensors.index.json"
PICKLE = "source/pytorch_model.bin"
MANIFEST = "target/growkit.json"
OTHER_KEYS = [
    "model_type",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "quantization_config",
]
OTHER_KEYS += [
    "attn_implementation",
    "_attn_implementation",
    "layer_types",
    "sliding_window",
    "num_experts",
]
OTHER_KEYS += [
    "transformers_weights",
    "text_config",
    "adapter_config",
    "num_local_experts",
    "use_cache",
]
OTHER_KEYS += [
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "factor",
    "rope_type",
    "lambda_init",
]
OTHER_KEYS += [
    "num_noise_heads",
    "shared_rank",
    "shared_scope",
    "value_head_dim",
    "head_dim",
    "gamma",
]
OTHER_KEYS += [
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
]
OTHER_KEYS += ["short_factor", "long_factor", "attention_factor", "partial_rotary_factor", "mscale"]
OTHER_KEYS += ["grouped_ratio", "num_key_value_groups", "k_ratio", "lambda_std_dev", "hidden_act"]
CANARY = b"open('canary', 'w').close()\nraise SystemExit(99)\n"
CANARIES = ("canary.py", "modeling_canary.py", "configuration_canary.py", "tokenization_canary.py")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
QUICK = ("--prompts", "1", "--length", "8")
TARGETS_OF_CONVERT = ("diff", "diff-v2", "dint", "gda", "shared-diff", "diffllama", "motif")
TARGETS_OF_CONVERT += ("microsoft", "microsoft-v2", "diff-transformer", "llama", "mistral")


@functools.cache
def _config_keys() -> list[str]:
    classes = (LlamaConfig, MistralConfig, DiffLlamaConfig, DiffTransformerConfig)
    return sorted({key for kind in classes for key in kind().to_dict()} | set(OTHER_KEYS))


def config(random: Random, places: Places) -> Case:
    """An odd ``config.json``."""
    place = random.choice(MODELS)
    sound = places[place].content(CONFIG)
    if random.random() < 0.15:
        files = {CONFIG: damaged(random, sound)}
    else:
        files = {CONFIG: json_text(random, change(random, json.loads(sound), _config_keys()))}
    if random.random() < 0.03:
        files |= {f"source/{random.choice(CANARIES)}": CANARY}
    return Case(place, _look(random), files)


def _look(random: Random) -> tuple[str, ...]:
    """A command that reads a source and writes nothing."""
    if random.random() < 0.5:
        return ("inspect", "source", *_shown(random))
    return (*_change(random), "--dry-run", *_shown(random))


def _change(random: Random) -> tuple[str, ...]:
    """A command that makes something of a source."""
    if random.random() < 0.5:
        to = random.choice(TARGETS_OF_CONVERT)
        rank = ("--rank", random.choice(["1", "2", "100"])) if to == "shared-diff" else ()
        return ("convert", "source", "out", "--to", to, *rank)
    if random.random() < 0.6:
        keep = ("--symmetry", "keep") if random.random() < 0.3 else ()
        return ("grow", "source", "out", "--hidden", random.choice(["x2", "x3", "16"]), *keep)
    heads = random.choice(["x2", "x4", "8"])
    return (
        "grow",
        "source",
        "out",
        "--method",
        "group-diff",
        "--hidden",
        "x2",
        "--signal-heads",
        heads,
    )


def weights(random: Random, places: Places) -> Case:
    """Odd weights in safetensors."""
    place = random.choice(MODELS)
    files = {WEIGHTS: odd_safetensors(random, places[place].content(WEIGHTS))}
    return Case(place, _look(random), files)


def index(random: Random, places: Places) -> Case:
    """An odd index of shards."""
    sound = places["sharded"].content(INDEX)
    names = ["weight_map", "metadata", "total_size", "../elsewhere/secret.txt", "config.json"]
    if random.random() < 0.15:
        content = damaged(random, sound)
    else:
        tree = json.loads(sound)
        names += list(tree["weight_map"])
        if random.random() < 0.4:
            name = random.choice(list(tree["weight_map"]))
            shards = ["../elsewhere/secret.txt", "/dev/zero", "config.json", ".", "", "a/b", INDEX]
            tree["weight_map"][name] = random.choice([*shards, *HOSTILE])
        else:
            tree = change(random, tree, names)
        content = json_text(random, tree)
    files: dict[str, Any] = {INDEX: content}
    if random.random() < 0.1:
        shard = random.choice(sorted(n for n in places["sharded"].files if "-of-" in n))
        files[shard] = odd_safetensors(random, places["sharded"].content(shard))
    if random.random() < 0.1:  # the same, for pickles
        files = {"source/pytorch_model.bin.index.json": content, INDEX: {"none": True}}
    return Case("sharded", _look(random), files)


def pickled(random: Random, places: Places) -> Case:
    """An odd ``.bin``."""
    return Case("bin", _look(random), {PICKLE: odd_pickle(random, places["bin"].content(PICKLE))})


_RECIPES: list[dict[str, Any]] = [
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
            {"convert": "shared-diff", "rank": 2, "shrinkage": 0.1, "scope": "layer"},
        ],
        "verify": False,
    },
    {
        "source": "source",
        "output": "out",
        "steps": [
            {"convert": "shared-diff", "rank": "auto", "energy": 0.9, "calibration": "text.txt"}
        ],
    },
]
_RECIPE_KEYS = [
    "source",
    "output",
    "steps",
    "verify",
    "seed",
    "dtype",
    "shard_size",
    "grow",
    "convert",
]
_RECIPE_KEYS += [
    "hidden",
    "ffn",
    "heads",
    "kv_heads",
    "signal_heads",
    "noise_heads",
    "symmetry",
    "rank",
]
_RECIPE_KEYS += [
    "snr_db",
    "text",
    "prompts",
    "length",
    "device",
    "trainability",
    "energy",
    "tolerance",
]
_RECIPE_KEYS += ["calibration", "shrinkage", "gamma", "head_norm", "scope"]


def recipe(random: Random, places: Places) -> Case:
    """An odd recipe."""
    kind = random.random()
    place = random.choice(("llama", "llama", "diffllama", "diff"))
    if kind < 0.04:
        content = random.choice(YAML).encode()
        content = content if random.random() < 0.6 else damaged(random, content)
    else:
        sound = _RECIPES[random.randrange(3) if place == "llama" else 0]
        tree = change(random, sound, _RECIPE_KEYS)
        if kind < 0.2:
            content = damaged(random, yaml_text(random, sound))
        else:
            content = yaml_text(random, tree)
    return Case(
        place, ("run", "recipe.yaml", "--dry-run", *_shown(random)), {"recipe.yaml": content}
    )


def _shown(random: Random) -> tuple[str, ...]:
    return ("--json",) if random.random() < 0.9 else ()  # tables take longer than all the rest


@functools.cache
def _options() -> dict[str, list[str]]:
    """Every option of every command."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: [word for p in command.params for word in p.opts if word.startswith("-")]
        for name, command in commands.items()
    }


_LINES = [
    shlex.split(line)
    for line in (
        "inspect source",
        "inspect source --json",
        "grow source out --hidden x2 --dry-run --json",
        "grow source out --hidden 8 --kv-heads x1 --seed 7 --dtype float64 --dry-run",
        "grow source out --method group-diff --signal-heads x2 --snr-db 20 --dry-run --json",
        "grow source out --ffn x4 --text text.txt --prompts 2 --length 8 --device cpu --dry-run",
        "grow source out --hidden x2 --report proof.html --figures charts --overwrite --dry-run",
        "grow source out --hidden x2 --shard-size 1KB --no-verify --trainability --dry-run --json",
        "convert source out --to diff --head-norm none --dry-run --json",
        "convert source out --to shared-diff --rank 2 --energy 0.9 --dry-run",
        "convert source out --to shared-diff --rank auto --tolerance 0.1 --calibration text.txt --dry-run",
        "convert source out --to dint --gamma unified --dry-run --json",
        "run recipe.yaml --source source --output out --dry-run --json",
        "recipes list",
        "recipes show grow-llama",
        "recipes copy grow-llama elsewhere",
        "verify source nowhere --prompts 1 --length 8 --json",
        "demo --hidden q --signal-heads q",
    )
]
_ARGUMENTS = [word for word in HOSTILE if "\0" not in word] + [str(n) for n in WHOLE] + WORDS
_ARGUMENTS += [
    "source",
    "out",
    "text.txt",
    "recipe.yaml",
    "elsewhere",
    "source/config.json",
    "nowhere",
]
_ARGUMENTS += ["x1", "x2", "x1000000", "1e9", "-x2", "0x2", "1KB", "0B", "1e400GB", "5 GB", "nanGB"]
_ARGUMENTS += ["/dev/null", "/dev/null/x", "/proc/self/mem", "/proc/1/x", "a" * 100_000, "out/a/b"]


def arguments(random: Random, places: Places) -> Case:
    """An odd command line."""
    line = list(random.choice(_LINES))
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        at = random.randrange(1, len(line) + 1)
        what = random.randrange(8)
        options = _options().get(line[0], [])
        if what < 4 and at < len(line):
            line[at] = random.choice(_ARGUMENTS)
        elif what == 4 and options:
            line[at:at] = [random.choice(options)]
        elif what == 5 and options:
            line += [random.choice(options), random.choice(_ARGUMENTS)]
        elif what == 6:
            del line[at : at + 1]
        else:
            line[at:at] = [random.choice(_ARGUMENTS)]
    if line[0] in ("grow", "convert", "run") and "--dry-run" not in line:
        line.insert(1, "--dry-run")
    if line[0] == "demo":
        line[1:1] = ["--hidden", "q"] if "q" not in line else []
        line += ["--signal-heads", "q"]
    place = random.choice(("llama", "diffllama", "diff", "words", "pair"))
    return Case(place, tuple(line))


_LINKS = ["elsewhere", "../elsewhere/secret.txt", "..", ".", "/dev/zero", "/dev/stdin", "nowhere"]
_LINKS += ["config.json", "../source", "../recipe.yaml", "../..", "/proc/self/mem", "/etc/hostname"]


def folder(random: Random, places: Places) -> Case:
    """Links, pipes and folders in place of files; folders in odd places; files that are missing."""
    place = random.choice(("llama", "words", "sharded", "bin", "pair", "diff"))
    files: dict[str, Any] = {}
    names = [name for name in places[place].files if name.startswith(("source", "target"))]
    names += ["source", "source/adapter_config.json", "source/additional_chat_templates/a.jinja"]
    names += ["source/tokenizer.model", "source/vocab.txt", "source/merges.txt", "source/LICENSE"]
    names += ["source/shard-00001.safetensors", "source/model-00001-of-00001.safetensors", "out"]
    for name in random.sample(names, random.choice([1, 1, 2])):
        if "source" in files or (name == "source" and files):
            continue  # nothing can be odd in a folder that is something else
        kind = random.randrange(8)
        if kind < 4:
            files[name] = {"link": random.choice(_LINKS)}
        elif kind == 4:
            files[name] = {"folder": True}
        elif kind == 5:
            files[name] = {"none": True}
        elif kind == 6 and name != "source":
            files[name] = {"pipe": True}
        else:
            files[name] = random.choice(
                [b"", b"{}", b"\0" * 50, b"version https://git-lfs.github.com/"]
            )
    line = _look(random)
    if place == "pair" and random.random() < 0.5:
        line = random.choice(
            [("verify", "source", "target", "--json", *QUICK), ("inspect", "target")]
        )
    elif random.random() < 0.2:
        line = (*_change(random), "--no-verify", "--json")
    return Case(place, line, files)


_MANIFEST_KEYS = [
    "recipe",
    "verification",
    "source_files",
    "files",
    "promise",
    "kept",
    "kl_by_rank",
]
_MANIFEST_KEYS += [*_RECIPE_KEYS, "growkit", "versions", "created", "lost", "dropped", "copies"]


def _odd_manifest(random: Random, places: Places) -> bytes:
    sound = places["pair"].content(MANIFEST)
    if random.random() < 0.1:
        return damaged(random, sound)
    tree = json.loads(sound)
    if random.random() < 0.7:
        tree["recipe"] = change(random, tree["recipe"], _MANIFEST_KEYS)
    else:
        tree = change(random, tree, _MANIFEST_KEYS)
    return json_text(random, tree)


def manifest(random: Random, places: Places) -> Case:
    """An odd ``growkit.json`` in an output, where nothing is proved."""
    files = {MANIFEST: _odd_manifest(random, places)}
    lines = [
        ("grow", "source", "target", "--hidden", "x2", "--overwrite", "--dry-run", "--json"),
        ("run", "target/growkit.json", "--output", "out", "--dry-run", "--json"),
        ("run", "target/growkit.json", "--dry-run", "--overwrite"),
        ("inspect", "target", "--json"),
    ]
    return Case("pair", random.choice(lines), files)


def proof(random: Random, places: Places) -> Case:
    """An odd file in either folder of a pair that is proved."""
    name = random.choice([MANIFEST, "target/config.json", "source/config.json"])
    if name == MANIFEST:
        files = {name: _odd_manifest(random, places)}
    else:
        tree = json.loads(places["pair"].content(name))
        files = {name: json_text(random, change(random, tree, _config_keys()))}
    if random.random() < 0.2:
        files[MANIFEST] = {"none": True}  # type: ignore[assignment]
    return Case("pair", ("verify", "source", "target", "--json", *QUICK), files)


def tokenizer(random: Random, places: Places) -> Case:
    """An odd file of a tokenizer, where a text is read with it or two are compared."""
    side = random.choice(("source", "target"))
    name = f"{side}/{random.choice(TOKENIZER)}"
    sound = places["pair"].content(name)
    keys = ["model", "vocab", "merges", "normalizer", "pre_tokenizer", "post_processor", "decoder"]
    keys += ["added_tokens", "type", "content", "id", "special", "auto_map", "tokenizer_class"]
    keys += [
        "model_max_length",
        "chat_template",
        "padding_side",
        "unk_token",
        "extra_special_tokens",
    ]
    if random.random() < 0.2:
        content = damaged(random, sound)
    else:
        content = json_text(random, change(random, json.loads(sound), keys))
    files: dict[str, Any] = {name: content}
    if random.random() < 0.1:
        files[f"source/{random.choice(CANARIES)}"] = CANARY
    if random.random() < 0.3:
        files[MANIFEST] = {"none": True}
    lines = [
        ("verify", "source", "target", "--json", "--text", "text.txt", *QUICK),
        ("verify", "source", "target", "--json", *QUICK),
        ("grow", "source", "out", "--hidden", "x2", "--json", "--text", "text.txt", *QUICK),
        ("grow", "source", "out", "--hidden", "x2", "--json", "--no-verify"),
        ("grow", "source", "out", "--hidden", "x2", "--dry-run", "--json", "--text", "text.txt"),
    ]
    return Case("pair", random.choice(lines), files)


@functools.cache
def _generation_keys() -> list[str]:
    return sorted(GenerationConfig().to_dict())


def generation(random: Random, places: Places) -> Case:
    """Odd generation settings."""
    name = f"{random.choice(('source', 'target'))}/generation_config.json"
    sound = places["pair"].content(name)
    if random.random() < 0.15:
        content = damaged(random, sound)
    else:
        content = json_text(random, change(random, json.loads(sound), _generation_keys()))
    lines = [
        ("verify", "source", "target", "--json", *QUICK),
        ("grow", "source", "out", "--hidden", "x2", "--json", *QUICK),
    ]
    return Case("pair", random.choice(lines), {name: content})


def text(random: Random, places: Places) -> Case:
    """An odd text."""
    place = random.choice(("words", "llama"))
    content = damaged(random, places["words"].content("text.txt"))
    content *= random.choice([1, 1, 1, 100])
    lines = [
        ("grow", "source", "out", "--hidden", "x2", "--dry-run", "--json", "--text", "text.txt"),
        ("grow", "source", "out", "--hidden", "x2", "--json", "--text", "text.txt", *QUICK),
        (
            "convert",
            "source",
            "out",
            "--to",
            "shared-diff",
            "--rank",
            "1",
            "--calibration",
            "text.txt",
        )
        + ("--dry-run", "--json"),
    ]
    chosen = random.choices(lines, [8, 1, 2])[0]
    return Case(place, chosen, {"text.txt": content})


def growth(random: Random, places: Places) -> Case:
    """An odd config or odd weights, from which a model is really made."""
    drawn = random.choice([config, weights, weights, index, pickled])(random, places)
    proved = QUICK if random.random() < 0.15 else ("--no-verify",)
    return Case(drawn.place, (*_change(random), "--json", *proved), drawn.files)


TARGETS: dict[str, tuple[Drawer, float]] = {
    "config": (config, 30),
    "weights": (weights, 18),
    "index": (index, 8),
    "pickled": (pickled, 8),
    "recipe": (recipe, 13),
    "arguments": (arguments, 13),
    "folder": (folder, 3),
    "manifest": (manifest, 4),
    "proof": (proof, 0.3),
    "tokenizer": (tokenizer, 0.3),
    "generation": (generation, 0.15),
    "text": (text, 0.7),
    "growth": (growth, 1.2),
}
"""Every target, and its share of the inputs: what runs models takes a hundred times as long."""


def draw(seed: int, number: int, places: Places, only: str | None = None) -> tuple[str, Case]:
    """The input of a number: its target, and what is odd."""
    random = Random(f"{seed}/{number}")
    target = only or random.choices(list(TARGETS), [share for _, share in TARGETS.values()])[0]
    return target, TARGETS[target][0](random, places)
