"""growkit from Python: names that are found, one ``Settings``, results as objects and as shown."""

import copy
import inspect
import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

import growkit
from growkit.base.errors import InputError
from growkit.base.options import options_of
from growkit.base.settings import Running
from growkit.cli.catalogue import abilities
from growkit.extras.inspection.large_plan import plan
from growkit.model.families.family import families
from growkit.planning.recipe import Recipe
from growkit.report.schema import json_schema
from growkit.results import fields
from growkit.results.growth_result import Story
from tests import reference
from tests.commands import Counted
from tests.models import Make, save_model

QUICK = growkit.Settings(prompts=1, length=8)
HOSTILE = "<script>alert('x')</script> & \"more\""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("python")
    save_model(folder / "source", "diffllama", head_dim=8)
    return folder


@pytest.fixture(scope="module")
def grown(place: Path) -> growkit.GrowResult:
    return growkit.grow(place / "source", place / "out", ffn="x2", verify=QUICK)


@pytest.fixture(scope="module")
def proof(grown: growkit.GrowResult) -> growkit.VerifyResult:
    assert grown.verification
    return grown.verification


def test_names_are_found_before_they_are_loaded() -> None:
    code = (
        "import sys, growkit\n"
        "assert {'__version__', 'grow', 'training'} < {*growkit.__all__} == {*dir(growkit)}\n"
        "assert not {'torch', 'transformers', 'rich', 'growkit.training'} & set(sys.modules)\n"
        "assert growkit.results.__name__ == 'growkit.results'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_leads_somewhere() -> None:
    for name in {*dir(growkit)} - {"__version__"}:
        assert getattr(growkit, name) is growkit.__getattr__(name)
    assert growkit.training.AssertPreserved("x").folder == "x"
    with pytest.raises(AttributeError, match="'growkit' has no attribute 'grew'"):
        _ = growkit.grew  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["grow", "convert", "run", "verify"])
def test_an_option_is_declared_once(name: str) -> None:
    """What a command takes is in the signature of the function, with the same default."""
    command = reference.commands()[f"growkit {name}"]
    shown = {each.name: (each.help, each.default) for each in command.params}
    known = inspect.signature(getattr(growkit, name)).parameters
    kinds = {"run": [Running], "verify": [growkit.Settings]}
    for kind in kinds.get(name, [Running, Recipe]):
        for option in options_of(kind).values():
            assert shown[option.name] == (option.help, known[option.name].default)
            assert kind is Running or f"{option.name}: {option.help}" in str(kind.__doc__)


def test_fields_are_keys(proof: growkit.VerifyResult) -> None:
    assert {*fields(growkit.VerifyResult)} == proof.keys() <= {*dir(proof)}
    assert (
        proof.sections.logits.strict_float64.relative
        == proof["sections"]["logits"]["strict_float64"]["relative"]
    )
    assert all(mode.name == mode["name"] for mode in proof.sections.modes.modes)
    for again in (copy.deepcopy(proof), pickle.loads(pickle.dumps(proof))):
        assert type(again) is growkit.VerifyResult
        assert again == proof
        again.kept = False
        assert again["kept"] is False
    assert proof.kept is True
    assert json.loads(json.dumps(proof)) == proof
    with pytest.raises(AttributeError, match="'VerifyResult' object has no attribute 'kpet'"):
        _ = proof.kpet  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="'VerifyResult' object has no attribute 'kpet'"):
        proof.kpet = True  # type: ignore[attr-defined]


def figures(result: growkit.VerifyResult) -> dict[str, Any]:
    return {key: result[key] for key in result.keys() - {"created", "seconds", "target"}}


@pytest.mark.usefixtures("grown")
def test_settings_are_taken_wherever_something_is_proved(place: Path) -> None:
    settings = growkit.Settings(prompts=1, length=8, seed=3)
    replaced = growkit.verify(place / "source", place / "out", settings, seed=0)
    assert figures(replaced) == figures(growkit.verify(place / "source", place / "out", QUICK))
    manifest = place / "out" / "growkit.json"
    recipe = growkit.load_recipe(manifest, output=str(place / "again"))
    again = growkit.run(recipe, verify=settings)
    assert again.verification
    assert again.verification.seed == 3
    made = growkit.Recipe(recipe.source, recipe.steps, recipe.output, verify=False)
    assert growkit.run(made, overwrite=True).verification is None


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "chosen",
    [
        torch.inference_mode,
        lambda: default_device("meta"),  # it computes nothing
        lambda: torch.autocast("cpu", torch.bfloat16),
    ],
)
def test_what_a_caller_chose_in_torch_changes_nothing(
    chosen: Callable[[], AbstractContextManager[None]], source: Path, tmp_path: Path
) -> None:
    with chosen():
        done = growkit.grow(source, tmp_path / "out", hidden="x2", verify=QUICK)
        again = growkit.verify(source, tmp_path / "out", settings=QUICK)
        gated = growkit.convert(source, tmp_path / "dint", "dint", gamma="gated", verify=QUICK)
    assert done["kept"]
    assert gated["kept"]
    plain = growkit.verify(source, tmp_path / "out", settings=QUICK)
    assert figures(again) == figures(plain)


def test_nothing_is_computed_where_subnormal_numbers_are_lost(source: Path, tmp_path: Path) -> None:
    """Nor in threads of torch that were started so; before, a wrong model was called preserved."""
    out, sound = tmp_path / "out", tmp_path / "sound"
    growkit.grow(source, sound, ffn="x2", verify=False)
    torch.set_flush_denormal(True)
    try:
        for operation in (
            lambda: growkit.grow(source, out, ffn="x2", verify=False),
            lambda: growkit.verify(source, sound, settings=QUICK),
            lambda: growkit.load("wider-mlp", source=source),
        ):
            with pytest.raises(InputError, match="subnormal numbers count as zero in this process"):
                operation()
    finally:
        torch.set_flush_denormal(False)
    assert not out.exists()


def test_progress_is_shown_where_one_likes(grown: growkit.GrowResult, place: Path) -> None:
    shown: growkit.Progress = Counted()
    folders = place / "source", place / "out"
    growkit.verify(*folders, QUICK, progress=shown)
    assert shown.total.keys() == {"proving"}
    assert 0 < shown.done["proving"] <= shown.total["proving"]
    growkit.grow(folders[0], place / "counted", ffn="x2", verify=False, progress=shown)
    assert shown.done["writing"] == shown.total["writing"] > 0
    growkit.verify(*folders, QUICK, progress=growkit.Bars())


@pytest.mark.parametrize(("every", "lines"), [(0.0, 2), (60.0, 0)])
def test_a_log_has_lines_of_long_work(
    every: float, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Work of less than a minute leaves none."""
    for counted in (growkit.Bars(every).bytes, growkit.Bars(every).steps):
        with counted("writing [b]", 4) as advance:
            for _ in range(2):
                advance(1)
            advance(2)
        told = capsys.readouterr().err.splitlines()
        assert len(told) == lines
        for line, share in zip(told, ("25%", "50%"), strict=False):
            assert line.startswith(f"writing [b]: {share}, about ")
            assert line.endswith(" s left")


def test_results_are_printed_as_by_the_command(
    grown: growkit.GrowResult, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    growkit.show(grown)
    printed = capsys.readouterr().out
    assert f"promise: {grown.promise}" in printed
    assert grown.verification.reason[:60] in printed
    seen = growkit.inspect(place / "source")
    assert wrong(as_json(seen), SCHEMA["anyOf"][5]) == []
    seen.family = "\x1b[31mred"
    growkit.show(seen)
    printed = capsys.readouterr().out
    assert "signal_heads 2" in printed
    assert "\x1b" not in printed


def test_a_report_of_what_is_gone_or_was_not_proved(
    proof: growkit.VerifyResult, place: Path, tmp_path: Path
) -> None:
    gone = copy.deepcopy(proof)
    gone.target = str(tmp_path / "gone")
    growkit.save_report(gone, tmp_path / "proof.html")
    assert "Preserved" in (tmp_path / "proof.html").read_text()
    for name, folder in (("proof.html", place / "out"), ("proof.txt", tmp_path)):
        with pytest.raises(InputError):
            growkit.save_report(proof, folder / name)
    assert not (place / "out" / "proof.html").exists()
    dry = growkit.grow(place / "source", place / "dry", ffn="x2", dry_run=True)
    with pytest.raises(InputError, match="was not proved"):
        growkit.save_report(dry, tmp_path / "dry.html")


FILE = Path(growkit.__file__).parents[1] / "docs" / "reference" / "results.schema.json"
SCHEMA = json_schema()
KINDS: dict[str, Any] = {"string": str, "boolean": bool, "integer": int, "number": (int, float)}
KINDS |= {"null": type(None), "array": list, "object": dict}


def wrong(value: Any, schema: dict[str, Any], place: str = "") -> list[str]:
    """Places where a value breaks a schema, for the words of JSON Schema that growkit uses."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
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
    assert json.loads(FILE.read_text(encoding="utf-8")) == SCHEMA


def test_every_property_says_what_it_means() -> None:
    for name, each in SCHEMA["$defs"].items():
        for key, schema in each["properties"].items():
            assert schema.get("description"), f"{name}.{key}"


@pytest.fixture(scope="module")
def source(place: Path) -> Path:
    return place / "source"


@pytest.fixture(scope="module")
def verdict(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a conversion that loses something, whose result keeps to its schema as well."""
    settings = growkit.Settings(prompts=2, length=16)
    out = tmp_path_factory.mktemp("made") / "out"
    made = growkit.convert(source, out, to="shared-diff", rank=1, verify=settings)
    assert wrong(as_json(made), SCHEMA["anyOf"][0]) == []
    found: dict[str, Any] = as_json(made["verification"])
    return found


def test_results_keep_to_it(source: Path, verdict: dict[str, Any], tmp_path: Path) -> None:
    assert wrong(verdict, SCHEMA["anyOf"][1]) == []
    dry = growkit.grow(source, tmp_path / "dry", hidden="x2", dry_run=True)
    assert dry["plan"]
    assert wrong(as_json(dry), SCHEMA["anyOf"][0]) == []


def test_what_other_commands_print_keeps_to_it(source: Path, make: Make, tmp_path: Path) -> None:
    story, checked, _, inspected, listed, ahead = SCHEMA["anyOf"][2:8]
    assert wrong(as_json(growkit.inspect(make("llama"))), inspected) == []
    growth = growkit.grow(source, tmp_path / "out", ffn="x2", verify=False)
    told = Story(growth=growth, opening="a", before="b", after="b", kept_in=None)
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


def test_the_control_sees_what_breaks_it(verdict: dict[str, Any]) -> None:
    schema = SCHEMA["anyOf"][1]
    for path, value in {
        ("kept",): 1,
        ("sections", "logits", "strict_float64", "relative"): "small",
        ("sections", "modes", "modes", 0, "kept"): "yes",
        ("news",): None,
        ("sections", "logits", "tokens"): 1.5,
        ("sections", "a_check_of_a_contributor"): {"findings": []},
    }.items():
        spoiled = deepcopy(verdict)
        place: Any = spoiled
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert len(wrong(spoiled, schema)) == 1, path
    less = {key: value for key, value in verdict.items() if key != "fault"}
    assert wrong(less, schema) == [".fault is missing"]
