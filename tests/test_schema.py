"""The documented schema is that of the declarations, and what commands print keeps to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

import growkit
from growkit.families.family import families
from growkit.inference.inferring import infer
from growkit.pipeline.catalogue import abilities
from growkit.pipeline.estimate import plan
from growkit.results.operation import Story
from growkit.results.schema import json_schema

FILE = Path(growkit.__file__).parents[1] / "docs" / "results.schema.json"
KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "null": type(None),
    "array": list,
    "object": dict,
}


def wrong(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Places where a value breaks a schema, for the words of JSON Schema that growkit uses."""
    if "$ref" in schema:
        schema = json_schema()["$defs"][schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        found = [wrong(value, each, place) for each in schema["anyOf"]]
        return min(found, key=len)
    if not schema:  # anything
        return []
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    truth = isinstance(value, bool) and "boolean" not in kinds
    if truth or not any(isinstance(value, KINDS[kind]) for kind in kinds):
        return [f"{place} is {value!r}, no {kinds}"]
    if isinstance(value, list):
        return [
            f for i, each in enumerate(value) for f in wrong(each, schema["items"], f"{place}.{i}")
        ]
    if not isinstance(value, dict):
        return []
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    missing = [
        f"{place}.{key} is missing" for key in schema.get("required", []) if key not in value
    ]
    for key, each in value.items():
        of = properties.get(key, more)
        known = isinstance(of, dict)
        missing += wrong(each, of, f"{place}.{key}") if known else [f"{place}.{key} is not known"]
    return missing


def as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def test_the_file_is_that_of_the_declarations() -> None:
    assert json.loads(FILE.read_text(encoding="utf-8")) == json_schema()


def test_every_property_says_what_it_means() -> None:
    for name, each in json_schema()["$defs"].items():
        for key, schema in each["properties"].items():
            assert schema.get("description"), f"{name}.{key}"


@pytest.mark.parametrize("rank", [None, 1])
def test_results_keep_to_it(rank: int | None, make: Callable[..., Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"verify": growkit.Settings(prompts=2, length=16)}
    if rank:
        source = make("diffllama", head_dim=8)
        result = growkit.convert(source, tmp_path / "out", to="shared-diff", rank=rank, **options)
    else:
        source = make("llama")
        result = growkit.grow(source, tmp_path / "out", hidden="x2", **options)
    grown = json_schema()["anyOf"][0]
    assert wrong(as_json(result), grown) == []
    dry = growkit.grow(source, tmp_path / "dry", hidden="x2", dry_run=True)
    assert dry["plan"]
    assert wrong(as_json(dry), grown) == []
    verdict = as_json(result["verification"])
    assert wrong(verdict, json_schema()["anyOf"][1]) == []


def test_what_other_commands_print_keeps_to_it(make: Callable[..., Path], tmp_path: Path) -> None:
    inspected, story, listed, ahead, checked, _, inferred = json_schema()["anyOf"][2:9]
    assert wrong(as_json(infer(make("llama"))), inferred) == []
    for source in (make("llama"), make("diffllama", head_dim=8)):
        assert wrong(as_json(growkit.inspect(source)), inspected) == []
    told = Story(
        growth=growkit.grow(source, tmp_path / "out", ffn="x2", verify=False),
        opening="a",
        before="b",
        after="b",
        kept_in=None,
    )
    assert wrong(as_json(told), story) == []
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "more").touch()
    (tmp_path / "out" / "README.md").unlink()
    assert wrong(as_json(growkit.check(tmp_path / "out")), checked) == []
    named = [family for family in families().values() if family.name in ("Llama", "Mamba")]
    found = as_json([abilities(family, family.model_types[0]) for family in named])
    assert found
    assert wrong(found, listed) == []
    recipe = growkit.Recipe(
        str(make("llama")), (growkit.GrowStep("hypercloning", {"ffn": "x2"}),), "out"
    )
    planned = as_json(plan(recipe, bandwidth="1GB"))
    assert wrong(planned, ahead) == []
    found[0]["grow"][0]["promise"] = ["exact"]  # the controls
    assert wrong(found, listed) == [".0.grow.0.promise is ['exact'], no ['string', 'null']"]
    del told["opening"]
    assert wrong(as_json(told), story) == [".opening is missing"]


def test_the_control_sees_what_breaks_it(make: Callable[..., Path], tmp_path: Path) -> None:
    settings = growkit.Settings(prompts=2, length=16)
    result = growkit.grow(make("llama"), tmp_path / "out", hidden="x2", verify=settings)
    schema = json_schema()["anyOf"][1]
    verdict = as_json(result["verification"])
    for path, value in {
        ("kept",): 1,
        ("strict_float64", "relative"): "small",
        ("modes", 0, "kept"): "yes",
        ("news",): None,
        ("tokens",): 1.5,
    }.items():
        spoiled = deepcopy(verdict)
        place: Any = spoiled
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert len(wrong(spoiled, schema)) == 1, path
    del verdict["fault"]
    assert wrong(verdict, schema) == [".fault is missing"]
