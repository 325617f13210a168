"""What can be done to the models of every family, as families and operations say themselves.

Nothing of it is written down: every operation is asked for a plan of a small model of every family,
and a plan says what it promises, or why there is none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean
from growkit.checkpoint.tensors import Weights
from growkit.families.example import Example, example
from growkit.families.family import Family, families, family_of
from growkit.families.headers import Headers
from growkit.planning.operation import PROMISES, Operation, SizeOption, Value
from growkit.recipe.operations import operations
from growkit.recipe.planner import change
from growkit.recipe.recipe import STEPS
from growkit.results.inspection import Abilities, Answer

FACTORS = ("x3/2", "x2", "x4")
"""Sizes that are tried, until one is had exactly: whole factors follow from the first of them."""

ANY, WHOLE, FOURS = "any size", "whole factors", "powers of four"
REACH = dict(zip(FACTORS, (ANY, WHOLE, FOURS), strict=True))
"""What a family can have that has one of these."""

NEEDED: Mapping[str, Value] = {"rank": 1, "experts": "x2"}
"""Values for options that must be given."""

TIED = "tie_word_embeddings"

NOTHING = "–"

MOST_TENSORS = 3000
"""Tensors up to which a model is asked as it is; of more experts, it is asked with a few."""

FEW_EXPERTS = 16


def model_types() -> dict[str, Family]:
    """The family of every ``model_type``, by the name of the family."""
    every = sorted(families().values(), key=lambda family: family.name.lower())
    return {kind: family for family in every for kind in family.model_types}


def catalogue(name: str | None = None) -> list[Abilities]:
    """What can be done to the models of every ``model_type``, by the name of its family.

    Args:
        name: a ``model_type``, the name of a family or of a class of transformers; None for all.

    Raises:
        InputError: there is no such family; gives the nearest.
    """
    known = model_types()
    if name is None:
        return [abilities(family, kind) for kind, family in known.items()]
    called = {family.name: kind for kind, family in reversed(known.items())}
    called |= {f.architecture: kind for kind, f in reversed(known.items()) if f.architecture}
    plain = {each.lower(): kind for each, kind in called.items()} | {k.lower(): k for k in known}
    kind = plain.get(name.lower())
    if kind is None:
        meant = did_you_mean(name, known, called, otherwise="'growkit families' lists them")
        raise InputError(f"no family is called {name!r}; {meant}")
    return [abilities(known[kind], kind)]


def abilities(family: Family, kind: str) -> Abilities:
    """What can be done to the models of a type."""
    ties = (True, False) if TIED in family.defaults else (None,)
    switches = [{"model_type": kind, **({} if tied is None else {TIED: tied})} for tied in ties]
    models = [example(family, **each) for each in switches]
    grown = [
        answer
        for operation in operations("grow").values()
        for model in models
        for answer in _growths(operation, model)
    ]
    converted = [
        _conversion(operation, family, models[-1], switches[-1])
        for operation in operations("convert").values()
    ]
    return Abilities(family=family.name, model_types=[kind], grow=grown, convert=converted)


def possibilities(model: Weights) -> Iterator[Answer]:
    """What can be done to one model: sizes that grow in each way, and conversions.

    A size stands once, in the way that promises most.
    """
    model = _with_few_experts(model)
    for operation in operations("grow").values():
        answers: dict[str, Answer] = {}
        sizes = {each.name for each in operation.options if isinstance(each, SizeOption)}
        for each in _growths(operation, model):
            size = next(name for name in each.options if name in sizes)
            known = answers.get(size)
            if each.promise and (known is None or _rank(each) < _rank(known)):
                answers[size] = each
        yield from answers.values()
    for operation in operations("convert").values():
        answer = _answer("convert", operation, _needed(operation), model)
        if answer.promise:
            yield answer


def _with_few_experts(model: Weights) -> Weights:
    """A model of the same config with fewer experts, where there are very many; else this one."""
    family = family_of(model.config, model.where())
    sizes = family.sizes(model.config)
    if len(model.tensors) <= MOST_TENSORS or sizes.get("experts", 0) <= FEW_EXPERTS:
        return model
    try:
        config = family.resized(model.config, sizes | {"experts": FEW_EXPERTS})
    except InputError:
        return model
    return Headers(family, config, model.where())


def _rank(answer: Answer) -> int:
    return PROMISES.index(answer.promise or PROMISES[-1])


def _conversion(
    operation: Operation, family: Family, model: Example, switches: Mapping[str, object]
) -> Answer:
    """A conversion; of a model whose config says more, where that is what it takes."""
    answer = _answer("convert", operation, _needed(operation), model)
    plain = {key: values[0] for key, values in family.form.harmless.items()} if family.form else {}
    more = {
        key: value for key, value in plain.items() if family.form and key in family.form.assumed
    }
    if answer.promise or not more:
        return answer
    other = _answer("convert", operation, _needed(operation), example(family, **switches, **more))
    if not other.promise:
        return answer
    other["only"] = {key: json.dumps(value) for key, value in more.items()}
    return other


def _needed(operation: Operation) -> dict[str, Value]:
    return {each.name: NEEDED[each.name] for each in operation.options if each.needed}


def _growths(operation: Operation, model: Weights) -> Iterator[Answer]:
    """Every size of a method, in every way that makes it more of what the method says."""
    sizes = [each for each in operation.options if isinstance(each, SizeOption)]
    rounding = any(each.name == "promise" for each in operation.options)
    for size in sizes:
        for factor in FACTORS:
            options = {**_needed(operation), size.name: factor}
            answer = _answer("grow", operation, options, model)
            yield answer
            if answer.promise == "exact":
                break
            if rounding:
                bounded = _answer("grow", operation, {**options, "promise": "bounded"}, model)
                if bounded.promise:
                    yield bounded


def _answer(
    verb: str, operation: Operation, options: Mapping[str, Value], model: Weights
) -> Answer:
    promise = becomes = why = None
    try:
        made = change(STEPS[verb](operation.name, options), model, seed=0)
    except InputError as error:
        why = str(error)
    else:
        config = made.plans[-1].config
        promise, becomes = made.promise, family_of(config, model.where()).name
    return Answer(
        operation=operation.name,
        options={name: str(value) for name, value in options.items()},
        tied=model.config.get(TIED),
        promise=promise,
        becomes=becomes,
        why=why,
        only={},
    )


def table(rows: Sequence[Abilities]) -> list[list[str]]:
    """The catalogue for people: a heading, and a line for every type of models.

    A line says how far each growth method can change which sizes, exactly where it says no more.
    """
    growths = operations("grow")
    lines = [["family", "model_type", *growths, "convert to"]]
    for row in rows:
        cells = [_cell(row, operation) for operation in growths.values()]
        lines.append([row.family, *row.model_types, *cells, _conversions(row.convert)])
    return lines


def _conversions(answers: Sequence[Answer]) -> str:
    """All that there are; with what a config has to say behind those that want it."""
    named: dict[str, list[str]] = {}
    for each in answers:
        if each.promise:
            only = " and ".join(f"{key} is {value}" for key, value in each.only.items())
            named.setdefault(only, []).append(each.operation + _unless_exact(each.promise))
    told = [", ".join(names) + (f", if {only}" if only else "") for only, names in named.items()]
    return "; ".join(told) or NOTHING


def _unless_exact(promise: str | None) -> str:
    return "" if promise == "exact" else f" ({promise})"


def _cell(row: Abilities, operation: Operation) -> str:
    """What a growth method can do, in a few words: sizes that can grow alike stand together."""
    answers = [answer for answer in row.grow if answer.operation == operation.name]
    found: dict[str, list[str]] = {}
    for name in (each.name for each in operation.options if isinstance(each, SizeOption)):
        words = _words(row, name, [answer for answer in answers if name in answer.options])
        if words:
            found.setdefault(words, []).append(name)
    return "; ".join(f"{', '.join(names)}: {words}" for words, names in found.items()) or NOTHING


def _words(row: Abilities, name: str, answers: list[Answer]) -> str:
    """How far a size can grow; nothing if it cannot."""
    reach = {
        tied: _reach(name, [answer for answer in answers if answer.tied == tied])
        for tied in dict.fromkeys(answer.tied for answer in answers)
    }
    others = {each.becomes for each in answers if each.promise} - {row.family}
    outcome = f" (as {others.pop()})" if len(others) == 1 else ""
    if len({*reach.values()}) == 1:
        words = next(iter(reach.values()))
        return words and words + outcome
    kinds = {True: "tied", False: "untied"}
    told = (f"{words or 'not'} if {kinds[bool(tied)]}" for tied, words in reach.items())
    return ", ".join(told) + outcome


def _reach(name: str, answers: list[Answer]) -> str:
    """How far a size can grow in one model: exactly, and at what cost further."""
    words = []
    for promise in PROMISES:
        least = next((each.options[name] for each in answers if each.promise == promise), None)
        if least is None:
            continue
        words.append(REACH[least] + ("" if promise == "exact" else f" {promise}"))
        if least == FACTORS[0]:
            break
    return ", ".join(words)
