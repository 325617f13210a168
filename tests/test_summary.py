"""What stands under a verdict, what to do after a failure, and the limit for what may be lost."""

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
from growkit.recipe.files import load_recipe, parse_recipe
from growkit.report.proof import glance, headroom, proof_view
from growkit.results.advice import name_result, next_step
from growkit.results.proof import Finding, VerifyResult
from tests.conftest import save_model
from tests.test_report import finding, full, measured, mode

QUICK: dict[str, Any] = {"prompts": 1, "length": 12}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source, what it grew into, and what it was converted into with a loss."""
    folder = tmp_path_factory.mktemp("pair")
    source = save_model(folder / "source", "diffllama", head_dim=8)
    growkit.grow(source, folder / "exact", hidden="x2", verify=False)
    growkit.convert(source, folder / "lossy", "shared-diff", rank=1, verify=False)
    return folder


def words(result: Any) -> dict[str, str]:
    return {name: str(line) for name, line in glance(result).items()}


def test_what_people_look_for(place: Path) -> None:
    begun = datetime.now(timezone.utc).replace(microsecond=0)
    result = growkit.verify(place / "source", place / "exact", **QUICK)
    found = words(result)
    before, after = result["source_parameters"], result["parameters"]
    sizes = f"{size(result['source_bytes'])} → {size(result['bytes'])} in float32"
    assert found["parameters"] == f"{before:,} → {after:,} (× {after / before:.3g}; {sizes})"
    tensors = load_file(place / "source" / "model.safetensors")
    assert before == sum(each.numel() for each in tensors.values())
    assert result["source_bytes"] == sum(each.nbytes for each in tensors.values())
    assert found["tensors"] == f"{len(tensors)} of {len(tensors)} recovered (bit for bit)"
    count = len(result["modes"])
    assert found["inference modes"].startswith(f"all {count} kept (prefill, ")
    assert found["largest difference"].count("× below the limit") == 2
    assert begun <= datetime.fromisoformat(result["created"]) <= datetime.now(timezone.utc)
    assert 0 < result["seconds"] < 60
    assert "KL" not in found
    assert len(result["tokens_by_position"]) == len(result["kl_by_position"]) == 12
    assert result["rounding"]["dtype"] == result["native"]["dtype"]
    assert 0 < (result["rounding"]["relative"] or 0) < (result["native"]["tolerance"] or 0)
    assert result["loss_source_native"] == pytest.approx(result["loss_source"], rel=1e-4)
    assert result["loss_source_native"] != result["loss_source"]


def test_what_was_lost_is_said(place: Path) -> None:
    result = growkit.verify(place / "source", place / "lossy", **QUICK)
    assert result["lost"]
    found = words(result)
    assert next(iter(found)) == "KL"
    recovered, every = result["tensors_recovered"], result["source_tensors"]
    assert recovered is not None
    assert every is not None
    assert 0 < recovered < every
    assert "largest difference" not in found
    count = len(result["modes"])
    assert {mode["kept"] for mode in result["modes"]} == {None}
    assert found["inference modes"].startswith(f"{count} without a limit (")
    assert result["reason"].startswith(f"changed as requested ({result['lost']}): the loss goes")
    assert "of the likeliest next tokens are the same" in result["reason"]
    assert growkit.verify(place / "source", place / "exact", **QUICK)["lost"] is None


@pytest.mark.parametrize(
    ("measured", "limit", "said"),
    [
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
    ],
)
def test_headroom_in_words(measured: float | None, limit: float | None, said: str | None) -> None:
    kept = measured is not None and limit is not None and measured <= limit
    assert headroom(finding("native", kept, measured=measured, limit=limit)) == said


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (1000, 1000, "1,000 → 1,000 (1 kB in bfloat16)"),
        (771_456, 771_584, "771,456 → 771,584 (+128; 1 kB in bfloat16)"),
        (771_584, 771_456, "771,584 → 771,456 (-128; 1 kB in bfloat16)"),
        (1000, 4000, "1,000 → 4,000 (× 4; 1 kB in bfloat16)"),
    ],
)
def test_a_factor_that_rounds_to_one_is_a_difference(before: int, after: int, said: str) -> None:
    sizes = {"source_bytes": 1000, "bytes": 1000}
    assert words(full(source_parameters=before, parameters=after, **sizes))["parameters"] == said


def test_how_many_ways_held() -> None:
    kept, free, failed = mode("prefill", True), mode("prefill", None), mode("generate", False)
    untried = mode("cached decoding", None, note="not tried: too short")
    said = [
        ([kept], "all 1 kept (prefill)"),
        ([kept, untried], "1 kept (prefill; not tried: cached decoding (too short))"),
        ([kept, failed], "1 kept, 1 not the same (not the same with generate)"),
        ([free, untried], "1 without a limit (prefill; not tried: cached decoding (too short))"),
        ([free, failed], "1 without a limit, 1 not the same (not the same with generate)"),
    ]
    for modes, expected in said:
        assert words(full(modes=modes))["inference modes"] == expected


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 bytes"), (999, "999 bytes"), (1540, "1.54 kB"), (999_950, "1 MB"), (6.43e9, "6.43 GB")],
)
def test_sizes_in_units_that_fit(count: float, said: str) -> None:
    assert size(count) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(8.125, "8.1 s"), (125.2, "2 min 5 s"), (7300.0, "2 h 1 min")]
)
def test_times_in_units_that_fit(seconds: float, said: str) -> None:
    assert duration(seconds) == said


GOOD: dict[str, Any] = {
    "changed_values": [],
    "first_lost_tensor": None,
    "weights_recovered": True,
    "fault": None,
    "strict_float64": measured(relative=1e-15, tolerance=1e-12),
    "modes": [],
}
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
    (
        "training",
        {"training": {"relative": 0.0, "tolerance": 0.1, "control_caught": True}},
        "the state of the source's optimizer",
    ),
]


def advice(name: str, changes: dict[str, Any]) -> str:
    result = VerifyResult(**full(**(GOOD | changes)))
    result.findings = [Finding(**finding(name))]
    return next_step(name_result(result, "source", "target")) or ""


@pytest.mark.parametrize(("name", "changes", "said"), NEXT)
def test_every_failure_says_what_to_do_next(name: str, changes: dict[str, Any], said: str) -> None:
    assert said in advice(name, changes)
    others = [advice(other, more) for other, more, _ in NEXT if (other, more) != (name, changes)]
    assert not any(said in other for other in others)
    kept = VerifyResult(**full(findings=[finding(name, kept=True)]))
    assert next_step(kept) is None


def test_the_terminal_begins_with_the_verdict(place: Path, tmp_path: Path) -> None:
    weights = load_file(place / "exact" / "model.safetensors")
    spoiled = tmp_path / "spoiled"
    spoiled.mkdir()
    for file in (place / "exact").iterdir():
        if file.is_file():
            (spoiled / file.name).write_bytes(file.read_bytes())
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    save_file(weights, spoiled / "model.safetensors", {"format": "pt"})
    quick = ["--prompts", "1", "--length", "12"]
    done = CliRunner().invoke(app, ["verify", str(place / "source"), str(spoiled), *quick])
    assert done.exit_code == 1
    places = [done.stdout.index(each) for each in ("not preserved", "at fault:", "next:", "loss")]
    assert places == sorted(places)
    assert done.stdout.index("source's rounding") > places[-1]
    for prompts, few in (("1", True), ("10", False)):  # of 11 predictions each
        amount = ["--prompts", prompts, "--length", "12"]
        done = CliRunner().invoke(
            app,
            ["verify", str(place / "source"), str(place / "exact"), *amount],
            env={"COLUMNS": "80"},
        )
        assert done.exit_code == 0
        assert done.stdout.startswith("preserved: ")
        assert ("next: prove it on more" in done.stdout) == few
        assert ("next:" in done.stdout) == few
        assert f"{11 * int(prompts)} predictions" in " ".join(done.stdout.split())


# What may be lost.


def kl_of(place: Path) -> float:
    found = growkit.verify(place / "source", place / "lossy", **QUICK)
    kl = found["strict_float64"]["kl_nats_per_token"]
    assert found["kept"]
    assert kl
    return kl


def test_a_limit_turns_a_loss_into_an_exit_code(place: Path) -> None:
    kl = kl_of(place)
    for limit, kept in ((kl * 0.99, False), (kl * 1.01, True)):
        result = growkit.verify(place / "source", place / "lossy", max_kl=limit, **QUICK)
        assert result["kept"] is kept
        assert result["max_kl"] == limit
        assert ("not as asked" in result["reason"]) is not kept
    exact = growkit.verify(place / "source", place / "exact", max_kl=1e-6, **QUICK)
    assert exact["kept"]
    assert "KL" in words(exact)


def test_a_rejected_output_has_its_own_name(place: Path, tmp_path: Path) -> None:
    for limit, name in ((1e-9, "out.rejected"), (1e3, "out")):
        made = growkit.convert(
            place / "source",
            tmp_path / "out",
            "shared-diff",
            rank=1,
            verify=growkit.Settings(**QUICK, max_kl=limit),
        )
        assert made.verification
        assert made.output == made.verification.target == str(tmp_path / name)
        manifest = json.loads((tmp_path / name / "growkit.json").read_text())
        assert manifest["verification"]["target"] == name
        growkit.save_report(made, tmp_path / "report.html")
        assert f"<p>{name}, made from" in (tmp_path / "report.html").read_text()


def test_warnings_are_kept_beside_the_weights(place: Path, tmp_path: Path) -> None:
    for rank, larger in ((4, True), (1, False)):
        out = tmp_path / str(rank)
        made = growkit.convert(
            place / "source", out, "shared-diff", rank=rank, verify=growkit.Settings(**QUICK)
        )
        assert ("makes the model larger" in " ".join(made.warnings)) == larger
        assert json.loads((out / "growkit.json").read_text())["warnings"] == made.warnings
        growkit.save_report(
            growkit.verify(place / "source", out, **QUICK), tmp_path / f"{rank}.html"
        )
        page = (tmp_path / f"{rank}.html").read_text()
        assert (f"! Rank {rank} makes the model larger" in page) == larger


def test_a_key_that_was_changed_is_told_with_its_values(place: Path, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    shutil.copytree(place / "exact", spoiled)
    config = json.loads((spoiled / "config.json").read_text())
    value = config["rms_norm_eps"]
    (spoiled / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.25}))
    name = "rms_norm_eps in config.json"
    found = growkit.verify(place / "source", spoiled, **QUICK)
    assert found["changed"] == [name]
    assert found["changed_values"] == [
        {"name": name, "expected": json.dumps(value), "found": "0.25"}
    ]
    assert f"0.25 in place of {value}" in found["reason"]
    assert (next_step(found) or "").startswith(f"set {name} back to {value} (it is 0.25)")
    assert proof_view(found).advice["At fault"].startswith(f"{name}; ")
    assert found["fault"]
    assert found["fault"]["tensor"] is None  # every weight gives the source's back


def test_what_does_not_differ_is_identical(place: Path) -> None:
    same = growkit.verify(place / "source", place / "source", **QUICK)
    assert "the logits are identical in strict float64" in same["reason"]
    assert "0.0e" not in same["reason"]
    grown = growkit.verify(place / "source", place / "exact", **QUICK)
    assert "the logits differ by at most " in grown["reason"]


def test_by_every_way(place: Path, tmp_path: Path) -> None:
    source, kl = str(place / "source"), kl_of(place)
    recipe = tmp_path / "recipe.yaml"
    proof = {"prompts": 1, "length": 12}

    def code(*arguments: str) -> int:
        return CliRunner().invoke(app, list(arguments)).exit_code

    quick = ["--prompts", "1", "--length", "12"]
    for limit, expected in ((kl / 2, 1), (kl * 2, 0)):
        option = ["--max-kl", str(limit)]
        assert code("verify", source, str(place / "lossy"), *quick, *option) == expected
        out = str(tmp_path / f"converted-{expected}")
        convert = ["convert", source, out, "--to", "shared-diff", "--rank", "1", *quick]
        assert code(*convert, *option) == expected
        assert Path(out + ".rejected").exists() is bool(expected)
        out = str(tmp_path / f"run-{expected}")
        content = {
            "source": source,
            "steps": [{"convert": "shared-diff", "rank": 1}],
            "output": out,
        }
        recipe.write_text(json.dumps(content | {"verify": proof | {"max_kl": limit}}))
        assert code("run", str(recipe)) == expected
        recipe.write_text(json.dumps(content | {"output": f"{out}-2", "verify": proof}))
        assert code("run", str(recipe), *option) == expected
        made = Path(f"{out}-2.rejected" if expected else f"{out}-2") / "growkit.json"
        assert load_recipe(made).verify == growkit.Settings(**proof, max_kl=limit)


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, 10**400])
def test_limits_that_are_none(limit: float) -> None:
    with pytest.raises(InputError, match="max_kl"):
        growkit.Settings(max_kl=limit)
    growkit.Settings(max_kl=1)


@pytest.mark.parametrize("limit", ["0.1", True, [1], None])
def test_limits_of_another_kind(limit: Any) -> None:
    content = {"source": "a", "steps": [{"grow": "hypercloning"}], "output": "b"}
    with pytest.raises(InputError, match=r"max_kl in verify in r is .*; a number such as 0\.01"):
        parse_recipe(content | {"verify": {"max_kl": limit}}, "r")
    assert parse_recipe(content | {"verify": {"max_kl": 1}}, "r").verify


def test_a_limit_needs_a_proof(place: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    arguments = ["grow", str(place / "source"), out, "--hidden", "x2", "--max-kl", "1"]
    done = CliRunner().invoke(app, [*arguments, "--no-verify"])
    assert done.exit_code == 2
    assert "switched off" in done.stderr
    assert not Path(out).exists()
    recipe = tmp_path / "recipe.yaml"
    content = {"source": str(place / "source"), "steps": [{"grow": "hypercloning"}], "output": out}
    recipe.write_text(json.dumps(content | {"verify": False}))
    assert CliRunner().invoke(app, ["run", str(recipe), "--max-kl", "1"]).exit_code == 2
    assert CliRunner().invoke(app, [*arguments, "--dry-run"]).exit_code == 0
