"""What is made odd, how often, and the command that then runs."""

import functools
import json
import shlex
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

import typer
import yaml
from transformers import CONFIG_MAPPING, GenerationConfig

from growkit.base.errors import InputError
from growkit.base.options import Option
from growkit.cli.commands import app
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.model.families.family import families
from growkit.planning.operation import PACKAGES, Operation, SizeOption, operations
from tests.fuzz.odd import (
    HOSTILE,
    REAL,
    SEEDS,
    WHOLE,
    WORDS,
    change,
    damaged,
    json_text,
    near,
    odd,
    odd_archive,
    odd_gguf,
    odd_pickle,
    odd_safetensors,
    words,
    yaml_text,
)
from tests.fuzz.places import KINDS, LOGITS, OF_PROGRAMS, READERS, WRITTEN, Case, Place

Places = Mapping[str, Place]

CONFIG, WEIGHTS = "source/config.json", "source/model.safetensors"
INDEX, PICKLE = "source/model.safetensors.index.json", "source/pytorch_model.bin"
MANIFEST = "target/growkit.json"
CANARY = b"open('canary', 'w').close()\nraise SystemExit(99)\n"
CANARIES, LINKS, OTHER_FILES = (words(SEEDS[key]) for key in ("canaries", "links", "other_files"))
RECIPE_KEYS, TOKENIZER_KEYS = words(SEEDS["recipe_keys"]), words(SEEDS["tokenizer_keys"])
MANIFEST_KEYS = RECIPE_KEYS + words(SEEDS["manifest_keys"])
RECIPES = SEEDS["recipes"]
YAML = [*SEEDS["documents"], "- " * 1500 + "a", "[" * 1200, f"seed: 0x{'f' * 6000}\n"]
LINES = [shlex.split(line) for line in SEEDS["lines"]]
ARGUMENTS = [word for word in HOSTILE if "\0" not in word] + [str(n) for n in WHOLE] + WORDS
ARGUMENTS += [*words(SEEDS["arguments"]), "a" * 100_000]
QUICK = ("--prompts", "1", "--length", "8")
VERIFY = ("verify", "source", "target", "--json", *QUICK)
GROW = ("grow", "source", "out", "--hidden", "x2", "--json")


VALUES = words(
    "1 2 3 4 8 16 0.1 0.5 1.0 10 30 x1 x2 x3 x4 x3/2 x1.5 x5/4 0,1 1,2,0 0,0 even end auto "
    "on text.txt 17 24 x16"
)
"""What a freely written value may be; an option takes those that it accepts."""
SIZES = words("x1 x2 x3 x4 x3/2 x1.5 x5/4 8 16 17 24 32")
ODD = [*ARGUMENTS, *map(str, REAL)]
ODD += words("x1e3 x2.5.1 x/2 x2/0 x0/3 x1/0 1/2 x-1/2 ٣ x٢ ２ x２ Ⅷ 1,,2 ,1 1, -1,0 0,-1")
ODD += words("x1.0000000000000001 x99999/99998 100001 1_0 +2 x+2 0x2 1e1 2.0 true None off [1] {}")
DEFAULT = {"grow": "hypercloning", "shrink": "undo"}
"""By the verb, what needs no name on the command line."""


def any_operation(random: Random) -> tuple[str, Operation]:
    """A verb, growth more often, and one of its operations, each as often as the others."""
    verb = random.choice(["grow", *PACKAGES])
    return verb, random.choice(list(operations(verb).values()))


def sound_value(random: Random, option: Option) -> Any:
    """A value that an option takes; None if none was found."""
    if option.kind is bool:
        return True
    known = option.values or (SIZES if isinstance(option, SizeOption) else VALUES)
    return random.choice([each for each in known if _takes(option, each)] or [None])


def _takes(option: Option, value: Any) -> bool:
    try:
        option.read(value)
    except (InputError, ValueError):
        return False
    return True


def chosen_options(random: Random, operation: Operation, odd_ones: int) -> dict[str, Any]:
    """Options of an operation, so many of them odd."""
    often = random.choice([1, 2, 4]) / max(len(operation.options), 1)
    found = {
        each.name: value
        for each in operation.options
        if each.example is not None or random.random() < often
        for value in [sound_value(random, each)]
        if value is not None
    }
    for option in random.choices(operation.options, k=odd_ones) if operation.options else ():
        sound = found.get(option.name, random.choice(VALUES))
        found[option.name] = random.choice([odd(random), near(random, sound), random.choice(ODD)])
    return found


def odd_line(random: Random, odd_ones: int = 0) -> tuple[str, ...]:
    """A command that makes something of a source."""
    verb, operation = any_operation(random)
    made = [verb, "source", "out"]
    if operation.name != DEFAULT.get(verb) or random.random() < 0.2:
        made += ["--to" if verb == "convert" else "--method", operation.name]
    for name, value in chosen_options(random, operation, odd_ones).items():
        made.append(f"--{name.replace('_', '-')}")
        if value is not True:
            made.append(_written(value))
    return tuple(made)


def _written(value: Any) -> str:
    """A value as an argument, which nothing ends but its end."""
    return str(value).replace("\0", "")[:100_000]


def steps(random: Random, places: dict[str, Place]) -> Case:
    """Odd options of any operation, of a model of any family."""
    place = random.choice(list(places))
    if random.random() < 0.5:
        dry = ("--dry-run", *(("--json",) if random.random() < 0.9 else ()))
        return Case(place, (*odd_line(random, random.choice([0, 0, 1, 2])), *dry))
    recipe: dict[str, Any] = {"source": "source", "output": "out", "verify": False, "steps": []}
    for _ in range(random.choice([1, 1, 2, 3])):
        verb, operation = any_operation(random)
        chosen = chosen_options(random, operation, random.choice([0, 0, 1, 2]))
        recipe["steps"].append({verb: operation.name, **chosen})
    if random.random() < 0.2:
        recipe = change(random, recipe, [])
    files = {"recipe.yaml": yaml_text(random, recipe)}
    return Case(place, ("run", "recipe.yaml", "--dry-run", "--json"), files)


@functools.cache
def config_keys() -> list[str]:
    """Every key that a config may have, as far as one can list them."""
    kinds = {kind for family in families().values() for kind in family.model_types}
    known = {key for kind in kinds & {*CONFIG_MAPPING} for key in CONFIG_MAPPING[kind]().to_dict()}
    return sorted(known | {*DiffTransformerConfig().to_dict()} | {*words(SEEDS["config_keys"])})


def look(random: Random) -> tuple[str, ...]:
    """A command that reads a source and writes nothing; mostly as JSON, which is fast."""
    shown = ("--json",) if random.random() < 0.9 else ()
    if random.random() < 0.5:
        return ("inspect", "source", *shown)
    return (*odd_line(random), "--dry-run", *shown)


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


def odd_yaml(random: Random, sound: bytes) -> bytes:
    """A YAML file, changed in its values or in its bytes."""
    if random.random() < 0.15:
        return damaged(random, sound)
    return yaml_text(random, change(random, yaml.load(sound, yaml.CSafeLoader), []))


ODD_FILES: dict[str, Callable[[Random, bytes], bytes]] = {
    "gguf": odd_gguf,
    "safetensors": odd_safetensors,
    **dict.fromkeys(("bin", "pth"), odd_archive),
    "metadata": odd_pickle,
    "distcp": damaged,
    "json": lambda random, sound: odd_json(random, sound, config_keys()),
    "yaml": odd_yaml,
}
"""By the end of a file's name."""


def opened(random: Random, places: Places, place: str = "") -> Case:
    """An odd file of another program, which is only opened, in any place or in this one."""
    place = place or random.choice(READERS)
    unread = {f"source/{name}" for name in ("generation_config.json", "common.pt", "metadata.json")}
    names = [name for name in places[place].files if name.startswith("source/")]
    names = [name for name in names if name not in unread]
    name = random.choice(names)
    content = ODD_FILES[name.rpartition(".")[2]](random, places[place].content(name))
    model = name if place == LOGITS else "source"
    return Case(place, ("open", model, str(random.randrange(100))), {name: content})


def converted(random: Random, places: Places) -> Case:
    """An odd file of another program, of which anything is asked."""
    drawn = opened(random, places, random.choice([*OF_PROGRAMS, *WRITTEN]))
    return Case(drawn.place, look(random), drawn.files)


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
        line = (*odd_line(random), "--no-verify", "--json")
    return Case(place, line, files)


def growth(random: Random, places: Places) -> Case:
    """An odd config or odd weights, from which a model is really made."""
    drawn = random.choice([config, weights, weights, index, pickled])(random, places)
    quick = QUICK if random.random() < 0.15 else ("--no-verify",)
    return Case(drawn.place, (*odd_line(random), "--json", *quick), drawn.files)


# --- Recipes and command lines --------------------------------------------------------------------


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
    """An odd manifest, or an odd file on either side, of a pair that is proved or grown again."""
    if random.random() < 0.3:
        return Case("pair", VERIFY, {MANIFEST: _odd_manifest(random, places)})
    name, keys = random.choice(
        [
            ("config.json", config_keys()),
            ("generation_config.json", sorted(GenerationConfig().to_dict())),
            *((f"{each}.json", TOKENIZER_KEYS) for each in ("tokenizer", "tokenizer_config")),
        ]
    )
    file = f"{random.choice(('source', 'target'))}/{name}"
    files: dict[str, Any] = {file: odd_json(random, places["pair"].content(file), keys)}
    files |= {f"source/{random.choice(CANARIES)}": CANARY} if random.random() < 0.1 else {}
    files |= {MANIFEST: {"none": True}} if random.random() < 0.3 else {}
    told = ("--text", "text.txt")
    lines = [VERIFY, (*VERIFY, *told), (*GROW, *told, *QUICK), (*GROW, "--dry-run", *told)]
    return Case("pair", random.choice([*lines, (*GROW, "--no-verify")]), files)


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
    "converted": (converted, 8),
    "opened": (opened, 8),
    "folder": (folder, 2),
    "recipe": (recipe, 13),
    "arguments": (arguments, 13),
    "steps": (steps, 20),
    "manifest": (manifest, 4),
    "growth": (growth, 0.6),
    "text": (text, 0.3),
    "proof": (proof, 0.3),
}
"""Every target, and its share of the inputs: what runs models takes a hundred times as long."""


def draw(seed: int, number: int, places: Places, only: str | None = None) -> tuple[str, Case]:
    """The input of a number: its target, and what is odd."""
    random = Random(f"{seed}/{number}")
    target = only or random.choices(list(TARGETS), [share for _, share in TARGETS.values()])[0]
    return target, TARGETS[target][0](random, places)
