"""The card can be published: the Hub takes it, its snippet runs, it holds no path of a machine."""

import contextlib
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt

import growkit
from growkit.base.errors import InputError
from growkit.base.names import without_paths
from growkit.cli.demo import MODEL
from growkit.planning.recipe import load_recipe
from growkit.report.saving import model_card
from tests.commands import cli
from tests.files import listed, with_tokenizer
from tests.models import Make, save_model

BASE = "meta-llama/Llama-3.2-1B"
LONG = re.compile(r"\d\.\d{7,}")
KINDS = ["large", "lossy", "unproved"]


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


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def manifest_of(place: Path, kind: str) -> dict[str, Any]:
    return json.loads((place / "out" / kind / "growkit.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_the_hub_can_read_it(kind: str, place: Path) -> None:
    card = ModelCard(card_of(place / "out" / kind))
    found = card.data.to_dict()
    base = found.pop("base_model", None)
    method = "shared-diff" if kind == "lossy" else "hypercloning"
    assert found == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["growkit", method],
    }
    assert base == (BASE if kind == "large" else None)
    assert card.text.lstrip().startswith(f"# {kind}")


def test_a_rejected_model_says_so_first(place: Path) -> None:
    proof = growkit.Settings(text=str(place / "my texts" / "held out.txt"), max_kl=1e-9)
    options: dict[str, Any] = {"rank": 2, "verify": proof}
    source = place / "my models" / "secret"
    result = growkit.convert(source, place / "out" / "lost", to="shared-diff", **options)
    assert result.kept is False
    first = [card_of(Path(result.output)), card_of(place / "out" / "lossy")]
    assert ["rejected it" in card.partition("\n|")[0] for card in first] == [True, False]


def test_the_control_sees_what_the_hub_cannot_read(place: Path) -> None:
    card = card_of(place / "out" / "large")
    assert ModelCard(card.removeprefix("---\n")).data.to_dict() == {}
    with pytest.raises(Exception, match="mapping values"):
        ModelCard(card.replace("library_name: ", "library_name: a: b", 1))


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_published_and_no_paths(kind: str, place: Path) -> None:
    card = card_of(place / "out" / kind).replace("\\|", "|")
    text = (place / "out" / kind / "growkit.json").read_text()
    for private in (str(place), place.name, "my models", "my texts", "/tmp/"):
        assert private not in card + text
    assert "\\" not in card
    manifest = manifest_of(place, kind)
    recipe, proof = manifest["recipe"], manifest["verification"]
    assert (recipe["source"], recipe["output"]) == ("secret", kind)
    if proof:
        named = [proof[key] for key in ("source", "target", "text")]
        assert named == ["secret", kind, "held out.txt"]
        assert recipe["verify"]["text"] == "held out.txt"
        assert list(manifest["other_files"]) == ["held out.txt"]
    calibration = "held out.txt" if kind == "lossy" else None
    assert recipe["steps"][0].get("calibration") == calibration
    source = place / "my models" / "secret"
    again = growkit.verify(source, place / "out" / kind, prompts=1, length=8)
    assert (again.kept, again.sections.weights.recovered, again.source) == (True, True, str(source))


def test_sentences_are_published_without_paths(place: Path) -> None:
    """Verdicts and notes may name folders, also those of work in progress."""
    source, target = place / "my models" / "secret", place / "out" / ".large.x1" / "config.json"
    public = without_paths([str(source), str(place / "out" / "large")])
    said = f"the code in {source} (a.py) and {target} and '/var/tmp/growkit-abc/reload/x.py' differ"
    told = public({"reason": said, "modes": [{"note": f"{source}/x.json, C:\\Users\\me\\x too"}]})
    assert told["reason"] == "the code in secret (a.py) and config.json and 'x.py' differ"
    assert not re.search("my models|Users", str(told["modes"]))


def test_a_manifest_is_a_recipe_where_its_folder_was_moved(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names are found next to the model, and in the current folder first."""
    shutil.copytree(place / "my models" / "secret", tmp_path / "secret")
    shutil.copytree(place / "out" / "unproved", tmp_path / "moved")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    growkit.run(load_recipe(Path("../moved/growkit.json"), output="again"))
    made, again = (Path(f) / "model.safetensors" for f in ("../moved", "again"))
    assert made.read_bytes() == again.read_bytes()
    with pytest.raises(InputError, match="moved"):
        growkit.run("../moved")  # would write what it reads
    shutil.move(tmp_path / "secret", "secret")
    assert load_recipe(Path("../moved")).source == "secret"
    shutil.rmtree("secret")
    done = cli("run", "../moved", "--output", "more")
    assert (done.exit_code, "--source" in done.stderr) == (2, True)


@pytest.mark.parametrize("kind", KINDS)
def test_its_first_table_is_what_became_of_what(kind: str, place: Path) -> None:
    """The source by its name on the Hub, or else of its folder; the steps; the loss."""
    card = card_of(place / "out" / kind)
    first = card[card.index("| model |") : card.index("## How to use it")]
    source = f"[{BASE}](https://huggingface.co/{BASE})" if kind == "large" else "`secret`"
    assert f"| model | {source} | `{kind}` |" in first
    how = "convert: shared-diff, rank 2" if kind == "lossy" else "grow: hypercloning, hidden x2"
    assert f"| how | – | {how}" in first
    if kind == "unproved":
        assert "| loss" not in first
    else:
        logits = manifest_of(place, kind)["verification"]["sections"]["logits"]
        losses = " | ".join(f"{logits[f'loss_{of}']:.4f}" for of in ("source", "target"))
        assert f"({logits['predictions']} predictions, held out.txt) | {losses} |" in first
    assert not LONG.search(card)
    assert LONG.search("0.049999999999999996")  # the control
    assert not re.search(r"None|none \|", card)
    assert ("Not verified" in card) is (kind == "unproved")
    # A lossy card leads with what was lost.
    assert ("What is lost: " in card[: card.index("## ")]) is (kind == "lossy")
    assert ("nothing that was learned is lost" in card) is (kind == "large")


ACTIVE = r"[a](http://b.example) ![c](d) *e* **f** _g_ `h` ~~i~~ \*j* <b>k</b> &lt; &#9786; [l]\(m)"


def test_names_are_not_read_as_markdown(place: Path) -> None:
    """A reader of CommonMark shows a hostile name as it is; raw, it would make five elements."""
    reader = MarkdownIt("commonmark").enable(["table", "strikethrough"])

    def rendered(text: str) -> tuple[list[str], str]:
        inside = [each for line in reader.parse(text) for each in line.children or ()]
        return [each.type for each in inside if each.type != "text"], "".join(
            each.content for each in inside
        )

    manifest = manifest_of(place, "lossy")
    usual, _ = rendered(model_card(manifest))
    manifest["recipe"]["output"] = manifest["lost"] = ACTIVE
    manifest["verification"]["reason"] = manifest["dtype"] = ACTIVE
    card = model_card(manifest)
    made, text = rendered(card)
    assert made == usual
    assert text.count(ACTIVE) >= 4
    assert len(set(rendered(ACTIVE)[0]) - {"softbreak"}) > 5  # the control
    # GitHub and the Hub would link an address, except in code.
    assert card.count("http://") == card.count("`[a](http://")


@pytest.mark.parametrize("kind", KINDS)
def test_its_snippet_runs_where_it_is(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place / "out" / kind)
    (snippet,) = re.findall(r"```python\n(.*?)```", card_of(Path()), re.DOTALL)
    assert "AutoTokenizer" in snippet
    own_code = kind == "lossy"
    assert snippet.count("trust_remote_code=True") == 2 * own_code  # else either asks
    assert ("needs transformers 4.57 or later" in card_of(Path())) == own_code
    names: dict[str, Any] = {}
    with contextlib.redirect_stdout(None):
        exec(compile(snippet, "the card", "exec"), names)
    assert names["model"].num_parameters() == manifest_of(place, kind)["parameters"]


def test_what_transformers_does_not_load_has_no_snippet(tmp_path: Path) -> None:
    growkit.convert(MODEL, tmp_path / "motif", to="motif", verify=False)
    card = card_of(tmp_path / "motif")
    assert "from_pretrained" not in card
    assert "library_name" not in card
    assert "It loads with Motif's own code" in card


def test_the_base_model_comes_by_every_way(tmp_path: Path, make: Make) -> None:
    source, again = str(make("llama")), tmp_path / "a" / "growkit.json"
    out = {name: str(tmp_path / name) for name in "abc"}
    for arguments in (
        ["grow", source, out["a"], "--hidden", "x2", "--no-verify", "--base-model", BASE],
        ["run", again, "--source", source, "--output", out["b"]],
        ["run", again, "--source", source, "--output", out["c"], "--base-model", "o/n"],
    ):
        assert cli(*arguments).exit_code == 0
    cards = [ModelCard(card_of(Path(folder))).data.to_dict() for folder in out.values()]
    assert [card.get("base_model") for card in cards] == [BASE, BASE, "o/n"]


NORWEGIAN = "\ufeff" + listed("card", "norwegian")


@pytest.mark.parametrize("base", [None, BASE])
def test_what_holds_for_the_source_stays(base: str | None, tmp_path: Path, make: Any) -> None:
    source = make("llama")
    (source / "README.md").write_text(NORWEGIAN.replace("\n", "\r\n"))
    options: dict[str, Any] = {"verify": False, "base_model": base}
    growkit.grow(source, tmp_path / "one", hidden="x2", **options)
    growkit.grow(tmp_path / "one", tmp_path / "two", hidden="x2", verify=False)
    for folder in ("one", "two"):
        data = ModelCard(card_of(tmp_path / folder)).data.to_dict()
        assert (data["license"], data["license_link"]) == ("other", "https://x.org/terms?a=b")
        assert data["language"] == ["no", "zh-Hans"]
        assert data["datasets"] == ["o/data", "c4"]
        assert data["base_model"] == (base or "o/old")
        assert data["tags"] == ["growkit", "hypercloning"]
        assert "license_name" not in data  # the quotes in it might break other readers


@pytest.mark.parametrize(("head", "data"), listed("card", "odd heads"))
def test_cards_of_sources_may_be_odd(head: str, data: Any, tmp_path: Path, make: Any) -> None:
    source = make("llama")
    (source / "README.md").write_text(f"---\n{head}\n---\n")
    result = growkit.grow(source, tmp_path / "one", hidden="x2", verify=False)
    found = ModelCard(card_of(tmp_path / "one")).data.to_dict()
    usual = {"library_name", "pipeline_tag", "tags"}
    assert {key: found[key] for key in found.keys() - usual} == (data or {})
    assert any("README.md cannot be read" in each for each in result.warnings) == (data is None)


def test_names_are_refused_where_the_hub_does() -> None:
    choose, verdicts = random.Random(0), set()
    drawn = ["".join(choose.choices("ab-._/", k=6)) for _ in range(60)]
    for name in ["a/b", "a--b/c", "a/", "", *drawn]:
        try:
            validate_repo_id(name)
            theirs = name.count("/") == 1  # a folder may have a name without an organisation
        except HFValidationError:
            theirs = False
        with pytest.raises(InputError) as error:
            growkit.grow("nowhere", "out", hidden="x2", base_model=name, dry_run=True)
        assert ("base_model" not in str(error.value)) is theirs, name
        verdicts.add(theirs)
    assert verdicts == {True, False}
