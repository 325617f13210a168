"""The command line: fast to start, quiet on stdout, honest in its exit codes."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import growkit
from growkit.base.errors import LONGEST_SENTENCE, InputError
from growkit.base.settings import DEVICES
from growkit.cli.commands import app
from growkit.planning.operation import operations
from growkit.planning.recipe import shipped_recipes
from tests.commands import cli, refusal
from tests.files import folder_bytes, listed
from tests.models import Make

IN_TURN = """
import json, os, sys
from growkit.cli.commands import run_app
for arguments, environment in json.loads(sys.argv[1]):
    sys.argv, os.environ = ["growkit", *arguments], os.environ | environment
    try:
        run_app()
    except SystemExit as end:
        assert not end.code, arguments
    print(*sys.modules, file=sys.stderr)
"""
"""Commands in one process, which says after each what has been imported so far."""


def test_commands_import_nothing_that_they_do_not_need(make: Make, tmp_path: Path) -> None:
    """Help also on a terminal of no width, which is one of unknown width."""
    source, out, completing = str(make("llama")), str(tmp_path / "out"), "growkit convert a b --to "
    light = [(["--version"], {}), (["grow", "--help"], {"COLUMNS": "0"}), (["recipes", "list"], {})]
    light += [([], asked(completing)), (["families"], {"_GROWKIT_COMPLETE": ""})]
    headers = [["families", "llama", "--json"], ["inspect", source]]
    headers += [["grow", source, out, "--hidden", "x2", "--dry-run"]]
    commands = json.dumps([*light, *((arguments, {}) for arguments in headers)])
    done = subprocess.run([sys.executable, "-c", IN_TURN, commands], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in (growkit.__version__, "--ffn", "wider-mlp", "diff-v2", "Mamba", "disk needed"):
        assert word in done.stdout
    imported = [{*line.split()} for line in done.stderr.splitlines()]
    assert len(imported) == len(light) + len(headers)
    assert not imported[len(light) - 1] & {"torch", "transformers", "numpy", "safetensors"}
    assert not imported[-1] & {"torch", "transformers"}


def test_inspect(make: Make) -> None:
    source = make("diffllama", tie_word_embeddings=True)
    seen = json.loads(cli("inspect", source, "--json").stdout)
    assert (seen["family"], seen["model_class"]) == ("DiffLlama", "DiffLlamaForCausalLM")
    assert seen["tied"] is True
    assert seen["sizes"]["signal_heads"] == seen["sizes"]["noise_heads"] == 2
    tensors = load_file(source / "model.safetensors").values()
    assert seen["parameters"] == sum(tensor.numel() for tensor in tensors)
    assert seen["config_sizes"]["num_attention_heads"] == 4


@pytest.mark.parametrize(("words", "shown", "hidden"), listed("cli", "options of operations"))
def test_help_shows_the_options_of_the_named_operation(
    words: str, shown: list[str], hidden: list[str]
) -> None:
    text = cli(*words.split(), "--help").stdout
    named = set(re.findall(r"--[a-z-]+", text))
    assert named.issuperset(shown)
    assert named.isdisjoint(hidden)


def test_a_dry_run_plans_where_an_earlier_output_is(make: Make, tmp_path: Path) -> None:
    """It is refused where the run would be refused with ``--overwrite`` as well."""
    source, target, file = make("llama"), tmp_path / "out", tmp_path / "recipe.yaml"
    file.write_text(f"source: {source}\noutput: {target}\nsteps: [{{grow: depth, layers: x2}}]\n")
    cli("grow", source, target, "--hidden", "x2", "--no-verify")
    before = folder_bytes(tmp_path)
    for words in (["grow", source, target, "--hidden", "x2"], ["run", file]):
        assert cli(*words).exit_code == 2
        done = cli(*words, "--dry-run")
        assert done.exit_code == 0, done.output
    assert folder_bytes(tmp_path) == before
    (target / "growkit.json").unlink()
    assert cli("run", file, "--dry-run").exit_code == 2


def test_dry_run_shows_everything_and_touches_nothing(make: Make, tmp_path: Path) -> None:
    """Of two steps as of one: tensors of the source become those that are written."""
    source, target, file = make("llama"), tmp_path / "out", tmp_path / "recipe.yaml"
    steps = "[{grow: hypercloning, hidden: x2}, {grow: hypercloning, ffn: x3}]"
    file.write_text(f"source: {source}\noutput: {target}\nsteps: {steps}\nverify: false\n")
    before = folder_bytes(tmp_path)
    shown = json.loads(cli("run", file, "--dry-run", "--json").stdout)
    rows = {*re.findall(r"^\S+\.weight", cli("run", file, "--dry-run").stdout, re.MULTILINE)}
    spans = {re.sub(r"layers\.\d", "layers.0–1", line["tensor"]) for line in shown["plan"]}
    assert rows == spans  # a row for each kind of tensor
    assert folder_bytes(tmp_path) == before
    cli("run", file)
    old, written = (load_file(f / "model.safetensors") for f in (source, target))
    for line in shown["plan"]:
        assert line["shape"] == list(written[line["tensor"]].shape)
        assert line["source_shapes"] == [list(old[name].shape) for name in line["sources"]]
    whys = {line["tensor"]: line["why"] for line in shown["plan"]}
    up = whys["model.layers.0.mlp.up_proj.weight"]
    assert up == "repeat ffn ×2, split hidden ×2; repeat ffn ×3"
    assert len(shown["plan"]) == len(written)
    assert shown["parameters"] == sum(tensor.numel() for tensor in written.values())
    assert shown["bytes"] == sum(tensor.nbytes for tensor in written.values())


def test_recipes_are_listed_shown_and_copied(tmp_path: Path) -> None:
    assert "hypercloning-x2" in cli("recipes", "list").stdout
    shown = cli("recipes", "show", "hypercloning-x2")
    assert "grow: hypercloning" in shown.stdout
    copies = [cli("recipes", "copy", "hypercloning-x2", tmp_path).exit_code for _ in range(2)]
    assert copies == [0, 2]
    assert (tmp_path / "hypercloning-x2.yaml").read_text() == shown.stdout


# Sentences: see also tests/mistakes.txt.


@pytest.mark.parametrize(("name", "said"), [("hi\x1b[31mden", "\\x1b"), ("h" * 10**5, "[…]")])
def test_odd_names_are_quoted_plainly(name: str, said: str) -> None:
    told = refusal("grow", "a", "b", f"--{name}", "x2")
    assert said in told
    assert told.isprintable()
    assert len(told) < LONGEST_SENTENCE + 50


def test_options_in_python() -> None:
    with pytest.raises(InputError, match=r"has no option hiden; it has .*; did you mean 'hidden'"):
        growkit.grow("source", "out", hiden="x2")
    with pytest.raises(InputError, match="for layers choose the growth method depth"):
        growkit.grow("source", "out", num_hidden_layers=8)
    with pytest.raises(InputError, match="for rank choose the conversion to mla or shared-diff"):
        growkit.grow("source", "out", rank=8)
    with pytest.raises(InputError, match="seed is '1'"):
        growkit.grow("source", "out", hidden="x2", seed="1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer is empty"):
        growkit.grow("source", "out", hidden="x2", optimizer="")


# What a shell offers.


def asked(line: str) -> dict[str, str]:
    """How bash asks what a line may go on with."""
    place = len(line.split()) - (not line.endswith(" "))
    return {"_GROWKIT_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(place)}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("growkit grow a b --method ", [*operations("grow")]),
        ("growkit convert a b --to diff-", ["diff-transformer", "diff-v2"]),
        ("growkit grow a b --symmetry ", ["break", "keep"]),
        ("growkit convert a b --scope ", ["head", "layer", "all_heads"]),
        ("growkit grow a b --dtype b", ["bfloat16"]),
        ("growkit verify a b --device ", [*DEVICES]),
        ("growkit run --device c", ["cpu", "cuda"]),
        ("growkit run wider-m", ["wider-mlp"]),
        ("growkit recipes show ", [*shipped_recipes()]),
        ("growkit verify ./", []),
    ],
)
def test_values_are_completed(line: str, values: list[str]) -> None:
    done = CliRunner().invoke(app, env=asked(line), prog_name="growkit")
    assert done.stdout.split() == values


def test_the_demo_keeps_its_model_where_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its proof and its texts are shorter here; nightly, the documents show all of it."""
    few = growkit.Settings(prompts=1, length=24)
    monkeypatch.setattr("growkit.cli.demo.Settings", lambda **_: few)
    monkeypatch.setattr("growkit.cli.demo.NEW_BYTES", 8)
    done = cli("demo", tmp_path / "out", "--json")
    assert done.exit_code == 0, done.output
    story = json.loads(done.stdout)
    assert story["growth"]["kept"]
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert story["kept_in"] == story["growth"]["output"] == str(tmp_path / "out")
    assert len(story["before"].encode()) == 8
    assert story["before"] == story["after"]
