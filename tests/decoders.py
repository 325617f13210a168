"""The table of ``docs/decoders.md``: how every causal language model of transformers can grow.

Tiny random models of every type grow along every axis. Logits of transformers' own classes, loaded
from both folders in strict float64, show whether the promise holds, and ``growkit.verify`` must say
the same; it must also notice a matrix of the grown model that is 1 % larger.

``python -m tests.decoders LINES [TYPE ...]`` adds the types that the file of JSON lines does not
have yet, so that it can be stopped at any time, and writes the page once it has all of them.
"""

import json
import math
import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

import growkit
from growkit.base.errors import InputError, reason
from growkit.engine.metrics import error_of
from growkit.families.family import described, family_of
from growkit.inference import family_for
from growkit.sources import find
from tests.architectures import TYPES, outcome, save, with_fault
from tests.conftest import strict_logits

FILE = Path(growkit.__file__).parents[1] / "docs" / "decoders.md"
BEGIN, END = "<!-- decoders -->\n", "<!-- end -->\n"

ALONE = {"ffn": "x1", "heads": "x1", "kv_heads": "x1"}
DEPTH = {"method": "depth", "layers": "x2"}
GROWTHS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "hidden": ({"hidden": "x2"}, {"hidden": "x2", **ALONE}, {"hidden": "x4"}, {"hidden": "x3/2"}),
    "ffn": ({"ffn": "x2"},),
    "heads": ({"heads": "x2", "kv_heads": "x1"}, {"heads": "x2"}),
    "kv_heads": ({"heads": "x2", "kv_heads": "x2"},),
    "layers": (DEPTH, {**DEPTH, "blocks": "stack"}),
    "experts": ({"method": "experts", "experts": "x2"},),
}
"""Growths to try for each axis, until one is possible."""

SEEDS = range(3)
FEW = growkit.Settings(prompts=1, length=16)
LIMITS = {"exact": 1e-12, "bounded": 0.1, "different": math.inf}
"""Of the error, by promise."""


def line_of(kind: str) -> dict[str, Any]:
    """What becomes of tiny models of a type.

    Returns:
        ``unmade``, the reason why transformers makes no such model; or ``refused``, the reason why
        its family cannot be described; or ``growths``, the outcome along every axis that it has.
    """
    line: dict[str, Any] = {"type": kind, "transformers": transformers.__version__}
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        try:
            sources = [save(kind, place / f"source-{seed}", seed) for seed in SEEDS]
            expected = [strict_logits(source) for source in sources]
        except Exception as error:  # transformers itself cannot
            return line | {"unmade": _sentence(error, place)}
        line["copy"] = outcome(sources[0], sources[0]).replace(scratch, "")
        try:
            family, how = family_for(find(sources[0]), None)
            config = find(sources[0]).open().config
            known = described(family, kind) if family else family_of(config, kind)
            axes = {*known.sizes(config), *known.kinds.values()}
        except Exception as error:
            return line | {"refused": _sentence(error, place)}
        models = Models(kind, place, sources, expected, family)
        growths = {axis: models.grown(axis, axes) for axis in GROWTHS if axis in axes}
    return line | {"inferred": how is not None, "growths": growths}


@dataclass(frozen=True)
class Models:
    """Tiny models of a type, one of each seed.

    Attributes:
        kind: the type.
        place: folder for what is made.
        sources: their folders.
        expected: their logits in strict float64.
        family: description of their family; None for growkit's own.
    """

    kind: str
    place: Path
    sources: Sequence[Path]
    expected: Sequence[torch.Tensor]
    family: Any

    def grown(self, axis: str, axes: Collection[str]) -> dict[str, Any]:
        """What becomes of them along an axis, in the first way that is possible.

        Returns:
            ``why`` it is not possible; or ``options``, ``promise``, the largest ``error``, and, of
            one model, what ``verify`` says of the grown one, and whether it notices a ``fault``.
        """
        why = ""
        for options in GROWTHS[axis]:
            asked = {k: v for k, v in options.items() if k in {*axes, "method", "blocks"}}
            try:
                return self._all_grown(axis, asked)
            except InputError as error:
                why = why or _sentence(error, self.place)
            except Exception as error:
                return {"crash": _sentence(error, self.place)}
        return {"why": why}

    def _all_grown(self, axis: str, options: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"options": options, "error": 0.0}
        chosen = list(GROWTHS).index(axis) % len(SEEDS)
        for seed, source in enumerate(self.sources):
            out = self.place / f"{axis}-{seed}"
            growth = {"family": self.family, "seed": seed, "verify": False, **options}
            found["promise"] = growkit.grow(source, out, **growth)["promise"]
            error = self._error(seed, out)
            found["error"], wrong = max(found["error"], error), not error < LIMITS[found["promise"]]
            said = judged(source, out) if seed == chosen or wrong else {}
            shutil.rmtree(out)
            if wrong and not said["kept"]:
                raise InputError(f"the proof refuses it: {said['reason']}")
            found |= said
        return found

    def _error(self, seed: int, out: Path) -> float:
        """Of a grown model's logits; infinite if its class does not load it whole."""
        try:
            found = strict_logits(out)
        except Exception:
            return math.inf
        expected = self.expected[seed]
        return error_of(found[..., : expected.shape[-1]], expected)


def judged(source: Path, target: Path) -> dict[str, Any]:
    """What ``verify`` says of a grown model, and of the same with a fault."""
    try:
        found = growkit.verify(source, target, FEW)
    except InputError as error:
        return {"kept": False, "reason": _sentence(error, target.parent)}
    said: dict[str, Any] = {"kept": found["kept"]}
    if not found["kept"]:
        return said | {"reason": found["reason"]}
    said["modes"] = {mode.name: mode.note for mode in found["modes"] if not mode.tried}
    spoiled = target.with_name("spoiled")
    if with_fault(target, spoiled):
        again = growkit.verify(source, spoiled, FEW)
        logits = next(each for each in again["findings"] if each.name == "strict_float64")
        said["fault"] = not again["kept"]
        said["fault_in_logits"] = logits.kept is False
    shutil.rmtree(spoiled)
    return said


def _sentence(error: BaseException, place: Path) -> str:
    found = reason(error).replace(f"{place}/", "")
    return found if isinstance(error, InputError) else f"{type(error).__name__}: {found}"


def faults(line: Mapping[str, Any]) -> list[str]:
    """What is wrong of what became of a type: nothing may be."""
    found = []
    if line.get("copy", "").startswith("not"):
        found.append(f"a copy is {line['copy']}")
    for axis, said in line.get("growths", {}).items():
        if "crash" in said:
            found.append(f"{axis}: {said['crash']}")
        elif "promise" in said:
            if not said["error"] < LIMITS[said["promise"]]:
                found.append(f"{axis}: {said['promise']}, but off by {said['error']:.1e}")
            if not said["kept"]:
                found.append(f"{axis}: {said['reason']}")
            exact = said["promise"] == "exact"
            if not (said.get("fault", True) and said.get("fault_in_logits", True) >= exact):
                found.append(f"{axis}: a fault is not noticed")
    return found


def main(file: Path, *kinds: str) -> list[str]:
    """Add what becomes of types to a file of JSON lines; what is wrong of any in it."""
    lines = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    done = {line["type"] for line in lines}
    for kind in kinds or TYPES:
        if kind not in done:
            lines.append(line_of(kind))
            with file.open("a", encoding="utf-8") as more:
                more.write(json.dumps(lines[-1]) + "\n")
    return [f"{line['type']}: {fault}" for line in lines for fault in faults(line)]


if __name__ == "__main__":
    Path(sys.argv[1]).touch()
    sys.exit("\n".join(main(Path(sys.argv[1]), *sys.argv[2:])))
