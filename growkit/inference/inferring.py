"""A family that nobody has described, as its class of transformers shows it.

Shapes of a checkpoint propose axes, but 4096 may be many sizes. So the class is asked: with small
configs, what changes with which key (``shapes``); while a small model runs, what is given to whom
(``running``). What is left open, and whether it all is true, is tried: the small model is grown as
described and must compute the same in strict float64 (``trial``). What does not, is described as
fixed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

from growkit.algebra.axes import Pattern
from growkit.checkpoint.reading import Checkpoint
from growkit.errors import InputError
from growkit.families.described import TIED, described
from growkit.families.family import family_of
from growkit.inference.classes import ModelClass
from growkit.inference.running import Seen, see
from growkit.inference.shapes import NUMBERS, Composed, composed
from growkit.inference.trial import Trial, Trials, stored_names
from growkit.inference.writing import as_yaml
from growkit.planning.plan import unused_tensors
from growkit.results.result import Result

MOST_TRIED = 12
"""Descriptions that are tried, if more than one is possible."""

ELSEWHERE = "describe its family as docs/adding-a-family.md says"


class Evidence(Result):
    """Why a tensor's pattern is what it is.

    Attributes:
        tensor: its name.
        pattern: what it reads and writes.
        by_number: what each dimension could be, by the number of the checkpoint alone.
        others: other patterns that its class leaves open.
    """

    tensor: str
    pattern: str
    by_number: list[list[str]]
    others: list[str]


class Inference(Result):
    """A family that was inferred, as ``growkit inspect --infer --json`` prints it.

    Attributes:
        model_class: of transformers.
        family: the description, as ``growkit.grow`` takes it.
        tensors: why patterns are what they are.
        trials: what became of a small random model that was grown like this.
        tried: number of descriptions that were tried.
        sure: whether every growth that could be tried computes the same.
        yaml: the description as a file, with all of this in comments.
    """

    model_class: str
    family: dict[str, Any]
    tensors: list[Evidence]
    trials: list[Trial]
    tried: int
    sure: bool
    yaml: str


def infer(folder: str | Path) -> Inference:
    """Describe the family of a model, as far as its class of transformers shows it.

    Args:
        folder: of the model; only its headers are read.

    Raises:
        InputError: there is no such class, or it has parts that cannot be described; says which.
    """
    checkpoint = Checkpoint(folder)
    check_quantised(checkpoint)
    where = str(Path(folder) / "config.json")
    asked = ModelClass(checkpoint.config, where)
    proposal = _Proposal(asked, see(asked), frozenset(checkpoint.tensors))
    ways = proposal.ways()
    best: tuple[int, dict[str, Any], list[Trial]] | None = None
    tried = 0
    for description in islice(_descriptions(proposal, ways), MOST_TRIED):
        trials = Trials(asked).all(description)
        tried += 1
        wrong = sum(trial.wrong for trial in trials)
        if best is None or wrong < best[0]:
            best = wrong, description, trials
        if not wrong:
            break
    assert best is not None
    _, description, trials = best
    fixed = {
        trial["axis"]: f"cannot grow: when it was tried, logits differed by {trial['error']:.1g}"
        for trial in trials
        if trial.wrong
    }
    if fixed:
        description["fixed"] = fixed
    _check_checkpoint(checkpoint, description)
    evidence = _evidence(checkpoint, description, {proposal.stored(t): w for t, w in ways.items()})
    sure = any(trial.exact for trial in trials) and not fixed
    found = Inference(
        model_class=asked.name,
        family=description,
        tensors=evidence,
        trials=trials,
        tried=tried,
        sure=sure,
        yaml="",
    )
    found["yaml"] = as_yaml(found)
    return found


@dataclass
class _Proposal:
    """What was found out of a class, as a description.

    Attributes:
        asked: the class.
        seen: what was seen while it ran.
        files: names of the tensors of the checkpoint.
    """

    asked: ModelClass
    seen: Seen
    files: frozenset[str]

    def __post_init__(self) -> None:
        self._dimensions = composed(self.asked)
        self._names = self._templates()
        self._stored = stored_names(self.asked)
        self._tied = self._ties()

    def _templates(self) -> dict[str, str]:
        """Names of tensors with a place for the layer, and one that stands for all of these.

        Raises:
            InputError: layers have tensors of different kinds, or files have other names.
        """
        shapes = self.asked.shapes(self.asked.small | {"layers": self.asked.layers})
        if shapes is None:
            shapes = self.asked.shapes(self.asked.small)
        assert shapes is not None
        begin = re.escape(self.seen.layers)
        found: dict[str, list[str]] = {}
        for name in shapes:
            found.setdefault(re.sub(f"^{begin}\\d+\\.", f"{self.seen.layers}{{layer}}.", name), [])
            found[re.sub(f"^{begin}\\d+\\.", f"{self.seen.layers}{{layer}}.", name)].append(name)
        layers = max(len(names) for names in found.values())
        for template, names in found.items():
            alike = len({shapes[name] for name in names}) == 1
            if "{layer}" in template and (len(names) != layers or not alike):
                raise InputError(
                    f"not all layers of a {self.asked.name} model like this have the same tensors "
                    f"(first {names[0]}), which cannot be inferred; {ELSEWHERE}"
                )
            if re.search(r"\bexperts\b", template):
                raise InputError(
                    f"{self.asked.name} has experts ({template}), which cannot be inferred; "
                    f"{ELSEWHERE}"
                )
        here = self.asked.shapes(self.asked.small) or {}
        first = {template: template.replace("{layer}", "0") for template in found}
        return {template: name for template, name in first.items() if name in here}

    def stored(self, template: str) -> str:
        """What files call the tensors of a template, in the form of the checkpoint."""
        own = self._names[template]
        name = self._stored.get(own, own)
        if name == own or own in self.files:
            return template
        place = re.search(r"(?<=\.)0(?=\.)", name)
        if place is None or "{layer}" not in template:
            return name
        return name[: place.start()] + "{layer}" + name[place.end() :]

    def _ties(self) -> dict[str, str]:
        """The head's weight, and the embedding that it is in tied models."""
        config = self.asked.config(self.asked.small)
        model: Any = self.asked.model(config, "meta")
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        if head is None or embedding is None or head not in names:
            return {}
        return {f"{names[head]}.weight": f"{names[embedding]}.weight"}

    def ways(self) -> dict[str, list[str]]:
        """Every pattern that a tensor can have, the likeliest first."""
        found = {}
        for template, name in self._names.items():
            module, _, parameter = name.rpartition(".")
            if not self._dimensions[name]:
                raise InputError(
                    f"tensor {template} of a {self.asked.name} model is a single number, which no "
                    "pattern describes, so its family cannot be inferred"
                )
            patterns = list(dict.fromkeys(self._patterns(module, parameter, name)))
            if not patterns:
                raise InputError(
                    f"nobody knows what {self.asked.name} does with tensor {template}, so its "
                    f"family cannot be inferred; {ELSEWHERE}"
                )
            found[template] = patterns
        return found

    def _patterns(self, module: str, parameter: str, name: str) -> Iterator[str]:
        dimensions = self._dimensions[name]
        kind = self.seen.kinds.get(module)
        inside = self.seen.in_attention(module)
        if kind in ("linear", "transposed") and parameter in ("weight", "bias"):
            reads = not inside or module in self.seen.reads_hidden
            writes = not inside or not reads
            if parameter == "bias":
                yield from dimensions[0].ways(writes)
                return
            out, into = dimensions if kind == "linear" else reversed(dimensions)
            for written, read in product(out.ways(writes), into.ways(reads)):
                yield f"{written} <- {read}" if kind == "linear" else f"{read} -> {written}"
        elif kind == "embedding":
            for read, written in product(*(each.ways(True) for each in dimensions)):
                yield f"{read} -> {written}"
        elif len(dimensions) == 1 or kind == "norm":
            for each in product(*(each.ways(not inside) for each in dimensions)):
                yield ", ".join(each)
        elif not dimensions or all(not axes for each in dimensions for axes, _ in each.terms):
            yield ", ".join(each.ways(False)[0] for each in dimensions)

    def description(self, patterns: Mapping[str, str], *, rooted: bool = False) -> dict[str, Any]:
        """The family with these patterns.

        Args:
            patterns: of every tensor.
            rooted: whether the class multiplies embeddings with the root of hidden.
        """
        asked = self.asked
        tensors: dict[str, Any] = {}
        for template, pattern in patterns.items():
            tensors[self.stored(template)] = self._tensor(self._names[template], pattern)
        if rooted:
            tensors |= {
                self.stored(t): {"pattern": pattern, "root": "hidden"}
                for t, pattern in patterns.items()
                if pattern == "vocab -> hidden"
            }
        axes = {axis for p in patterns.values() for d in Pattern.parse(p).dimensions for axis in d.axes}
        sizes = {
            key: axis
            for axis, key in asked.sizes.items()
            if axis in axes or axis in ("layers", "hidden", "heads")
        }
        sizes |= dict.fromkeys(sorted(asked.followers), "hidden")
        constants = {each: _count(each) for each in sorted(axes - {*sizes.values()} - {"head_dim"})}
        assumed = {
            key: asked.value(key)
            for key in sizes
            if asked.said(key) is None and asked.value(key) is not None
        }
        content: dict[str, Any] = {
            "family": asked.name,
            "model_type": asked.value("model_type"),
            "sizes": sizes,
        }
        if "head_dim" not in asked.sizes and "head_dim" in axes:
            sizes["head_dim"] = "head_dim"
            content["computed"] = ["head_dim"]
        if "head_dim" in axes and asked.splits_hidden:
            assumed["head_dim"] = f"{asked.sizes['hidden']} / {asked.sizes['heads']}"
        for each in tensors.values():
            if isinstance(each, dict) and "eps" in each:
                assumed[each["eps"]] = asked.value(each["eps"])
        if self._tied:
            assumed[TIED] = bool(asked.value(TIED))
        content["assumed"] = assumed
        if constants:
            content["constants"] = constants
        if {"heads", "kv_heads"} <= {*sizes.values()}:
            content["groups"] = {"heads": "kv_heads"}
            content["multiples"] = {asked.sizes["heads"]: asked.sizes["kv_heads"]}
        if self._wants_whole_heads():
            content.setdefault("multiples", {})[asked.sizes["hidden"]] = asked.sizes["heads"]
        content["tied"] = {self.stored(a): self.stored(of) for a, of in self._tied.items()}
        content["tensors"] = tensors
        return content

    def _tensor(self, name: str, pattern: str) -> str | dict[str, Any]:
        norm = self.seen.norms.get(name.rpartition(".")[0])
        if norm is None:
            return pattern
        said: dict[str, Any] = {"pattern": pattern}
        if norm.last and self._tied and pattern == "hidden":
            said["tied"] = "<- hidden"
        if name.endswith(".weight"):
            axes = pattern.rpartition(", ")[2].split(".")
            said["norm"] = axes[0]
            if norm.eps:
                said["eps"] = norm.eps
            said |= {key: True for key in ("centred", "behind") if getattr(norm, key)}
            if norm.offset:
                said["offset"] = norm.offset
        return said if len(said) > 1 else pattern

    def _wants_whole_heads(self) -> bool:
        """Whether the class takes no hidden size but multiples of its heads."""
        small = self.asked.small
        if self.asked.derived:
            return True
        return self.asked.shapes(small | {"hidden": small["hidden"] + 2}) is None


def _descriptions(
    proposal: _Proposal, ways: Mapping[str, list[str]]
) -> Iterator[dict[str, Any]]:
    """Everything that may be true, the likeliest first.

    Classes multiply embeddings with the root of their width, or they do not.
    """
    for chosen in _choices(ways):
        yield proposal.description(chosen)
        yield proposal.description(chosen, rooted=True)


def _count(axis: str) -> int:
    words = {word: count for count, word in NUMBERS.items()}
    return words[axis] if axis in words else int(axis.rpartition("_")[2])


def _choices(ways: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """Every description; tensors with the same possibilities, as a weight and its bias, go along."""
    groups = {_group(found): len(found) for found in ways.values() if len(found) > 1}
    for chosen in product(*(range(count) for count in groups.values())):
        at = dict(zip(groups, chosen, strict=True))
        yield {name: found[at.get(_group(found), 0)] for name, found in ways.items()}


def _group(found: list[str]) -> tuple[str, ...]:
    """What parts the possibilities of a tensor: what it writes, or reads."""
    sides = [re.split(r" (?:<-|->) ", each) for each in found]
    parts = [{each[at] for each in sides} for at in range(len(sides[0]))]
    at = next((at for at, part in enumerate(parts) if len(part) > 1), 0)
    return tuple(each[at] for each in sides)


def check_quantised(checkpoint: Checkpoint) -> None:
    """Refuse what growkit could not grow anyway.

    Raises:
        InputError: it is quantised.
    """
    try:
        family_of(checkpoint.config, checkpoint.where())
    except InputError as error:
        if "quantised" in str(error):
            raise


def _check_checkpoint(checkpoint: Checkpoint, description: Mapping[str, Any]) -> None:
    """Hold the checkpoint against its family.

    Raises:
        InputError: a tensor is missing, or has another shape than the class would have it.
    """
    family = described(description, "the inferred family")
    family.complete(checkpoint.config)
    unused_tensors(checkpoint, family)


def _evidence(
    checkpoint: Checkpoint, description: Mapping[str, Any], ways: Mapping[str, list[str]]
) -> list[Evidence]:
    """What the numbers of the checkpoint alone would say."""
    family = described(description, "the inferred family")
    sizes = family.sizes(checkpoint.config)
    forms: dict[str, int] = {}
    for _, pattern in family.patterns(checkpoint.config).items():
        for dimension in pattern.dimensions:
            forms[str(dimension)] = dimension.size(sizes)
    found = []
    for name, patterns in ways.items():
        entry = description["tensors"][name]
        pattern = entry if isinstance(entry, str) else entry["pattern"]
        dimensions = Pattern.parse(pattern).dimensions
        numbers = [each.size(sizes) for each in dimensions]
        found.append(
            Evidence(
                tensor=name,
                pattern=pattern,
                by_number=[[f for f, size in forms.items() if size == n] for n in numbers],
                others=[each for each in patterns if each != pattern],
            )
        )
    return found


__all__ = ["Composed", "Evidence", "Inference", "infer"]
