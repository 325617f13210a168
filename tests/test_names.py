"""Whatever has a name: a wrong one ends with the right one, and a shell offers those there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import growkit
from growkit.base.errors import LONGEST_SENTENCE, InputError
from growkit.base.names import did_you_mean, nearest, perhaps
from growkit.base.units import size
from growkit.cli.app import app
from growkit.planning.operation import operations
from growkit.recipe.recipe import shipped_recipes
from tests.conftest import save_model, seeded


def run(*words: Any) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def sentence(*words: Any) -> str:
    """What a command that is refused says: one sentence, without a box or a word on stdout."""
    done = run(*words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert done.stderr[:-1].isprintable()
    assert len(done.stderr) < LONGEST_SENTENCE + 50
    return str(done.stderr)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_model(tmp_path / "source", "llama")


# Which is the nearest.


def typo(choose: Any, name: str) -> str:
    """A letter too many, one too few, another one, or two in the wrong order."""
    at = choose.randrange(1, len(name) - 1)
    letter = choose.choice("aeiou")
    return str(
        choose.choice(
            [
                name[:at] + name[at + 1 :],
                name[:at] + letter + name[at:],
                name[:at] + letter + name[at + 1 :],
                name[:at] + name[at + 1] + name[at] + name[at + 2 :],
                name.replace("-", "_").upper(),
            ]
        )
    )


@pytest.mark.parametrize(
    "known",
    [
        [*operations("convert")],
        [*operations("grow")],
        [*shipped_recipes()],
        ["hidden", "ffn", "heads", "kv_heads", "symmetry", "snr_db"],
    ],
    ids=lambda known: known[0],
)
def test_typing_errors_are_seen_through(known: list[str]) -> None:
    choose, seen = seeded(7), 0
    for name in known:
        for _ in range(10):
            wrong = typo(choose, name)
            seen += nearest(wrong, known) == name
    # Of short names that differ in a letter, another may be as near.
    assert seen >= 0.9 * 10 * len(known)


def test_what_is_like_nothing_is_no_guess() -> None:
    known = ["hidden", "heads", "ffn"]
    assert nearest("zzz", known) is None
    assert nearest("h", known) is None
    assert nearest("", known) is nearest("--", known) is None
    assert did_you_mean("zzz", known) == "known are hidden, heads, ffn"
    assert did_you_mean("zzz", known, otherwise="look") == "look"
    assert perhaps("zzz", known) == ""
    assert did_you_mean("Hiden", known, otherwise="look") == "did you mean 'hidden'?"
    listed = "did you mean 'hidden'? (known are hidden, heads, ffn)"
    assert did_you_mean("Hiden", known) == listed
    assert perhaps("ff", known) == "; did you mean 'ffn'?"
    assert nearest("width", known, {"width": "hidden"}) == "hidden"


def test_long_names_cost_nothing() -> None:
    started = time.process_time()
    nearest("x" * 10**7, ["hidden"] * 100)
    assert time.process_time() - started < 0.5


# Every name there is: see also tests/mistakes.txt.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("grow", "a", "b", "--hi\x1b[31mden", "x2"), "\\x1b"),
        (("grow", "a", "b", "--" + "h" * 10**5, "x2"), "[…]"),
    ],
    ids=["steering", "long"],
)
def test_odd_names_are_quoted_plainly(words: tuple[str, ...], said: str) -> None:
    assert said in sentence(*words)


def test_the_help_is_still_the_help() -> None:
    for words in ((), ("recipes",)):
        assert "Usage" in run(*words).output
    assert run("grow", "--help").exit_code == 0


def test_options_in_python(source: Path) -> None:
    with pytest.raises(InputError, match=r"has no option hiden; it has .*; did you mean 'hidden'"):
        growkit.grow(source, "out", hiden="x2")
    with pytest.raises(InputError, match="did you mean 'ffn'"):
        growkit.grow(source, "out", intermediate_size=48)
    with pytest.raises(InputError, match="for layers choose the growth method depth"):
        growkit.grow(source, "out", num_hidden_layers=8)
    with pytest.raises(InputError, match="for rank choose the conversion to shared-diff"):
        growkit.grow(source, "out", rank=8)
    with pytest.raises(InputError, match="did you mean 'heads'"):
        growkit.grow(source, "out", n_head="x2")


def test_configs(source: Path) -> None:
    file = source / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"model_type": "lama"}))
    assert "did you mean 'llama'?" in sentence("inspect", source)
    config["hiden_size"] = config.pop("hidden_size")
    file.write_text(json.dumps(config))
    assert "is 'hiden_size' to be 'hidden_size'?" in sentence("inspect", source)


# What a shell offers.


def asked(line: str) -> dict[str, str]:
    """How bash asks what a line may go on with."""
    place = len(line.split()) - (not line.endswith(" "))
    return {
        "_GROWKIT_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(place),
    }


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("growkit grow a b --method ", [*operations("grow")]),
        ("growkit convert a b --to diff-", ["diff-v2", "diff-transformer"]),
        ("growkit grow a b --symmetry ", ["break", "keep", "uneven"]),
        ("growkit convert a b --scope ", ["head", "layer", "all_heads"]),
        ("growkit grow a b --dtype b", ["bfloat16"]),
        ("growkit verify a b --device ", ["auto", "cpu", "cuda"]),
        ("growkit run --device c", ["cpu", "cuda"]),
        ("growkit run wider-m", ["wider-mlp"]),
        ("growkit recipes show ", [*shipped_recipes()]),
        ("growkit verify ./", []),
    ],
)
def test_values_are_completed(line: str, values: list[str]) -> None:
    done = CliRunner().invoke(app, env=asked(line), prog_name="growkit")
    assert done.stdout.split() == values


def test_completion_imports_nothing_heavy() -> None:
    code = (
        "import sys, atexit\n"
        "heavy = {'torch', 'transformers', 'numpy', 'safetensors'}\n"
        "atexit.register(lambda: sys.stderr.write(' '.join(heavy & set(sys.modules))))\n"
        "sys.argv = ['growkit']\n"
        "from growkit.cli.app import run_app\n"
        "run_app()\n"
    )
    environment = os.environ | asked("growkit convert a b --to dint")
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.split() == ["dint"]
    assert done.stderr == ""


# Sizes.


@pytest.mark.parametrize(
    ("count", "said"),
    [(128 << 10, "131 kB"), (1.5e12, "1.5 TB"), (1.5e16, "15,000 TB")],
)
def test_sizes(count: float, said: str) -> None:
    assert size(count) == said
