"""JSON Schema of growkit's JSON output, generated from the result classes.

python -m growkit.report.schema > docs/reference/results.schema.json
"""

import inspect
import json
import re
import sys
from itertools import chain
from types import NoneType
from typing import Any, get_args, get_origin

from growkit.base.lazy import registered
from growkit.results import Result, fields
from growkit.results import growth_result as operation
from growkit.results import proof_result as proof

PRINTED = (
    *(operation.GrowResult, proof.VerifyResult, operation.Story),
    *chain.from_iterable(registered("results", "PRINTED").values()),
)
"""Results that commands print, those of extras last."""

_SIMPLE = {str: "string", bool: "boolean", int: "integer", float: "number", NoneType: "null"}
_ATTRIBUTE = re.compile(r"^(\w+): (.*?)(?=^\w+: |\Z)", re.MULTILINE | re.DOTALL)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of everything that commands print with ``--json``."""
    definitions: dict[str, Any] = {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Results of growkit",
        "description": "grow, convert and run print the first, verify and --report the second, "
        "demo the third, check the fourth, inspect --infer the fifth, inspect the sixth, families "
        "the seventh, plan the eighth, probe the ninth, verify with --logits alone the tenth.",
        "anyOf": [_schema(declared, definitions) for declared in PRINTED],
        "$defs": dict(sorted(definitions.items())),
    }


def _schema(declared: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    if declared is Any:
        return {}
    if declared in _SIMPLE:
        return {"type": _SIMPLE[declared]}
    if isinstance(declared, type) and issubclass(declared, Result):
        name = declared.__name__
        if name not in definitions:
            definitions[name] = {}  # it may contain itself
            definitions[name] = _object(declared, definitions)
        return {"$ref": f"#/$defs/{name}"}
    of = get_args(declared)
    if get_origin(declared) is list:
        return {"type": "array", "items": _schema(of[0], definitions)}
    if get_origin(declared) is dict:
        return {"type": "object", "additionalProperties": _schema(of[1], definitions)}
    assert of, declared
    if all(kind in _SIMPLE for kind in of):
        return {"type": [_SIMPLE[kind] for kind in of]}
    return {"anyOf": [_schema(kind, definitions) for kind in of]}


def _object(declared: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    others: Any
    properties = {name: _schema(kind, definitions) for name, kind in fields(declared).items()}
    text, others = "", False
    if declared is operation.GrowResult:
        for name, kind in registered("results", "GROWTH").items():
            properties[name.removesuffix("_growth")] = _schema(kind | None, definitions)
    if declared is proof.Sections:  # a check in a file of its own may have any figures
        for name, kind in registered("results", "SECTION").items():
            summary = inspect.cleandoc(kind.__doc__).partition("\n\nAttributes:\n")[0]
            name = name.removesuffix("_section")
            properties[name] = _schema(kind | None, definitions)
            properties[name]["description"] = " ".join(summary.split())
        others = {**_object(proof.Section, definitions), "additionalProperties": {}}
        others["type"] = ["object", "null"]
    for kind in reversed(declared.__mro__[: declared.__mro__.index(Result)]):
        text, _, attributes = inspect.cleandoc(kind.__doc__).partition("\n\nAttributes:\n")
        for name, meaning in _ATTRIBUTE.findall(inspect.cleandoc(attributes)):
            properties[name]["description"] = " ".join(meaning.split())
    return {
        "description": " ".join(text.split()),
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": others,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n")
