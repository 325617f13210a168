"""Odd recipes and odd command lines."""

from __future__ import annotations

import functools
import shlex
from random import Random
from typing import Any

import typer

from growkit.cli.app import app
from tests.fuzz.case import Case
from tests.fuzz.contents import YAML, damaged, yaml_text
from tests.fuzz.sources import VARIANTS, Places, shown
from tests.fuzz.values import HOSTILE, WHOLE, WORDS, change, words

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
RECIPE_KEYS = words(
    "source output steps verify seed dtype shard_size grow convert hidden ffn heads kv_heads "
    "signal_heads noise_heads symmetry rank snr_db text prompts length device trainability energy "
    "tolerance calibration shrinkage gamma head_norm scope"
)
LINES = [
    shlex.split(line)
    for line in (
        "inspect source",
        "inspect source --json",
        "grow source out --hidden x2 --dry-run --json",
        "grow source out --hidden 8 --kv-heads x1 --seed 7 --dtype float64 --dry-run",
        "grow source out --method group-diff --signal-heads x2 --snr-db 20 --dry-run --json",
        "grow source out --ffn x4 --text text.txt --prompts 2 --length 8 --device cpu --dry-run",
        "grow source out --hidden x2 --report proof.html --overwrite --dry-run",
        "grow source out --hidden x2 --shard-size 1KB --no-verify --trainability --dry-run --json",
        "convert source out --to diff --head-norm none --dry-run --json",
        "convert source out --to shared-diff --rank 2 --energy 0.9 --dry-run",
        "convert source out --to shared-diff --rank auto --tolerance 0.1 --dry-run",
        "convert source out --to shared-diff --rank 1 --calibration text.txt --dry-run",
        "convert source out --to dint --gamma unified --dry-run --json",
        "run recipe.yaml --source source --output out --dry-run --json",
        "recipes list",
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
    "source out text.txt recipe.yaml elsewhere source/config.json nowhere x1 x2 x1000000 1e9 -x2 "
    "0x2 1KB 0B 1e400GB nanGB /dev/null /dev/null/x /proc/self/mem /proc/1/x out/a/b source/out"
)
ARGUMENTS += ["a" * 100_000]


def recipe(random: Random, places: Places) -> Case:
    """An odd recipe."""
    place = random.choice(("llama", "llama", "diffllama", "diff"))
    sound = RECIPES[random.randrange(3) if place == "llama" else 0]
    kind = random.random()
    if kind < 0.02:
        content = random.choice(YAML).encode()
    elif kind < 0.04:
        content = damaged(random, random.choice(YAML).encode())
    elif kind < 0.12:
        content = damaged(random, yaml_text(random, sound))
    elif kind < 0.3:
        content = yaml_text(random, _plausible(random))
    else:
        content = yaml_text(random, change(random, sound, RECIPE_KEYS))
    line = ("run", "recipe.yaml", "--dry-run", *shown(random))
    return Case(place, line, {"recipe.yaml": content})


def _plausible(random: Random) -> dict[str, Any]:
    """A recipe that may well make sense."""
    tree: dict[str, Any] = {"source": "source", "output": "out", "verify": False, "steps": []}
    for _ in range(random.choice([1, 1, 2, 3])):
        size = random.choice(["x1", "x2", "x3", 8, 16, "24"])
        step: dict[str, Any] = {"convert": random.choice(VARIANTS)}
        if step["convert"] == "shared-diff":
            step["rank"] = random.choice([1, 2, 3, [1], "1,2", "auto"])
        if random.random() < 0.6:
            method = random.choice(["hypercloning", "group-diff"])
            options = {"hypercloning": ["ffn", "heads", "kv_heads"]}
            names = options.get(method, ["ffn", "signal_heads", "noise_heads", "kv_heads"])
            step = {
                "grow": method,
                "hidden": size,
                random.choice(names): random.choice(["x1", "x2"]),
            }
        tree["steps"].append(step)
    if random.random() < 0.3:
        tree |= {"dtype": random.choice(["float64", "float32", "bfloat16"]), "seed": 7}
    return tree


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
        if what < 4:
            line[at : at + 1] = [random.choice(ARGUMENTS)]
        elif what == 4:
            line[at:at] = [option]
        elif what == 5:
            line += [option, random.choice(ARGUMENTS)]
        elif what == 6:
            del line[at : at + 1]
        else:
            line[at:at] = [random.choice(ARGUMENTS)]
    if line[0] in ("grow", "convert", "run") and "--dry-run" not in line:
        line.insert(1, "--dry-run")
    if line[0] == "demo":  # which takes ten seconds, unless a size makes no sense
        line += ["--signal-heads", "q"]
    if line[0] == "probe":  # which trains, unless it is asked for nothing
        line += ["--steps", "0"]
    return Case(random.choice(("llama", "diffllama", "diff", "words", "pair")), tuple(line))
