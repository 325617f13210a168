"""The catalogue of ``growkit families``, as a table."""

from collections.abc import Sequence

from growkit.pipeline.inspection import FACTORS
from growkit.planning.operation import PROMISES, Operation, SizeOption, operations
from growkit.results.growth_result import Abilities, Answer

REACH = dict(zip(FACTORS, ("any size", "whole factors", "powers of four"), strict=True))
"""The reachable sizes that follow from the first exact factor."""

NOTHING = "–"


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
