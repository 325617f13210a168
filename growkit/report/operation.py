"""What terminals show of operations: plans, growth, estimates, inspections, checks, the demo."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from growkit.base.errors import shortened
from growkit.base.units import size
from growkit.report.proof import proof_view
from growkit.report.view import Found, Grid, Paragraph, Part, listing, recorded
from growkit.results.inspection import difference_sentence
from growkit.results.sentences import class_sentence

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")
STATE = ("format", "moments", "step", "groups", "bytes", "reset", "beside")
"""Keys of an optimizer's state that are shown as they are."""

LONGEST_VALUE = 100
"""Characters of a config's value that are shown."""

INDEX = re.compile("0|[1-9][0-9]*")
"""A part of a name that is a number."""


def growth_parts(result: Found) -> Iterator[Part]:
    """A ``growkit.GrowResult``: what was done, or would be, and its proof."""
    if result["dry_run"]:
        yield from (_tensors(result), Paragraph(""))
    if result["dry_run"] and result["config"]:
        rows = [
            [each["key"], *(shortened(each[when] or "", LONGEST_VALUE) for when in CHANGE)]
            for each in result["config"]
        ]
        yield from (Grid(["config.json", *CHANGE], rows, "ttt"), Paragraph(""))
    if result["ranks"]:
        yield _ranks(result["ranks"])
    loads_with = f"loads with {result['loads_with']}" if result["loads_with"] else None
    sentences = [class_sentence(result["config"]), loads_with]
    if not result["verification"]:  # whose reason begins with it
        sentences.append(_lost(result))
    yield from _summary(result, f"{size(result['bytes'])} in {result['dtype']}", sentences)
    if state := result["optimizer"]:
        yield {"optimizer state": state["path"]} | recorded(state, STATE)
        if order := state["assumed"]:
            yield Paragraph(f"it does not name its parameters, which were assumed {order}")
    yield recorded(result["estimate"] or {})
    if result["dry_run"]:
        yield Paragraph(f"dry run: nothing was written to {result['output']}")
    if result["verification"]:
        yield from proof_view(result["verification"]).brief()


CHANGE = ("before", "after")


def _lost(result: Found) -> str | None:
    return f"lost: {result['lost']}" if result["lost"] else None


def _summary(result: Found, storage: str, sentences: Sequence[str | None]) -> Iterator[Part]:
    """Parameters and promise, more sentences, and warnings."""
    grown = f"{result['source_parameters']:,} → {result['parameters']:,} parameters"
    yield Paragraph(f"{grown}, {storage}, promise: {result['promise']}")
    yield from (Paragraph(sentence) for sentence in sentences if sentence)
    for warning in result["warnings"]:
        yield Paragraph(f"warning: {warning}", "warn")


def plan_parts(plan: Found) -> Iterator[Part]:
    """A ``LargePlan``: what a recipe takes."""
    yield from _summary(plan, f"in {plan['dtype']}", [_lost(plan)])
    keys = ("source", "read", "disk_needed", "files", "largest_file", "memory", "bandwidth")
    yield recorded(plan, (*keys, "write_seconds", "proof_seconds", "basis"))


def _tensors(result: Found) -> Grid:
    """The tensors of a plan, by kind."""
    lines = {line["tensor"]: line for line in result["plan"]}
    same = {
        name: f"{line['source_shapes']} {line['shape']} {line['dtype']} "
        + NUMBER.sub("#", line["why"])
        for name, line in lines.items()
    }
    rows = []
    for name, members in group_names(same).items():
        line = lines[members[0]]
        old = ", ".join(" × ".join(map(str, shape)) for shape in line["source_shapes"])
        why = in_common([lines[each]["why"] for each in members])
        rows.append([name, old, " × ".join(map(str, line["shape"])), why])
    for name, members in group_names(result["dropped"]).items():
        rows.append([name, "", "dropped", result["dropped"][members[0]]])
    return Grid(["tensor", "old shape", "new shape", "rule"], rows, "tttt")


def group_names(named: Mapping[str, Hashable]) -> dict[str, list[str]]:
    """Group names that differ in numbers alone.

    Args:
        named: for each name, what must be equal within a group.

    Returns:
        The names of each group in the order of their first, by a name for all of them such as
        ``layers.0–2,5.experts.0–7.weight``.
    """
    groups = {(tuple(name.split(".")), same): [name] for name, same in named.items()}
    for level in reversed(range(max((name.count(".") for name in named), default=-1) + 1)):
        alike: dict[Any, dict[int, list[str]]] = {}
        for (parts, same), members in groups.items():
            number = INDEX.fullmatch(parts[level]) if level < len(parts) else None
            key = (*parts[:level], "", *parts[level + 1 :]) if number else parts
            alike.setdefault((key, same), {})[int(number[0]) if number else 0] = members
        groups = {}
        for (parts, same), found in alike.items():
            numbers = sorted(found)
            whole = tuple(part or _spans(numbers) for part in parts)
            groups[whole, same] = [name for number in numbers for name in found[number]]
    return {".".join(parts): members for (parts, _), members in groups.items()}


def _spans(numbers: Sequence[int]) -> str:
    """Rising numbers, e.g. ``0–2,5``."""
    runs = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in (list(run) for _, run in runs)]
    return ",".join(str(first) if first == last else f"{first}–{last}" for first, last in ends)


def in_common(texts: Sequence[str]) -> str:
    """Texts that differ in numbers alone as one, with ``…`` for those that differ."""
    words = NUMBER.split(texts[0])
    numbers = zip(*(NUMBER.findall(text) for text in texts), strict=True)
    shown = [each[0] if len({*each}) == 1 else "…" for each in numbers]
    return words[0] + "".join(number + word for number, word in zip(shown, words[1:], strict=True))


def _ranks(ranks: Sequence[Found]) -> Grid:
    """Ranks that were tried, with their cost; of ranks of single layers, the chosen ones."""
    if ranks[0]["layer"] is not None:
        chosen = [each for each in ranks if each["chosen"]]
        return listing(chosen, ("layer", "rank", "energy"), "ttt")
    return listing(ranks, ("rank", "kl_nats_per_token", "chosen"), "ttt")


def inspection_parts(result: Found) -> Iterator[Part]:
    """An ``Inspection``: what a checkpoint is."""
    facts = {
        "folder": result["folder"],
        "family": f"{result['family']} ({result['model_class'] or 'no class named'})",
        "parameters": f"{result['parameters']:,} in {result['tensors']} tensors",
        "storage": f"{size(result['bytes'])} in {result['dtype']}",
        "embeddings": "tied" if result["tied"] else "untied",
    }
    attention = recorded(result["attention"] or {})
    yield facts | result["config_sizes"] | attention | recorded(result, ("sizes", "files"))
    for name, why in result["dropped"].items():
        yield Paragraph(f"left out: {name}: {why}")
    steps = {}
    for step in result["possible"]:
        family = f", as {step['becomes']}" if step["becomes"] != result["family"] else ""
        steps[step["command"]] = f"{step['promise']}{family}"
    if steps:
        yield Paragraph("possible next:")
        yield steps


def family_parts(known: Mapping[str, Any]) -> Iterator[Part]:
    """Families (``growkit.families.family.Family``) by their ``model_type``."""
    names: dict[str, list[str]] = {}
    for kind, family in known.items():
        names.setdefault(family.name, []).append(kind)
    rows = [[name, ", ".join(kinds)] for name, kinds in names.items()]
    yield Grid(["family", "model_type"], rows, "tt")
    yield Paragraph(
        "growkit families NAME shows what can be done to the models of one, growkit families --all "
        "to all of them; growkit inspect SRC to your own"
    )


def ability_parts(table: Sequence[Sequence[str]], *, every: bool) -> Iterator[Part]:
    """What can be done to models: a table of every family, or facts of a few."""
    heads, *rows = table
    if every:
        yield Grid(heads, rows, "t" * len(heads), lines=True)
    for row in () if every else rows:
        yield dict(zip(heads, row, strict=True))


def check_parts(result: Found) -> Iterator[Part]:
    """A ``CheckResult``: whether a folder is what its manifest recorded, and every difference."""
    yield Paragraph(result["reason"], "good" if result["whole"] else "bad")
    for each in result["differences"]:
        yield Paragraph(difference_sentence(each))


def story_parts(result: Found) -> Iterator[Part]:
    """A ``Story``: the growth of the demo, its proof, and what both models write."""
    yield from growth_parts(result["growth"])
    written = {"before": result["before"], "after": result["after"]}
    if result["before"] == result["after"]:
        written = {"before and after, the same text": result["before"]}
    for title, text in written.items():
        yield Paragraph(f"── {title}, greedily ──", "heading")
        yield Paragraph(result["opening"] + text, "quote")
    if result["kept_in"]:
        yield Paragraph(f"the grown model is in {result['kept_in']}")
