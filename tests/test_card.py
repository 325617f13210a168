"""The card can be published: the Hub takes it, its snippet runs, no path of a machine is in it."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shutil
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from typer.testing import CliRunner

import growkit
from growkit.base.errors import InputError
from growkit.base.names import by_name, without_paths
from growkit.cli.app import app
from growkit.cli.demo.story import MODEL
from growkit.recipe.files import load_recipe
from growkit.report.card import model_card
from tests.conftest import save_model
from tests.test_calibration import with_tokenizer

QUICK = growkit.Settings(prompts=1, length=8)
BASE = "meta-llama/Llama-3.2-1B"
LONG = re.compile(r"\d\.\d{7,}")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, and what it became, in folders with blanks in their names."""
    folder = tmp_path_factory.mktemp("some one")
    source = save_model(folder / "my models" / "secret", "diffllama", head_dim=8, vocab_size=256)
    with_tokenizer(source)
    text = folder / "my texts" / "held out.txt"
    text.parent.mkdir()
    text.write_text("the quick brown fox jumps over the lazy dog " * 40)
    proof = growkit.Settings(text=str(text), prompts=1, length=16)
    growkit.grow(source, folder / "out" / "large", hidden="x2", verify=proof, base_model=BASE)
    options: dict[str, Any] = {"rank": 2, "calibration": str(text), "shrinkage": "0.5"}
    growkit.convert(source, folder / "out" / "lossy", to="shared-diff", verify=proof, **options)
    growkit.grow(source, folder / "out" / "unproved", hidden="x2", verify=False)
    return folder


KINDS = ["large", "lossy", "unproved"]


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", KINDS)
def test_the_hub_can_read_it(kind: str, place: Path) -> None:
    card = ModelCard(card_of(place / "out" / kind))
    found = card.data.to_dict()
    assert found["library_name"] == "transformers"
    assert found["pipeline_tag"] == "text-generation"
    assert found["tags"][0] == "growkit"
    assert all(isinstance(tag, str) for tag in found["tags"])
    assert found.keys() <= {"library_name", "pipeline_tag", "tags", "base_model"}
    assert found.get("base_model") == (BASE if kind == "large" else None)
    validate_repo_id(found.get("base_model"))
    assert card.text.lstrip().startswith(f"# {kind}")


def test_the_control_sees_what_the_hub_cannot_read(place: Path) -> None:
    card = card_of(place / "out" / "large")
    assert ModelCard(card.removeprefix("---\n")).data.to_dict() == {}
    with pytest.raises(Exception, match="mapping values"):
        ModelCard(card.replace("library_name: ", "library_name: a: b", 1))
    with pytest.raises(HFValidationError):
        validate_repo_id(str(place / "my models" / "secret"))


@pytest.mark.parametrize("kind", KINDS)
def test_no_path_of_the_machine_is_in_it(kind: str, place: Path) -> None:
    card = card_of(place / "out" / kind).replace("\\|", "|")
    for private in (str(place), place.name, "my models", "my texts", "/tmp/", "\\"):
        assert private not in card
    assert "a (a.py) b" in without_paths([])("a (/x/a.py) b")  # the control: it is taken out


@pytest.mark.parametrize("kind", KINDS)
def test_the_manifest_holds_names_alone(kind: str, place: Path) -> None:
    """It is published with the card; with the places, the same sentences would hold paths."""
    text = (place / "out" / kind / "growkit.json").read_text()
    for private in (str(place), place.name, "my models", "my texts", "/tmp/"):
        assert private not in text
    manifest = json.loads(text)
    assert (manifest["recipe"]["source"], manifest["recipe"]["output"]) == ("secret", kind)
    proof = manifest["verification"]
    if proof:
        assert [proof[key] for key in ("source", "target", "text")] == [
            *("secret", kind, "held out.txt")
        ]
        assert manifest["recipe"]["verify"]["text"] == "held out.txt"
        assert list(manifest["other_files"]) == ["held out.txt"]
    assert manifest["recipe"]["steps"][0].get("calibration") == (
        "held out.txt" if kind == "lossy" else None
    )
    (source,) = (place / "my models").iterdir()
    again = growkit.verify(source, place / "out" / kind, prompts=1, length=8)
    assert again["kept"]
    assert again["weights_recovered"] is True
    assert again["source"] == str(source)


def test_names_are_found_beside_the_model(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A manifest is a recipe also where its folder was moved, with what it was made from."""
    shutil.copytree(place / "my models" / "secret", tmp_path / "secret")
    shutil.copytree(place / "out" / "unproved", tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    recipe = load_recipe(Path("../moved/growkit.json"), output="again")
    assert Path(recipe.source).samefile(tmp_path / "secret")
    growkit.run(recipe)
    made, again = (Path(f) / "model.safetensors" for f in ("../moved", "again"))
    assert made.read_bytes() == again.read_bytes()
    with pytest.raises(InputError, match="moved"):
        growkit.run("../moved")  # would write what it reads
    shutil.copytree(tmp_path / "secret", "secret")  # the current folder comes first
    assert load_recipe(Path("../moved")).source == "secret"
    shutil.rmtree("secret")
    shutil.rmtree(tmp_path / "secret")
    done = CliRunner().invoke(app, ["run", "../moved", "--output", "more"])
    assert (done.exit_code, "--source" in done.stderr) == (2, True)


def test_manifests_with_paths_are_read_as_before(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "out" / "unproved", tmp_path / "old")
    manifest = json.loads((tmp_path / "old" / "growkit.json").read_text())
    source, output = place / "my models" / "secret", tmp_path / "absent" / "out"
    manifest["recipe"] |= {"source": str(source), "output": str(output)}
    (tmp_path / "old" / "growkit.json").write_text(json.dumps(manifest))
    recipe = load_recipe(tmp_path / "old")
    assert (recipe.source, recipe.output) == (str(source), str(output))


def test_files_of_one_name_are_told_apart() -> None:
    found = by_name({"/a/x": 1, "/b/x": 2, "x": 3, "y": 4})
    assert found == {"x": 1, "x (2)": 2, "x (3)": 3, "y": 4}


def test_no_path_comes_in_with_a_sentence(place: Path) -> None:
    """Verdicts and notes may name folders, also those of work in progress."""
    manifest = json.loads((place / "out" / "large" / "growkit.json").read_text())
    source, target = place / "my models" / "secret", place / "out" / ".large.x1" / "config.json"
    scratch = "/var/tmp/growkit-abc/reload"
    said = f"preserved: all; the code in {source} (a.py) and {target} and '{scratch}/x.py' differ"
    proof = manifest["verification"]
    proof["reason"] = said
    proof["modes"][0]["note"] = f"not tried: {source}/x.json cannot be read, C:\\Users\\me\\x too"
    proof["fault"] = {"layer": 0, "component": None, "tensor": None, "cause": f"{target} is odd"}
    public = without_paths([str(source), str(place / "out" / "large")])
    card = model_card(manifest | {"verification": public(proof)})
    for private in (str(place), place.name, "my models", "/var", "reload/", "Users"):
        assert private not in card
    assert str(place) in model_card(manifest | {"verification": proof})  # the control
    assert "the code in secret (a.py) and config.json and 'x.py' differ" in card


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_for_people(kind: str, place: Path) -> None:
    card = card_of(place / "out" / kind)
    assert not LONG.search(card)
    assert LONG.search("0.049999999999999996")  # the control
    assert "| None |" not in card
    assert "none |" not in card
    proved = "| in float32 |" in card
    assert proved is (kind != "unproved")
    assert re.search(r"\| size, float32 \| (–|[\d.]+ kB) \| [\d.]+ kB \|", card)


@pytest.mark.parametrize("kind", KINDS)
def test_its_first_table_is_what_became_of_what(kind: str, place: Path) -> None:
    """The source by its name on the Hub, or else of its folder; the steps; the loss."""
    card = card_of(place / "out" / kind)
    first = card[card.index("| model |") : card.index("## How to use it")]
    source = f"[{BASE}](https://huggingface.co/{BASE})" if kind == "large" else "`secret`"
    assert f"| model | {source} | `{kind}` |" in first
    assert f" from {source} with growkit" in card
    how = "convert: shared-diff, rank 2" if kind == "lossy" else "grow: hypercloning, hidden x2"
    assert f"| how | – | {how}" in first
    proof = json.loads((place / "out" / kind / "growkit.json").read_text())["verification"]
    assert ("| loss" in first) is (kind != "unproved")
    if proof:
        losses = (f"{proof[f'loss_{of}']:.4f}" for of in ("source", "target"))
        told = f"loss, nats per token ({proof['predictions']} predictions, held out.txt)"
        assert f"| {told} | {' | '.join(losses)} |" in first


def test_what_a_source_is_called_is_no_markup(place: Path) -> None:
    manifest = json.loads((place / "out" / "lossy" / "growkit.json").read_text())
    manifest["recipe"]["source"] = "a|b` <img src=x> [c](d)"
    card = model_card(manifest)
    assert "| model | `a\\|b' <img src=x> [c](d)` |" in card


@pytest.mark.parametrize("kind", KINDS)
def test_its_snippet_runs_where_it_lies(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "out" / kind)
    (snippet,) = re.findall(r"```python\n(.*?)```", card_of(Path()), re.DOTALL)
    assert "AutoTokenizer" in snippet
    own_code = kind == "lossy"
    assert snippet.count("trust_remote_code=True") == 2 * own_code  # else either asks
    assert ("needs transformers 5 or later" in card_of(Path())) == own_code
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(None):
        exec(compile(snippet, "the card", "exec"), names)
    manifest = json.loads(Path("growkit.json").read_text())
    assert names["model"].num_parameters() == manifest["parameters"]


def test_what_transformers_does_not_load_has_no_snippet(tmp_path: Path, place: Path) -> None:
    growkit.convert(MODEL, tmp_path / "motif", to="motif", verify=False)
    card = card_of(tmp_path / "motif")
    assert "from_pretrained" not in card
    assert "library_name" not in card
    assert "It loads with Motif's own code" in card
    assert "from_pretrained" in card_of(place / "out" / "large")


def test_a_lossy_card_leads_with_what_was_lost(place: Path) -> None:
    card = card_of(place / "out" / "lossy")
    assert card.index("What was given up: ") < card.index("## ")
    assert "given up" not in card_of(place / "out" / "large")
    assert "nothing that was learned is lost" in card_of(place / "out" / "large")


def test_text_of_others_is_no_markup(place: Path) -> None:
    manifest = json.loads((place / "out" / "large" / "growkit.json").read_text())
    manifest["verification"]["negative_control"] = "a <script> | `b`\n## c"
    card = model_card(manifest)
    assert "<script>" not in card
    assert "\n## c" not in card


def test_the_base_model_comes_by_every_way(place: Path, make: Callable[..., Path]) -> None:
    out, source = place / "ways", str(make("llama"))
    out.mkdir()

    def base(name: str) -> Any:
        return ModelCard(card_of(out / name)).data.to_dict().get("base_model")

    def done(*arguments: str) -> int:
        return CliRunner().invoke(app, list(arguments)).exit_code

    option = ["--base-model", BASE]
    assert not done("grow", source, str(out / "a"), "--hidden", "x2", "--no-verify", *option)
    again = ["run", str(out / "a" / "growkit.json"), "--source", source]
    assert not done(*again, "--output", str(out / "b"))
    assert not done(*again, "--output", str(out / "c"), *option[:1], "o/n")
    assert not done("grow", source, str(out / "d"), "--hidden", "x2", "--no-verify")
    recipe = out / "r.yaml"
    recipe.write_text(
        f"source: {json.dumps(source)}\nsteps: [{{grow: hypercloning, ffn: x2}}]\n"
        f"output: {json.dumps(str(out / 'e'))}\nverify: false\nbase_model: true/x\n"
    )
    assert load_recipe(recipe).base_model == "true/x"
    assert not done("run", str(recipe))
    assert [base(name) for name in "abcde"] == [BASE, BASE, "o/n", None, "true/x"]
    shutil.rmtree(out)


def test_names_are_refused_where_the_hub_does() -> None:
    """But for names without an organisation, which a folder may have as well."""

    def ours(name: str) -> bool:
        try:
            growkit.grow("nowhere", "out", hidden="x2", base_model=name, dry_run=True)
        except InputError as error:
            return "on the Hub" not in str(error)
        raise AssertionError

    def theirs(name: str) -> bool:
        try:
            validate_repo_id(name)
        except HFValidationError:
            return False
        return name.count("/") == 1

    choose = random.Random(0)
    names = [
        "a/b",
        "a/b.git",
        "a--b/c",
        "a..b/c",
        "/a/b",
        "./a",
        "a/",
        "/b",
        "a",
        "",
        "é/b",
        "a/b\n",
    ]
    names += ["".join(choose.choices("ab-._/" + string.digits[:2], k=6)) for _ in range(400)]
    taken = [name for name in names if ours(name)]
    assert taken
    assert all(map(theirs, taken))
    refused = [name for name in names if theirs(name) and name not in taken and name.isascii()]
    assert refused == []
