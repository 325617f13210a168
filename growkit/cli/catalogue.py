"""The catalogue of ``growkit families``, from plans of small models, and its table."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean
from growkit.extras.inspection.inspecting import FACTORS, growths, planned_answer
from growkit.extras.inspection.results.inspection_result import Abilities, Answer
from growkit.model.families.family import Family, families
from growkit.model.families.family_yaml import TIED
from growkit.model.model import Headers
from growkit.planning.operation import PROMISES, Operation, SizeOption, operations

REACH = dict(zip(FACTORS, ("any size", "whole factors", "powers of four"), strict=True))
"""The reachable sizes that follow from the first exact factor."""

NOTHING = "–"

EXAMPLE_SIZES = {
    "vocab": 64,
    "hidden": 64,
    "ffn": 64,
    "layers": 2,
    "heads": 8,
    "signal_heads": 8,
    "noise_heads": 8,
    "kv_heads": 4,
    "head_dim": 8,
    "experts": 4,
}
"""Sizes of an example, for axes that most families have."""


OTHER_SIZE = 8
"""Size of any other axis for which the class has no default."""


def example(family: Family, **switches: Any) -> Headers:
    """Make a small example of a family: a minimal config with some switches.

    In a family with experts, every layer has experts, and each token uses two of them.
    """
    config: dict[str, Any] = {"model_type": family.model_types[0]}
    if family.experts:
        config |= {**family.experts.config, family.experts.top_k: 2}
    config |= switches
    assert config["model_type"] in family.model_types
    known = {key: value for key, value in family.defaults.items() if not callable(value)}
    for key, entry in family.axes.items():
        assumed = key in family.defaults
        if key in family.derived or (callable(entry) and assumed):
            continue
        axes = entry(known | config) if callable(entry) else entry
        if axes and (not assumed or EXAMPLE_SIZES.keys() >= {*axes}):
            config[key] = sum(EXAMPLE_SIZES.get(axis, OTHER_SIZE) for axis in axes)
    return Headers(family, config, f"an example of {family.name}")


POSITIONS = {"rope_theta": 1e4, "max_position_embeddings": 64}
"""What an example states, so that no class need be imported for it."""


def model_types() -> dict[str, Family]:
    """The family of every ``model_type``, by the name of the family."""
    every = sorted(families().values(), key=lambda family: family.name.lower())
    return {kind: family for family in every for kind in family.model_types}


def catalogue(name: str | None = None) -> list[Abilities]:
    """List the possible operations on models of every ``model_type``, by the name of the family.

    Args:
        name: a ``model_type``, the name of a family or of a class of transformers; None for all.

    Raises:
        InputError: there is no such family; the message suggests the nearest.
    """
    known = model_types()
    if name is None:
        return [abilities(family, kind) for kind, family in known.items()]
    every = reversed(known.items())
    called = {name: kind for kind, f in every for name in (f.name, f.architecture) if name}
    plain = {alias.lower(): kind for alias, kind in (called | {k: k for k in known}).items()}
    kind = plain.get(name.lower())
    if kind is None:
        meant = did_you_mean(name, known, called, otherwise="'growkit families' lists them")
        raise InputError(f"no family is called {name!r}; {meant}")
    return [abilities(known[kind], kind)]


def abilities(family: Family, kind: str) -> Abilities:
    """List the possible operations on models of a type."""
    ties = (True, False) if TIED in family.defaults else (None,)
    known = {"model_type": kind, **POSITIONS}
    switches = [known | ({} if tied is None else {TIED: tied}) for tied in ties]
    models = [example(family, **config) for config in switches]
    grown = [
        answer
        for operation in operations("grow").values()
        for model in models
        for answer in growths(operation, model)
    ]
    converted = [
        _conversion(operation, family, models[-1], switches[-1])
        for operation in operations("convert").values()
    ]
    return Abilities(family=family.name, model_types=[kind], grow=grown, convert=converted)


def _conversion(
    operation: Operation, family: Family, model: Headers, switches: Mapping[str, object]
) -> Answer:
    """Plan a conversion; if it is refused, plan it again with the family's assumed config keys."""
    answer = planned_answer("convert", operation, model)
    form = family.form
    more = {k: v[0] for k, v in form.harmless.items() if k in form.assumed} if form else {}
    if answer.promise or not more:
        return answer
    other = planned_answer("convert", operation, example(family, **switches, **more))
    if not other.promise:
        return answer
    other["only"] = {key: json.dumps(value) for key, value in more.items()}
    return other


def table(rows: Sequence[Abilities]) -> list[list[str]]:
    """Format the catalogue: a heading, and a line for every type of model.

    A cell lists the sizes that a growth method can change, and how far; growth is exact unless the
    cell names another promise.
    """
    growths = operations("grow")
    lines = [["family", "model_type", *growths, "convert to"]]
    for row in rows:
        cells = [_cell(row, operation) for operation in growths.values()]
        lines.append([row.family, *row.model_types, *cells, _conversions(row.convert)])
    return lines


def _conversions(answers: Sequence[Answer]) -> str:
    """Format all conversions, with the config keys that some require."""
    named: dict[str, list[str]] = {}
    for answer in answers:
        if answer.promise:
            only = " and ".join(f"{key} is {value}" for key, value in answer.only.items())
            promise = "" if answer.promise == "exact" else f" ({answer.promise})"
            named.setdefault(only, []).append(answer.operation + promise)
    parts = [", ".join(names) + (f", if {only}" if only else "") for only, names in named.items()]
    return "; ".join(parts) or NOTHING


def _cell(row: Abilities, operation: Operation) -> str:
    """Format the reach of a growth method; sizes with the same reach share an entry."""
    by_reach: dict[str, list[str]] = {}
    for name in (option.name for option in operation.options if isinstance(option, SizeOption)):
        of_method = [answer for answer in row.grow if answer.operation == operation.name]
        if words := _words(row, name, [answer for answer in of_method if name in answer.options]):
            by_reach.setdefault(words, []).append(name)
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in by_reach.items()) or NOTHING


def _words(row: Abilities, name: str, answers: list[Answer]) -> str:
    """Format how far a size can grow; empty if it cannot."""
    reach: dict[bool | None, str] = {}
    for tied in dict.fromkeys(answer.tied for answer in answers):
        words = []
        for promise in PROMISES:
            known = (
                answer for answer in answers if (answer.tied, answer.promise) == (tied, promise)
            )
            least = next((answer.options[name] for answer in known), None)
            if least:
                words.append(REACH[least] + ("" if promise == "exact" else f" {promise}"))
            if least == FACTORS[0]:
                break
        reach[tied] = ", ".join(words)
    becomes = {answer.becomes for answer in answers if answer.promise} - {row.family}
    outcome = f" (as {becomes.pop()})" if len(becomes) == 1 else ""
    if len({*reach.values()}) == 1:
        (alike,) = {*reach.values()}
        return alike and alike + outcome
    parts = (f"{words or 'not'} if {'' if tied else 'un'}tied" for tied, words in reach.items())
    return ", ".join(parts) + outcome
