"""What a proof reports at a glance, what to do after a failure, and the limit of a loss."""

from __future__ import annotations

import json
import math
import shutil
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

import growkit
from growkit.base.errors import InputError
from growkit.base.units import duration, size
from growkit.cli.app import app
from growkit.recipe.recipe import load_recipe, parse_recipe
from growkit.report.proof import glance, headroom, proof_view
from growkit.results.advice import name_result, next_step
from growkit.results.proof import Finding, VerifyResult
from tests.conftest import save_model
from tests.test_report import finding, full, mode

QUICK: dict[str, Any] = {"prompts": 1, "length": 12}
OPTIONS = ["--prompts", "1", "--length", "12"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, what it grew into, and what it was converted into with a loss."""
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "diffllama", head_dim=8)
    growkit.grow(source, folder / "exact", hidden="x2", verify=False)
    growkit.convert(source, folder / "lossy", "shared-diff", rank=1, verify=False)
    return folder


@pytest.fixture(scope="module")
def exact(place: Path) -> growkit.VerifyResult:
    return growkit.verify(place / "source", place / "exact", **QUICK)


@pytest.fixture(scope="module")
def lossy(place: Path) -> growkit.VerifyResult:
    return growkit.verify(place / "source", place / "lossy", **QUICK)


def words(result: Any) -> dict[str, str]:
    return {name: str(line) for name, line in glance(result).items()}


def command(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(each) for each in arguments], env={"COLUMNS": "80"})


def test_findings_at_a_glance(place: Path, exact: growkit.VerifyResult) -> None:
    found = words(exact)
    before, after = exact.source_parameters, exact.parameters
    sizes = f"{size(exact.source_bytes)} → {size(exact.bytes)} in float32"
    assert found["parameters"] == f"{before:,} → {after:,} (× {after / before:.3g}; {sizes})"
    tensors = load_file(place / "source" / "model.safetensors")
    assert before == sum(each.numel() for each in tensors.values())
    assert exact.source_bytes == sum(each.nbytes for each in tensors.values())
    assert found["tensors"] == f"{len(tensors)} of {len(tensors)} recovered (bit for bit)"
    assert found["inference modes"].startswith(f"all {len(exact.modes)} kept (prefill, ")
    assert found["largest difference"].count("× below the limit") == 2
    assert datetime.fromisoformat(exact.created).tzinfo == timezone.utc
    assert 0 < (exact.seconds or 0) < 60
    assert "KL" not in found
    assert len(exact.tokens_by_position) == len(exact.kl_by_position) == 12
    assert exact.rounding.dtype == exact.native.dtype
    assert 0 < (exact.rounding.relative or 0) < (exact.native.tolerance or 0)
    assert exact.loss_source_native == pytest.approx(exact.loss_source, rel=1e-4)
    assert exact.loss_source_native != exact.loss_source
    assert "the logits differ by at most " in exact.reason
    same = growkit.verify(place / "source", place / "source", **QUICK)
    assert "the logits are identical in strict float64" in same.reason
    assert "0.0e" not in same.reason


def test_what_was_lost_comes_first(
    exact: growkit.VerifyResult, lossy: growkit.VerifyResult
) -> None:
    found = words(lossy)
    assert next(iter(found)) == "KL"
    assert 0 < (lossy.tensors_recovered or 0) < (lossy.source_tensors or 0)
    assert "largest difference" not in found
    assert lossy.modes[0].kept is None
    assert " without a limit" in found["inference modes"]
    assert lossy.reason.startswith(f"changed as requested ({lossy.lost}): the loss goes")
    assert "of the likeliest next tokens are the same" in lossy.reason
    assert (exact.lost, bool(lossy.lost)) == (None, True)


def test_headroom_in_words() -> None:
    for measured, limit, text in (
        (1.0, 60.0, "60 × below the limit"),
        (4.0, 5.0, "1.2 × below the limit"),
        (2.0, 1.0, "2 × above the limit"),
        (1.0, 12345.0, "12,000 × below the limit"),
        (1e-9, 2.0, "2e+09 × below the limit"),
        (2.0, 1e-9, "far above the limit"),
        (1.0, 0.0, "far above the limit"),
        (1.0, 1.0, "exactly the limit"),
        (0.0, 1.0, "no difference at all"),
        (None, 1.0, "not a number"),
        (1.0, None, None),
    ):
        kept = measured is not None and limit is not None and measured <= limit
        assert headroom(finding("native", kept, measured=measured, limit=limit)) == text


def test_findings_in_words() -> None:
    kept, free, failed = mode("prefill", True), mode("prefill", None), mode("generate", False)
    untried = mode("cached decoding", None, note="too short", tried=False)
    for text, modes in {
        "all 1 kept (prefill)": [kept],
        "1 kept (prefill; not tried: cached decoding (too short))": [kept, untried],
        "1 without a limit, 1 not the same (not the same with generate)": [free, failed],
    }.items():
        assert words(full(modes=modes))["inference modes"] == text
    for factor, after in {"": 10_000, "+1; ": 10_001, "-1; ": 9_999, "× 4; ": 40_000}.items():
        result = full(source_parameters=10_000, parameters=after, source_bytes=1000, bytes=1000)
        text = f"10,000 → {after:,} ({factor}1 kB in bfloat16)"
        assert words(result)["parameters"] == text
    some = full(first_lost_tensor=None, tensors_recovered=38, source_tensors=54)
    rest = "the other 16 went into tensors that are computed from them"
    assert words(some)["tensors"] == f"38 of 54 recovered (bit for bit; {rest})"


def test_units_fit() -> None:
    counts = {0: "0 bytes", 999: "999 bytes", 1540: "1.54 kB", 999_950: "1 MB", 6.43e9: "6.43 GB"}
    assert [size(each) for each in counts] == [*counts.values()]
    times = {8.125: "8.1 s", 125.2: "2 min 5 s", 7300.0: "2 h 1 min"}
    assert [duration(each) for each in times] == [*times.values()]


PARTED = {"relative": 0.0, "tolerance": 0.1, "control_caught": True}
NEXT: list[tuple[str, dict[str, Any], str]] = [
    ("negative_control", {}, "--text FILE"),
    ("weights", {}, "copy the target's weights again"),
    ("files", {"changed": ["config.json: rope_theta"]}, "put config.json: rope_theta back"),
    ("strict_float64", {"weights_recovered": None}, "keep growkit.json with it"),
    ("native", {}, "--dtype float32"),
    ("max_kl", {}, "--max-kl"),
    ("trainability", {}, "--symmetry break"),
    ("generate", {}, "avoid generate"),
    ("training", {"training": {"control_caught": False}}, "--steps"),
    ("training", {"training": PARTED}, "the state of the source's optimizer"),
]


def advice(name: str, changes: dict[str, Any]) -> str:
    result = VerifyResult(**full(weights_recovered=True) | changes)
    result.findings = [Finding(**finding(name))]
    return next_step(name_result(result, "/m/my model", "/m/out.rejected")) or ""


@pytest.mark.parametrize(("name", "changes", "text"), NEXT)
def test_every_failure_has_its_advice(name: str, changes: dict[str, Any], text: str) -> None:
    assert text in advice(name, changes)
    others = [advice(other, more) for other, more, _ in NEXT if (other, more) != (name, changes)]
    assert not any(text in other for other in others)
    kept = VerifyResult(**full(findings=[finding(name, kept=True)]))
    assert next_step(kept) is None
    again = "growkit run /m/out.rejected/growkit.json --source '/m/my model' --output /m/out-again"
    assert f"({again})" in advice("weights", {})


def test_the_terminal_begins_with_the_verdict(place: Path, tmp_path: Path) -> None:
    spoiled = shutil.copytree(place / "exact", tmp_path / "spoiled")
    weights = load_file(spoiled / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, spoiled / "model.safetensors", {"format": "pt"})
    done = command("verify", place / "source", spoiled, *OPTIONS)
    assert done.exit_code == 1
    marks = ("not preserved", "at fault:", "next:", "loss", "source's rounding")
    places = [done.stdout.index(each) for each in marks]
    assert places == sorted(places)
    for prompts in (1, 10):  # of 11 predictions each
        amount = ["--prompts", prompts, "--length", "12"]
        done = command("verify", place / "source", place / "exact", *amount)
        assert done.exit_code == 0
        assert done.stdout.startswith("preserved: ")
        assert ("next: prove it on more" in done.stdout) is (prompts == 1)
        assert ("next:" in done.stdout) is (prompts == 1)
        assert f"{11 * prompts} predictions" in " ".join(done.stdout.split())


def test_a_key_that_was_changed_is_named_with_its_values(place: Path, tmp_path: Path) -> None:
    spoiled = shutil.copytree(place / "exact", tmp_path / "spoiled")
    config = json.loads((spoiled / "config.json").read_text())
    value = config["rms_norm_eps"]
    (spoiled / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    name = "rms_norm_eps in config.json"
    found = growkit.verify(place / "source", spoiled, **QUICK)
    assert found.changed == [name]
    assert found.changed_values == [{"name": name, "expected": json.dumps(value), "found": "0.25"}]
    assert f"0.25 in place of {value}" in found.reason
    assert (next_step(found) or "").startswith(f"set {name} back to {value} (it is 0.25)")
    assert proof_view(found).advice["At fault"].startswith(f"{name}; ")
    assert found.fault
    assert found.fault.tensor is None  # every weight gives the source's back


# The limit of a loss.


def test_a_limit_turns_a_loss_into_an_exit_code(
    place: Path, tmp_path: Path, lossy: growkit.VerifyResult
) -> None:
    """In Python, in every command, and in a recipe."""
    kl, source, recipe = lossy.strict_float64.kl_nats_per_token, place / "source", tmp_path / "r"
    assert lossy.kept
    assert kl
    for limit, kept in ((kl * 0.99, False), (kl * 1.01, True)):
        option, code = ["--max-kl", limit], 0 if kept else 1
        result = growkit.verify(source, place / "lossy", max_kl=limit, **QUICK)
        assert (result.kept, result.max_kl) == (kept, limit)
        assert ("not as asked" in result.reason) is not kept
        assert command("verify", source, place / "lossy", *OPTIONS, *option).exit_code == code
        out = tmp_path / f"converted-{code}"
        convert = ["convert", source, out, "--to", "shared-diff", "--rank", "1", *OPTIONS]
        assert command(*convert, *option).exit_code == code
        assert Path(f"{out}.rejected").exists() is not kept
        steps = {"source": str(source), "steps": [{"convert": "shared-diff", "rank": 1}]}
        for name, proof, more in (("a", {"max_kl": limit}, []), ("b", {}, option)):
            output = str(tmp_path / f"{name}-{code}")
            recipe.write_text(json.dumps({**steps, "output": output, "verify": QUICK | proof}))
            assert command("run", recipe, *more).exit_code == code
            made = Path(output if kept else f"{output}.rejected") / "growkit.json"
            assert load_recipe(made).verify == growkit.Settings(**QUICK, max_kl=limit)
    limited = growkit.verify(source, place / "exact", max_kl=1e-6, **QUICK)
    assert limited.kept
    assert "KL" in words(limited)


@pytest.mark.parametrize(("limit", "rank"), [(1e-9, 1), (1e3, 1), (None, 4)])
def test_a_report_names_its_output_and_warns(
    place: Path, tmp_path: Path, limit: float | None, rank: int
) -> None:
    made = growkit.convert(
        place / "source",
        tmp_path / "out",
        "shared-diff",
        rank=rank,
        verify=growkit.Settings(**QUICK, max_kl=limit),
    )
    name = "out.rejected" if limit == 1e-9 else "out"
    assert made.verification
    assert made.output == made.verification.target == str(tmp_path / name)
    manifest = json.loads((tmp_path / name / "growkit.json").read_text())
    assert manifest["verification"]["target"] == name
    assert manifest["warnings"] == made.warnings
    growkit.save_report(made, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f"<p>{name}, made from" in page
    for text in (" ".join(made.warnings), page):
        assert (f"ank {rank} makes the model larger" in text) is (rank == 4)


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, 10**400, "0.1", True, [1], None])
def test_limits_that_are_none(limit: Any) -> None:
    content: dict[str, Any] = {"source": "a", "steps": [{"grow": "hypercloning"}], "output": "b"}
    with pytest.raises(InputError, match="max_kl"):
        parse_recipe(content | {"verify": {"max_kl": limit}}, "r")
    assert parse_recipe(content | {"verify": {"max_kl": 1}}, "r").verify
    if isinstance(limit, int | float) and limit is not True:
        with pytest.raises(InputError, match="max_kl"):
            growkit.Settings(max_kl=limit)


def test_a_limit_needs_a_proof(place: Path, tmp_path: Path) -> None:
    out, recipe = tmp_path / "out", tmp_path / "recipe.yaml"
    grow = ["grow", place / "source", out, "--hidden", "x2", "--max-kl", "1"]
    done = command(*grow, "--no-verify")
    assert done.exit_code == 2
    assert "switched off" in done.stderr
    assert not out.exists()
    content = {"source": str(place / "source"), "steps": [{"grow": "hypercloning"}]}
    recipe.write_text(json.dumps({**content, "output": str(out), "verify": False}))
    assert command("run", recipe, "--max-kl", "1").exit_code == 2
    assert command(*grow, "--dry-run").exit_code == 0
