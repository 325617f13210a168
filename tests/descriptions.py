"""Descriptions of families that are wrong in one place, where no shape betrays it.

Axes of equal size are exchanged, factors and sections stand in another order, norms say something
else. ``python -m tests.descriptions --count 200`` grows random models with such descriptions, and
counts what growkit makes of them; none that it keeps may behave otherwise than its source.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import growkit
from growkit.base.errors import InputError
from tests.behaviour import difference
from tests.infer import random_model
from tests.sweeping import say

KINDS = ("arcee", "exaone4", "glm4", "helium", "seed_oss", "gpt_bigcode", "persimmon", "cwm")
ALIKE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
}
"""Sizes of which many are equal, so that shapes say little."""

GROWTHS: tuple[dict[str, Any], ...] = (
    {"hidden": "x2"},
    {"ffn": "x2"},
    {"hidden": "x2", "ffn": "x2", "vocab": 128},
    {"heads": "x2"},
    {"heads": "x2", "kv_heads": "x2"},
    {"vocab": 70},
    {"method": "depth", "layers": "x2"},
)
ROUNDED = 1e-6
"""What classes that compute norms in float32 make of the same function, relative to its scale."""

FEW = growkit.Settings(prompts=1, length=10)


@cache
def model(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A random model, and what its class shows of its family."""
    from transformers import CONFIG_MAPPING

    known = CONFIG_MAPPING[kind]().to_dict()
    sizes = {key: value for key, value in ALIKE.items() if key in known}
    source = random_model(kind, folder / kind, **sizes)
    family: dict[str, Any] = growkit.infer(source)["family"]
    return source, family


def mistaken(family: dict[str, Any], choose: Random) -> tuple[dict[str, Any], str]:
    """The same description with one mistake, and what that is."""
    wrong = deepcopy(family)
    name = choose.choice(sorted(wrong["tensors"]))
    entry = wrong["tensors"][name]
    pattern = entry if isinstance(entry, str) else entry["pattern"]
    axes = [axis for each in wrong["sizes"].values() for axis in each.split(" + ")]
    way = choose.choice(["axis", "axis", "order", "turned", "norm", "sizes", "group", "everywhere"])
    if way == "axis":
        was = choose.choice(re.findall(r"\w+", pattern))
        pattern = re.sub(rf"\b{was}\b", choose.choice(axes), pattern, count=1)
    elif way == "order":
        parts = re.split(r"(\.| \+ )", pattern)
        pattern = "".join(reversed(parts)) if "<" not in pattern else _left_reversed(pattern)
    elif way == "turned":
        left, arrow, right = re.split(r" ?(<-|->) ?", pattern + " -> ", maxsplit=1)[:3]
        pattern = f"{right.removesuffix(' -> ')} {arrow} {left}".strip()
    elif way == "norm" and isinstance(entry, dict):
        key = choose.choice(sorted(entry.keys() - {"pattern"} or {"norm"}))
        if choose.random() < 0.5:
            entry.pop(key, None)
        else:
            entry[key] = {
                "norm": choose.choice(axes),
                "offset": 1.0,
                "root": choose.choice(axes),
            }.get(key, not entry.get(key))
    elif way == "sizes":
        one, two = choose.sample(sorted(wrong["sizes"]), 2)
        wrong["sizes"][one], wrong["sizes"][two] = wrong["sizes"][two], wrong["sizes"][one]
        name = f"{one} and {two}"
    elif way == "group":
        wrong["groups"] = choose.choice([{}, {"kv_heads": "heads"}, {"ffn": "heads"}])
    else:
        one, two = choose.sample(sorted({*axes}), 2)
        wrong["tensors"] = {n: _exchanged(e, one, two) for n, e in wrong["tensors"].items()}
        return wrong, f"{one} and {two} everywhere"
    if isinstance(wrong["tensors"].get(name), str):
        wrong["tensors"][name] = pattern
    elif name in wrong["tensors"]:
        wrong["tensors"][name]["pattern"] = pattern
    return wrong, f"{way} of {name}: {wrong['tensors'].get(name)}"


def _left_reversed(pattern: str) -> str:
    left, arrow, right = pattern.partition(" <- ")
    return ".".join(reversed(left.split("."))) + arrow + right


def _exchanged(entry: Any, one: str, two: str) -> Any:
    def swap(text: str) -> str:
        return re.sub(rf"\b({one}|{two})\b", lambda m: two if m[0] == one else one, text)

    if isinstance(entry, str):
        return swap(entry)
    return {key: swap(each) if isinstance(each, str) else each for key, each in entry.items()}


def outcome(seed: int, models: Path, scratch: Path) -> tuple[str, str]:
    """What growkit makes of a mistake."""
    choose = Random(seed)
    kind = choose.choice(KINDS)
    source, family = model(kind, models)
    wrong, what = mistaken(family, choose)
    growth = choose.choice(GROWTHS)
    what = f"{kind} {growth} {what}"
    if wrong == family:
        return "no mistake", what
    try:
        made = growkit.grow(source, scratch / "out", family=wrong, verify=FEW, **growth)
    except InputError as error:
        return "refused", f"{what}: {error}"
    if not made["kept"]:
        return "not preserved", what
    found = difference(source, scratch / "out", ROUNDED)
    return ("believed", f"{what}: {found}") if found else ("the same function", what)


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as models:
        for seed in range(asked.first, asked.first + asked.count):
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    what, said = outcome(seed, Path(models), Path(scratch))
                except Exception as error:
                    what, said = "crash", f"{type(error).__name__}: {error}"
            counts[what] += 1
            if what in ("believed", "crash"):
                say(f"{seed} {what}: {said}")
    say(str(dict(counts)))
    return 1 if counts["believed"] or counts["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
