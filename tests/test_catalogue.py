"""What ``growkit families`` says of families is what happens to models of transformers."""

import json
import re
from pathlib import Path

import pytest

import growkit
from growkit.cli.catalogue import catalogue, table
from growkit.extras.inspection import inspecting
from growkit.model.families.family import families
from growkit.planning.operation import operations
from tests.catalogue import BEGIN, FILE, as_markdown, keeps, outcome, random_model
from tests.commands import cli
from tests.families import CONFIGS
from tests.files import edit_json
from tests.models import Make, seeded
from tests.test_python import as_json


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    ("family", "kind"),
    [(f.name, kind) for f in families().values() for kind in f.model_types if kind.islower()],
)
def test_the_page_shows_what_the_command_says(family: str, kind: str) -> None:
    """Of every family; ``python -m tests.catalogue`` writes it."""
    (row,) = catalogue(kind)
    assert (row.family, row.model_types) == (family, [kind])
    assert all(answer.promise or answer.why for answer in row.grow + row.convert)
    rows = re.findall(r"\| ([^|]+) \| (.*) \| (.*) \|", FILE.read_text("utf-8").partition(BEGIN)[2])
    said = {
        name: what
        for name, what, of in rows
        if (kind in re.split(", | but ", of)) != of.startswith("every type")
    }
    (_, _, *names), (_, _, *cells) = table([row])
    assert said == {name: cell for name, cell in zip(names, cells, strict=True) if cell != "–"}
    for answer in row.grow:  # the control: with other answers it is another page
        answer.promise = None
    assert table([row])[1][2:] != cells


def test_families_are_listed_in_brief_and_shown_one_by_one() -> None:
    brief = cli("families").stdout
    assert all(kind in brief for each in families().values() for kind in each.model_types)
    assert len(brief.splitlines()) < 80
    assert json.loads(cli("families", "llama", "--json").stdout) == as_json(catalogue("llama"))
    for name in ("llama", "Llama", "LlamaForCausalLM"):
        shown = cli("families", name).stdout
        assert "Llama" in shown
        assert "Qwen" not in shown.partition("convert to")[0]
        assert len(shown.splitlines()) < 40


@pytest.mark.parametrize("kind", ["qwen3_moe"])
def test_inspect_shows_what_can_be_done_next(kind: str, tmp_path: Path) -> None:
    """Each command does as it says; an operation that is not shown is refused."""
    source, _ = random_model(kind, 0, tmp_path / "source")
    possible = growkit.inspect(source).possible
    commands = [each["command"].replace(" SRC ", f" {source} ") for each in possible]
    chosen = seeded(0).sample(list(zip(commands, possible, strict=True)), 2)
    for command, each in chosen:
        words = command.replace(" OUT ", f" {tmp_path / 'out'} ").split()[1:]
        done = cli(*words, "--dry-run", "--json")
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["promise"] == each["promise"]
    shown = {each["command"].partition("--to ")[2].split(" ")[0] for each in possible}
    name = seeded(1).choice(sorted({*operations("convert")} - shown))
    rank = ["--rank", "1"] if name == "shared-diff" else []
    refused = cli("convert", source, tmp_path / "no", "--to", name, *rank, "--dry-run")
    assert refused.exit_code == 2, name


def test_very_many_tensors_are_asked_as_fewer(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan takes time in proportion, and what can be done does not depend on the number."""
    few, many = (make("mixtral", num_local_experts=count) for count in (16, 20))
    expected = growkit.inspect(few).possible
    monkeypatch.setattr(inspecting, "MAX_TENSORS", 30)
    assert growkit.inspect(many).possible == expected


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", CONFIGS)
def test_answers_come_true(kind: str, tmp_path: Path) -> None:
    """Some of them, with one that is a refusal; and other answers would not."""
    (row,) = catalogue(kind)
    seed = len(kind)
    source, tied = random_model(kind, seed, tmp_path / "source")
    asked = [("grow", each) for each in row.grow if each.tied == tied]
    asked += [("convert", each) for each in row.convert if not each.only]
    choose = seeded(seed)
    done = choose.sample([each for each in asked if each[1].promise], 2)
    refused = choose.choice([each for each in asked if not each[1].promise])
    for number, (verb, answer) in enumerate([*done, refused]):
        found = outcome(verb, answer, source, tmp_path / str(number))
        assert keeps(answer.promise, found), (answer, found)
        others = {"exact", "bounded", "different", None} - {answer.promise}
        assert not any(keeps(other, found) for other in others), answer


def test_a_window_that_the_class_assumes_is_a_window(tmp_path: Path) -> None:
    """A config that says nothing of it has one; what no config may have is said in the table."""
    (row,) = catalogue("mistral")
    answer = next(each for each in row.convert if each.operation == "diff-v2")
    assert answer.only == {"sliding_window": "null"}
    assert "if sliding_window is null" in as_markdown([row])
    source, _ = random_model("mistral", 2, tmp_path / "source", answer.only)
    assert keeps("exact", outcome("convert", answer, source, tmp_path / "out"))
    for window in ({}, {"sliding_window": 4096}):
        with edit_json(source / "config.json") as config:
            config.pop("sliding_window", None)
            config |= window
        with pytest.raises(growkit.InputError, match=r"sliding_window.* 4096"):
            growkit.convert(source, tmp_path / "none", "diff-v2", verify=False)
    assert not (tmp_path / "none").exists()
