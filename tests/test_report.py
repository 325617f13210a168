"""The page of a proof: a file by itself, safe from what folders contain, without empty frames."""

import json
import math
import re
import shutil
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from safetensors.torch import load_file

import growkit
from growkit.planning.recipe import load_recipe
from growkit.report.proof_page import glance, proof_view
from growkit.report.saving import page
from growkit.report.terminal import training_hint
from growkit.report.view import next_step
from tests.commands import cli
from tests.files import edit_weights, listed
from tests.models import save_model

HOSTILE = "<script>alert('x')</script>&\"\x00\ud800\u202e\u2066\x9b"
VOID = {"wbr", "meta", "br", "hr", "img", "link", "input"}
OUTSIDE = re.compile(
    r"""(?:src|href|action|data|poster|srcset)\s*=\s*["']?(?!\#)|url\(|@import|<(?:script|iframe|link|img|base|object|embed)\b""",
    re.IGNORECASE,
)
EXAMPLE = Path(__file__).with_name("proof.json")


def mode(name: str, kept: bool | None, **changes: Any) -> dict[str, Any]:
    """An inference mode; one without numbers unless they are given."""
    numbers = dict.fromkeys(("relative", "tolerance", "native", "native_tolerance"))
    return {"name": name, "kept": kept, "note": "", "tried": True, **numbers} | changes


def finding(name: str, kept: bool | None = False, **changes: Any) -> dict[str, Any]:
    """One comparison, which failed."""
    found = {"name": name, "kept": kept, "sentence": f"{name} is off", "place": None}
    return {**found, "measured": None, "limit": None, "advice": None, **changes}


def full(**changes: Any) -> dict[str, Any]:
    """A result with everything in it, rejected because of a factor in one matrix.

    Changes go where their key is, and findings to the weights.
    """
    result: dict[str, Any] = json.loads(EXAMPLE.read_text("utf-8"))["result"]
    sections = result["sections"]
    for key, value in changes.items():
        where = [section for section in sections.values() if section and key in section]
        (where[0] if where else sections if key in sections else result)[key] = value
    return result


def value_of(result: dict[str, Any], key: str) -> Any:
    """A value of a result or one of its sections."""
    sections = result["sections"]
    every = [*filter(None, sections.values()), sections, result]
    return next(held[key] for held in every if key in held)


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest, as far as the page reads it."""
    return {**json.loads(EXAMPLE.read_text("utf-8"))["manifest"], **changes}


def paged(made: dict[str, Any] | None = None, **changes: Any) -> str:
    """The page of a result with changes."""
    return page(proof_view(full(**changes), made))


class Tags(HTMLParser):
    """All tags of a page; fails where they are not balanced."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def headings(page: str) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page)


def charts(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_is_whole() -> None:
    shown = paged(manifest())
    tags = Tags(shown)
    names = [tag for tag, _ in tags.tags]
    assert ("html", {"lang": "en"}) in tags.tags
    assert names.count("h1") == names.count("main") == 1
    assert "<title>Not preserved: small → large – growkit</title>" in shown
    assert shown.index("Not preserved</h1>") < shown.index("<h2>")
    assert not OUTSIDE.search(shown.replace("https://arxiv.org", ""))
    shown.encode()
    style = shown[shown.index("<style>") : shown.index("</style>")]
    defined = set(re.findall(r"(--[\w-]+):", style))
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) == defined
    assert style.count("{") == style.count("}")


def test_the_controls_see_what_a_page_would_load_and_tags_that_are_not_closed() -> None:
    for load in (
        '<img src="https://example.org/x.png">',
        '<link rel="stylesheet" href="x.css">',
        "<style>@import 'x.css'</style>",
        "<style>a { background: url(x.png) }</style>",
        "<script>1</script>",
    ):
        assert OUTSIDE.search(paged() + load)
    with pytest.raises((AssertionError, IndexError)):
        Tags(paged().replace("</section>", "", 1))


SECTIONS: dict[str, str] = listed("report", "sections")


def test_a_section_is_there_exactly_with_its_data() -> None:
    everything = list(SECTIONS)
    assert headings(paged(manifest())) == everything
    assert headings(paged()) == everything[:-1]
    for title, keys in SECTIONS.items():
        empty = {
            key: [] if isinstance(value_of(full(), key), list) else None for key in keys.split()
        }
        left = [each for each in everything if each != title or not keys]
        without = paged(manifest(), **empty)
        Tags(without)
        assert headings(without) == left
        for key in keys.split():  # any part of its data is enough
            half = {name: value for name, value in empty.items() if name != key}
            assert title in headings(paged(**half))


def poisoned(value: Any, poison: Any) -> Any:
    """Every text replaced."""
    if isinstance(value, dict):
        return {key: poisoned(item, poison) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, poison) for item in value]
    return poison if isinstance(value, str) else value


def test_text_from_files_is_escaped() -> None:
    hostile = poisoned(full(changed=["a"]), HOSTILE)
    made = poisoned(manifest(warnings=["a"], loads_with="b"), HOSTILE)
    shown = page(proof_view(hostile, made | {"source_files": {HOSTILE: HOSTILE}}))
    tags = Tags(shown)
    assert "alert('x')" in tags.text  # it is shown
    assert not OUTSIDE.search(shown)
    assert len(tags.tags) >= 100
    assert {tag for tag, _ in tags.tags} <= {tag for tag, _ in Tags(paged(manifest())).tags}
    assert charts(shown)
    assert all(char.isprintable() or char in "\n\t" for char in shown)


def test_the_control_sees_what_is_not_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growkit.report.drawing.escape_markup", str)
    assert OUTSIDE.search(page(proof_view(poisoned(full(), HOSTILE.replace("\x00", "")))))


@pytest.mark.parametrize("form", [[], {}, "text", 1, None, [{"a": []}]])
def test_a_manifest_of_any_form_has_a_page(form: Any) -> None:
    keys = ("recipe", "warnings", "papers", "source_files", "loads_with", "not_kept", "created")
    for made in [manifest() | {key: form} for key in keys] + [{"recipe": {"steps": form}}]:
        Tags(paged(made))


@pytest.mark.parametrize(
    "number", [None, math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.0, -1.0, 0.25]
)
def test_any_number_is_shown(number: float | None) -> None:
    """Every figure of the result replaced by one that is none, or at an end of the floats."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: replaced(item) for name, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return number if isinstance(value, float) else value

    shown = page(proof_view(replaced(full()), manifest()))
    text = Tags(shown).text
    assert not re.search(r"\b(nan|inf)\b", text, re.IGNORECASE)
    for element in (each for chart in charts(shown) for each in chart.iter()):
        assert not re.search("nan|inf", " ".join(element.attrib.values()))
    if number is None or not math.isfinite(number):
        assert "none" in text


KEPT: dict[str, Any] = {
    "kept": True,
    "verdict": "preserved",
    "reason": "preserved: all",
    "findings": [finding("weights", True)],
    **dict.fromkeys(("first_lost_tensor", "fault", "first_difference")),
}


@pytest.mark.parametrize(("kept", "changes", "kind"), listed("report", "verdicts"))
def test_the_verdict_in_words_and_color(kept: bool, changes: dict[str, Any], kind: str) -> None:
    changes = (KEPT if kept else {}) | changes
    said = full(**changes)["verdict"]
    shown, verdict = paged(**(changes | {"reason": f"{said}: as measured"})), said.capitalize()
    assert f"{verdict}</h1>" in shown
    assert f"<title>{verdict}: " in shown
    assert re.findall(r'class="verdict (\w+)"', shown) == [kind]
    assert '<p class="reason">As measured.' in shown  # the heading says the verdict


def test_on_a_failure_where_why_and_what_to_do_come_first() -> None:
    shown = paged(manifest())
    marks = ("</h1>", 'class="reason"', ">At fault<", ">Next<", 'class="glance"', "<h2>")
    places = [shown.index(each) for each in marks]
    assert places == sorted(places)
    nowhere = {"fault": None, "findings": [finding("native")]}
    assert ">At fault<" not in paged(**nowhere)
    assert ">Next<" not in paged(**KEPT)


# Tables.


def row(shown: str, name: str) -> list[str]:
    """The cells of a row of a table."""
    (found,) = re.findall(rf'<th scope="row">{re.escape(name)}</th>(.*?)</tr>', shown)
    return re.findall(r">([^<>]*)</td>", found)


def test_tables_hold_the_figures() -> None:
    shown = paged()
    assert ">source&#x27;s rounding</th>" in shown
    assert row(shown, "largest / scale") == ["0.06", "0.06", "0.055"]
    assert row(shown, "in strict float64") == ["1.250000", "1.500000", "+0.25"]
    assert row(shown, "in bfloat16") == ["1.260000", "1.510000", "+0.25"]
    gone = paged(loss_source_native=None, loss_target_native=None)
    assert "1.510000" not in gone
    modes = [mode("prefill", None, relative=0.5), mode("generate", True)]
    shown = paged(modes=modes)
    assert row(shown, "prefill") == ["no limit", "0.5", "no limit", "–", "–"]
    assert row(shown, "generate") == ["✓ kept", "–", "–", "–", "–"]


# Charts.


def test_charts_describe_what_they_show() -> None:
    drawn = charts(paged(manifest()))
    assert len(drawn) == 6
    for chart in drawn:
        assert (chart.get("role"), chart[0].tag, chart[1].tag) == ("img", "title", "desc")
        assert chart[0].text
        assert re.search(r"\d", chart[1].text or "")
    layers = drawn[0][1].text or ""
    for said in ("smallest 0 at embed_tokens", "largest 0.02 at 1", "none at norm, lm_head"):
        assert said in layers
    assert "limit 1e-12" in layers


QUICK: dict[str, Any] = {"prompts": 1, "length": 12}
OPTIONS = ["--prompts", "1", "--length", "12"]


@pytest.fixture(scope="module")
def exact(place: Path) -> growkit.VerifyResult:
    return growkit.verify(place / "source", place / "exact", **QUICK)


@pytest.fixture(scope="module")
def lossy(place: Path) -> growkit.VerifyResult:
    return growkit.verify(place / "source", place / "lossy", **QUICK)


def words(result: Any) -> dict[str, str]:
    return {name: str(line) for name, line in glance(result).items()}


def test_findings_at_a_glance(place: Path, exact: growkit.VerifyResult) -> None:
    found = words(exact)
    weights, logits = exact.sections.weights, exact.sections.logits
    assert f"{weights.source_parameters:,} → {weights.parameters:,}" in found["parameters"]
    tensors = load_file(place / "source" / "model.safetensors")
    assert weights.source_parameters == sum(each.numel() for each in tensors.values())
    assert weights.source_bytes == sum(each.nbytes for each in tensors.values())
    assert found["tensors"].startswith(f"{len(tensors)} of {len(tensors)} recovered")
    assert datetime.fromisoformat(exact.created).tzinfo == timezone.utc
    assert len(logits.tokens_by_position) == len(logits.kl_by_position) == 12
    assert 0 < (logits.rounding.relative or 0) < (logits.native.tolerance or 0)
    assert logits.loss_source_native == pytest.approx(logits.loss_source, rel=1e-4)
    assert logits.loss_source_native != logits.loss_source
    same = growkit.verify(place / "source", place / "source", **QUICK)
    assert "identical in strict float64" in same.reason


def test_what_was_lost_comes_first(
    exact: growkit.VerifyResult, lossy: growkit.VerifyResult
) -> None:
    found, weights = words(lossy), lossy.sections.weights
    assert next(iter(found)) == "KL"
    assert "KL" not in words(exact)
    assert 0 < (weights.tensors_recovered or 0) < (weights.source_tensors or 0)
    assert "largest difference" not in found
    assert lossy.sections.modes.modes[0].kept is None
    assert lossy.reason.startswith(f"changed as requested: {lossy.lost}")
    assert (exact.lost, bool(lossy.lost)) == (None, True)


def test_the_terminal_begins_with_the_verdict(place: Path, tmp_path: Path) -> None:
    spoiled = shutil.copytree(place / "exact", tmp_path / "spoiled")
    with edit_weights(spoiled) as weights:
        weights["model.layers.1.mlp.up_proj.weight"] *= 1.01
    done = cli("verify", place / "source", spoiled, *OPTIONS)
    assert done.exit_code == 1
    marks = ("not preserved", "at fault:", "next:", "loss", "source's rounding")
    places = [done.stdout.index(each) for each in marks]
    assert places == sorted(places)
    for prompts in (1, 10):  # of 11 predictions each
        amount = ["--prompts", prompts, "--length", "12"]
        done = cli("verify", place / "source", place / "exact", *amount)
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
    assert found.sections.files.changed == [name]
    assert found.sections.files.changed_values == [
        {"name": name, "expected": json.dumps(value), "found": "0.25"}
    ]
    assert f"0.25 in place of {value}" in found.reason
    assert (next_step(found) or "").startswith(f"set {name} back to {value} (it is 0.25)")
    assert proof_view(found).advice["At fault"].startswith(f"{name}; ")
    assert found.fault
    assert found.fault.tensor is None  # every weight gives the source's back


# The limit of a loss.


def test_a_limit_turns_a_loss_into_an_exit_code(
    place: Path, tmp_path: Path, lossy: growkit.VerifyResult
) -> None:
    """In Python, in a command, and of a recipe."""
    kl = lossy.sections.logits.strict_float64.kl_nats_per_token
    source, recipe = place / "source", tmp_path / "r"
    assert lossy.kept
    assert kl
    for limit, kept in ((kl * 0.99, False), (kl * 1.01, True)):
        option, code = ["--max-kl", limit], 0 if kept else 1
        result = growkit.verify(source, place / "lossy", max_kl=limit, **QUICK)
        assert (result.kept, result.sections.logits.max_kl) == (kept, limit)
        assert ("not as asked" in result.reason) is not kept
        steps = {"source": str(source), "steps": [{"convert": "shared-diff", "rank": 1}]}
        output = tmp_path / f"run-{code}"
        recipe.write_text(json.dumps({**steps, "output": str(output), "verify": QUICK}))
        assert cli("run", recipe, *option).exit_code == code
        made = (output if kept else Path(f"{output}.rejected")) / "growkit.json"
        assert load_recipe(made).verify == growkit.Settings(**QUICK, max_kl=limit)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("limit", "rank"), [(1e-9, 1), (None, 4)])
def test_a_report_names_its_output_and_warns(
    place: Path, tmp_path: Path, limit: float | None, rank: int
) -> None:
    asked: Any = {"rank": rank, "verify": growkit.Settings(**QUICK, max_kl=limit)}
    made = growkit.convert(place / "source", tmp_path / "out", "shared-diff", **asked)
    name = "out.rejected" if limit == 1e-9 else "out"
    assert made.verification
    assert made.output == made.verification.target == str(tmp_path / name)
    manifest = json.loads((tmp_path / name / "growkit.json").read_text())
    assert manifest["verification"]["target"] == name
    assert manifest["warnings"] == made.warnings
    growkit.save_report(made, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert f"<p>{name}, made from" in page
    assert f"{made.verification.sections.logits.strict_float64.relative:.3g}" in Tags(page).text
    for text in (" ".join(made.warnings), page):
        assert (f"ank {rank} makes the model larger" in text) is (rank == 4)


def test_only_who_trains_otherwise_than_before_gets_a_hint(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    assert training_hint(growkit.convert(source, tmp_path / "a", "litgpt", verify=False)) is None
    assert training_hint(growkit.grow(source, tmp_path / "b", hidden="x2", verify=False))
    wider = growkit.convert(source, tmp_path / "c", "hyper-connections", verify=False)
    assert training_hint(wider)
