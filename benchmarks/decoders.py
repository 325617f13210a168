"""``benchmarks/results/decoders.md``: how every causal language model of transformers can grow.

Tiny random models of every type grow along every axis. Logits of transformers' own classes, loaded
from both folders in strict float64, show whether the promise holds, and ``growkit.verify`` must say
the same; it must also notice a matrix of the grown model that is 1 % larger.

``python -m benchmarks.decoders LINES [TYPE ...]`` adds types to a file of JSON lines, so that it
can be stopped at any time, and writes the tables once the file has all types.
"""

import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

import growkit
from growkit.base.errors import InputError, reason
from growkit.engine.metrics import error_of
from growkit.model.families.family import family_of
from growkit.sources import family_for, find, language_model_inside
from tests.architectures import TYPES, WINDOW, outcome, save, with_fault
from tests.models import strict_logits

FILE = Path(growkit.__file__).parents[1] / "benchmarks" / "results" / "decoders.md"
TITLE = """# Decoders of transformers

A tiny random model of every type is grown along every axis in the first way that is possible. It
has each kind of layer of its class twice. Its windows, chunks, budgets and top-k are of 64 tokens,
and prompts have 256. A cell is the promise that transformers' own classes kept in strict float64
(exact: below 1e-12) and `growkit verify` confirmed; it also noticed a matrix that is 1 % larger.
*untied*: with `--untie`; *alone*: no other size grows with hidden; *stack*: with `--blocks stack`.
`python -m benchmarks.decoders LINES` makes this page.
"""

ALONE = {"ffn": "x1", "heads": "x1", "kv_heads": "x1"}
DEPTH = {"method": "depth", "layers": "x2"}
GROWTHS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "hidden": (
        {"hidden": "x2"},
        {"hidden": "x2", **ALONE},
        {"hidden": "x2", "untie": True},
        {"hidden": "x4"},
        {"hidden": "x4", **ALONE},
    ),
    "ffn": ({"ffn": "x2"},),
    "heads": ({"heads": "x2", "kv_heads": "x1"}, {"heads": "x2"}),
    "kv_heads": ({"heads": "x2", "kv_heads": "x2"},),
    "layers": (DEPTH, {**DEPTH, "blocks": "stack"}),
    "experts": ({"method": "experts", "experts": "x2"},),
}
"""Growths to try for each axis, until one is possible."""

TOKENS = 4 * WINDOW
"""Of a prompt: more than the windows, chunks, top-k and budgets of the models."""

FEW = growkit.Settings(prompts=1, length=TOKENS)
LIMITS = {"exact": 1e-12, "bounded": 0.1, "different": math.inf}
"""Of the error, by promise."""


def line_of(kind: str, seeds: Sequence[int] = range(1)) -> dict[str, Any]:
    """What becomes of tiny models of a type.

    Args:
        kind: the type.
        seeds: of the models.

    Returns:
        ``unmade``, the reason why transformers makes no such model; or ``refused``, the reason why
        its family cannot be described; or ``growths``, the outcome along every axis that it has.
    """
    line: dict[str, Any] = {"type": kind, "made": _made()}
    with TemporaryDirectory() as scratch:
        place = Path(scratch)
        try:
            sources = [
                save(kind, place / f"source-{seed}", seed, alternating=True) for seed in seeds
            ]
            expected = [strict_logits(source, tokens=TOKENS) for source in sources]
        except Exception as error:  # transformers itself cannot
            return line | {"unmade": _sentence(error, place)}
        try:
            line["copy"] = outcome(sources[0], sources[0]).replace(scratch, "")
        except Exception as error:
            line["copy"] = f"not judged: {_sentence(error, place)}"
        try:
            inferred = family_for(find(sources[0]), None)
            whole = find(sources[0]).open_whole()
            config = (language_model_inside(whole) or whole).config
            known = inferred or family_of(config, kind)
            axes = {*known.sizes(config), *known.kinds.values()}
        except Exception as error:
            return line | {"refused": _sentence(error, place)}
        family = inferred.description if inferred else None
        models = Models(kind, place, sources, expected, family)
        growths = {axis: models.grown(axis, axes) for axis in GROWTHS if axis in axes}
    return line | {"inferred": inferred is not None, "growths": growths}


def _made() -> str:
    """When, from which commit, and with which versions a line is made."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=FILE.parent, capture_output=True, text=True
    ).stdout.strip()
    versions = f"transformers {transformers.__version__} and torch {torch.__version__}"
    return f"Made on {datetime.now(UTC):%Y-%m-%d} from commit {commit} with {versions}"


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
            asked = {k: v for k, v in options.items() if k in {*axes, "method", "blocks", "untie"}}
            try:
                return self._all_grown(axis, asked)
            except InputError as error:
                why = why or _sentence(error, self.place)
            except Exception as error:
                return {"crash": _sentence(error, self.place)}
        return {"why": why}

    def _all_grown(self, axis: str, options: Mapping[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = {"options": options, "error": 0.0}
        chosen = list(GROWTHS).index(axis) % len(self.sources)
        for seed, source in enumerate(self.sources):
            out = self.place / f"{axis}-{seed}"
            growth = {"family": self.family, "seed": seed, "verify": False, **options}
            found["promise"] = growkit.grow(source, out, **growth)["promise"]
            error = self._error(seed, out)
            found["error"], wrong = max(found["error"], error), not error < LIMITS[found["promise"]]
            said = judged(source, out) if seed == chosen or wrong else {}
            shutil.rmtree(out)
            if said and not said["kept"]:
                raise InputError(f"the proof refuses it: {said['reason']}")
            found |= said
        return found

    def _error(self, seed: int, out: Path) -> float:
        """Of a grown model's logits; infinite if its class does not load it whole."""
        try:
            found = strict_logits(out, tokens=TOKENS)
        except Exception:  # classes fail in any way on sizes that they do not read
            return math.inf
        expected = self.expected[seed]
        return error_of(found[..., : expected.shape[-1]], expected)


def judged(source: Path, target: Path) -> dict[str, Any]:
    """What ``verify`` says of a grown model, and of the same with a fault."""
    try:
        found = growkit.verify(source, target, FEW)
    except InputError as error:
        return {"kept": False, "unable": True, "reason": _sentence(error, target.parent)}
    said: dict[str, Any] = {"kept": found["kept"]}
    if not found["kept"]:
        unable = [
            mode.note for mode in found.sections.modes.modes if "the source can, but" in mode.note
        ]
        return said | {"reason": found["reason"], "unable": unable}
    said["modes"] = {mode.name: mode.note for mode in found.sections.modes.modes if not mode.tried}
    spoiled = target.with_name("spoiled")
    if with_fault(target, spoiled):
        again = growkit.verify(source, spoiled, FEW)
        logits = next(each for each in again.findings if each.name == "strict_float64")
        said["fault"] = not again["kept"]
        said["fault_in_logits"] = logits.kept is False
    shutil.rmtree(spoiled)
    return said


def _sentence(error: BaseException, place: Path) -> str:
    if isinstance(error, InputError):
        return str(error).replace(f"{place}/", "")
    return f"{type(error).__name__}: {reason(error)}".replace(f"{place}/", "")


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


CLASS = r"(\w+(ForCausalLM|ForConditionalGeneration|HeadModel|LMHead|Decoder))\b"
SHORTER = (
    (r"(; |\. |: Type).*", ""),
    (r"^source-\d ", ""),
    (r"^\w+ of the .* model in \S+ cannot grow: ", ""),
    (r"^an? .* model cannot have .*, since ", ""),
    (rf"\b(an? |the )?{CLASS}( of [\w-]+| model)*", "the class"),
    (r"'\S+', which no family describes.*", "that cannot be described yet"),
    (r"^\w+ (has model_type)", r"the language model inside \1"),
    (r" (in|of) (source|[a-z_]+)-\d\S*", ""),
    (r" by [\d.e-]+$", ""),
    (r"^tensor \S+", "a tensor"),
)
"""What is left out of sentences in the table: names of single models, figures and remedies."""


def as_markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """The page: types that can do the same, and why others cannot."""
    rows: dict[tuple[str, ...], list[str]] = {}
    whys: dict[str, dict[str, list[str]]] = {}
    for line in lines:
        kind, growths = line["type"], line.get("growths", {})
        if growths:
            rows.setdefault(row_of(line), []).append(kind)
        stated = {axis: said["why"] for axis, said in growths.items() if "why" in said}
        stated |= {each: line[each] for each in ("refused", "unmade") if each in line}
        for axis, why in stated.items():
            whys.setdefault(_shorter(why), {}).setdefault(axis, []).append(kind)
    grown = [line["growths"] for line in lines if "growths" in line]
    exact = {
        axis: sum(said.get(axis, {}).get("promise") == "exact" for said in grown)
        for axis in ("hidden", "layers")
    }
    named = {"unmade": "not made", "refused": "any size"}
    made: dict[str, list[str]] = {}
    for line in lines:
        made.setdefault(line["made"], []).append(line["type"])
    (first, _), *others = sorted(made.items(), key=lambda item: -len(item[1]))
    shown = [f"{first}.", *(f"{how}: {', '.join(types)}." for how, types in others)]
    shown += [
        "",
        f"Of {len(grown)} types hidden grows exactly in {exact['hidden']}, layers in "
        f"{exact['layers']}.",
        "",
    ]
    shown += [f"| types | {' | '.join(GROWTHS)} |", "|" + " --- |" * (1 + len(GROWTHS))]
    several = sorted(rows.items(), key=lambda row: (-len(row[1]), row[1]))
    shown += [f"| {', '.join(types)} | {' | '.join(cells)} |" for cells, types in several]
    shown += ["", "| why not | types |", "| --- | --- |"]
    for why, of in whys.items():
        types = "; ".join(f"{named.get(axis, axis)}: {', '.join(of[axis])}" for axis in of)
        shown.append(f"| {why} | {types} |")
    return "\n".join([TITLE, *shown]) + "\n"


def row_of(line: Mapping[str, Any]) -> tuple[str, ...]:
    """What the table says of a type: a cell for each axis."""
    return tuple(_cell(line["growths"].get(axis)) for axis in GROWTHS)


def _cell(said: Mapping[str, Any] | None) -> str:
    if said is None:
        return "–"
    if "promise" not in said:
        return "no"
    options = said["options"]
    how = [options["blocks"]] if "blocks" in options else []
    how += ["untied"] if "untie" in options else []
    how += ["alone"] if options.get("hidden") and options.get("heads") == "x1" else []
    how += ["×4"] if options.get("hidden") == "x4" else []
    return " ".join([said["promise"], *how])


def _shorter(why: str) -> str:
    for pattern, instead in SHORTER:
        why = re.sub(pattern, instead, why)
    return why.strip().replace("|", "\\|")


def table(page: str) -> dict[str, tuple[str, ...]]:
    """The cells of every type in the first table of the page."""
    rows = (re.findall(r"(?<=\| )[^|]+(?= \|)", line) for line in page.splitlines())
    _, _, *found = [row for row in rows if len(row) == 1 + len(GROWTHS)]  # without its head
    return {kind: tuple(cells) for types, *cells in found for kind in types.split(", ")}


def main(file: Path, *kinds: str) -> list[str]:
    """Add types to a file of JSON lines, and write the page if it has all; what is wrong of any."""
    file.touch()
    lines = {line["type"]: line for line in map(json.loads, file.read_text("utf-8").splitlines())}
    for kind in kinds or TYPES:
        if kind not in lines:
            lines[kind] = line_of(kind)
            with file.open("a", encoding="utf-8") as more:
                more.write(json.dumps(lines[kind]) + "\n")
    if lines.keys() >= {*TYPES}:
        FILE.write_text(as_markdown([lines[kind] for kind in TYPES]), encoding="utf-8")
    return [f"{kind}: {fault}" for kind, line in lines.items() for fault in faults(line)]


if __name__ == "__main__":
    sys.exit("\n".join(main(Path(sys.argv[1]), *sys.argv[2:])) or 0)
