"""The report of a proof: a page by itself, safe from what files hold, without empty frames."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import growkit
from growkit.report import drawing
from growkit.report.curves import Interval, intervals
from growkit.report.drawing import LETTER, WIDTH, Bar
from growkit.report.header import to_do
from growkit.report.markup import flowing
from growkit.report.page import binned, report_page
from growkit.results.advice import name_result
from growkit.results.proof import Finding, VerifyResult
from growkit.results.sentences import too_much
from tests.conftest import save_model

HOSTILE = "<script>alert('x')</script>&\"\x00\ud800"
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"wbr", "meta", "br", "hr", "img", "link", "input"}
OUTSIDE = re.compile(
    r"""(?:src|href|action|data|poster|srcset)\s*=\s*["']?(?!\#)|url\(|@import|<(?:script|iframe|link|img|base|object|embed)\b""",
    re.IGNORECASE,
)


def measured(**changes: Any) -> dict[str, Any]:
    """A comparison in one dtype."""
    found = {
        "dtype": "bfloat16",
        "device": "cpu",
        "max_abs_logit_diff": 0.5,
        "mean_abs_logit_diff": 0.05,
        "logit_scale": 8.5,
        "relative": 0.06,
        "tolerance": 1.7,
        "kl_nats_per_token": 5e-4,
        "top1_agreement": 0.99,
    }
    return found | changes


def finding(name: str, kept: bool | None = False, **changes: Any) -> dict[str, Any]:
    """One comparison, which failed."""
    found = {"name": name, "kept": kept, "sentence": f"{name} is off", "place": None}
    return {**found, "measured": None, "limit": None, "advice": None, **changes}


def full(**changes: Any) -> dict[str, Any]:
    """A result with everything in it."""
    modules = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    errors = [0.0, 1e-16, 2e-2, None, math.nan]
    found = {
        "promise": "exact",
        "kept": False,
        "verdict": "not preserved",
        "reason": "not preserved: the logits differ by 3.1e-02 of their scale",
        "findings": [
            finding(
                "weights",
                sentence="the logits differ by 3.1e-02 of their scale",
                place="layer 1, mlp, model.layers.1.mlp.up_proj.weight",
                advice="make the target again",
            )
        ],
        "weights_recovered": False,
        "first_lost_tensor": "model.layers.1.mlp.up_proj.weight",
        "strict_float64": measured(dtype="float64", tolerance=1e-12, tolerance_why="sum of 64"),
        "native": measured(),
        "rounding": measured(relative=0.055, tolerance=None, max_abs_logit_diff=0.45),
        "max_kl": None,
        "lost": None,
        "loss_source": 1.25,
        "loss_target": 1.5,
        "loss_source_native": 1.26,
        "loss_target_native": 1.51,
        "first_differing_layer": 1,
        "first_difference": "model.layers.1",
        "negative_control_caught": True,
        "negative_control": "model.layers.0.mlp.up_proj.weight × 1.001",
        "trainability": {
            "trainable": True,
            "copied": 48,
            "identical_gradients": 0,
            "without_gradient": 0,
            "first_identical": None,
        },
        "tokens": 240,
        "predictions": 220,
        "text": "/texts/held_out.txt",
        "text_sha256": "ab" * 32,
        "seed": 7,
        "source": "/models/small",
        "target": "/models/large",
        "versions": {"python": "3.12", "torch": "2.9"},
        "by_layer": [
            {"module": module, "relative": error}
            for module, error in zip(modules, errors, strict=True)
        ],
        "modes": [
            {"name": "prefill", "relative": 1e-15, "tolerance": 1e-12, "kept": True, "note": ""},
            {"name": "generate", "relative": None, "tolerance": None, "kept": False, "note": "no"},
        ],
        "fault": {
            "layer": 1,
            "component": "mlp",
            "tensor": "model.layers.1.mlp.up_proj.weight",
            "cause": "a factor is missing",
            "factor": 1.01,
        },
        "kl_by_position": [1e-4, 2e-4, math.inf, 3e-4],
        "tokens_by_position": [6, 6, 6, 6],
        "source_parameters": 1000,
        "parameters": 4000,
        "source_bytes": 2000,
        "bytes": 8000,
        "tensors_recovered": None,
        "source_tensors": None,
        "created": "2026-11-22T11:45:18+00:00",
        "seconds": 8.125,
        "logit_sample": [[1.0, 1.1], [-2.0, -2.0], [3.0, math.nan]],
        "symmetry": [
            {
                "tensor": f"model.layers.{layer}.mlp.up_proj.weight",
                "copies": 2,
                "relative_distance": 0.4 + layer / 10,
                "effective_rank_gain": None,
            }
            for layer in range(2)
        ],
        "spectra": [
            {
                "module": "model.layers.0.self_attn.q_proj",
                "singular_values": [3.0, 1.0, 0.1, 0.0],
                "rank": 2,
                "residual": 0.03,
                "unit": "of the norm",
            }
        ],
        "kl_by_rank": [
            {"rank": 1, "kl_nats_per_token": 0.1},
            {"rank": 2, "kl_nats_per_token": 0.01},
        ],
    }
    return found | changes


def manifest(**changes: Any) -> dict[str, Any]:
    """A manifest, as far as the report reads it."""
    found = {
        "growkit": "1.0",
        "created": "2026-11-21T13:00:00+00:00",
        "recipe": {"source": "small", "steps": [{"grow": "hypercloning", "hidden": "x2"}]},
        "papers": ["hypercloning: https://arxiv.org/abs/2409.12903"],
        "source_files": {"config.json": "cd" * 32},
        "source_parameters": 1000,
        "parameters": 4000,
    }
    return found | changes


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
    page = report_page(full(), manifest())
    tags = Tags(page)
    names = [tag for tag, _ in tags.tags]
    assert ("html", {"lang": "en"}) in tags.tags
    assert names.count("h1") == names.count("main") == 1
    assert "Not preserved: small → large" in page
    assert page.index("Not preserved</h1>") < page.index("<h2>")
    assert not OUTSIDE.search(page.replace(manifest()["papers"][0], ""))
    page.encode()


@pytest.mark.parametrize(
    "load",
    [
        '<img src="https://example.org/x.png">',
        '<link rel="stylesheet" href="x.css">',
        "<style>@import 'x.css'</style>",
        "<style>a { background: url(x.png) }</style>",
        "<script>1</script>",
    ],
)
def test_the_control_sees_what_a_page_would_load(load: str) -> None:
    assert OUTSIDE.search(report_page(full(), None) + load)


def test_the_control_sees_tags_that_are_not_closed() -> None:
    with pytest.raises((AssertionError, IndexError)):
        Tags(report_page(full(), None).replace("</section>", "", 1))


SECTIONS: dict[str, tuple[str, ...]] = {
    "Where and why it differs": (
        "fault",
        "first_difference",
        "first_differing_layer",
        "first_lost_tensor",
    ),
    "The numbers": ("strict_float64", "native"),
    "Loss before and after": (
        "loss_source",
        "loss_target",
        "loss_source_native",
        "loss_target_native",
    ),
    "Inference modes": ("modes",),
    "Error by layer": ("by_layer",),
    "Logits, source against target": ("logit_sample",),
    "KL by position": ("kl_by_position",),
    "Can the new capacity train?": ("trainability", "symmetry"),
    "What the low rank holds": ("spectra", "kl_by_rank"),
}


def test_every_section_is_there_with_its_data() -> None:
    assert headings(report_page(full(), manifest())) == [
        *SECTIONS,
        "How it was measured",
        "How it was made",
    ]


@pytest.mark.parametrize("title", SECTIONS)
@pytest.mark.parametrize("way", ["null", "empty", "absent"])
def test_a_section_without_data_is_left_out(title: str, way: str) -> None:
    result = full()
    for key in SECTIONS[title]:
        if way == "absent":
            del result[key]
        else:
            result[key] = [] if way == "empty" and isinstance(result[key], list) else None
    page = report_page(result, manifest())
    Tags(page)
    everything = headings(report_page(full(), manifest()))
    assert headings(page) == [heading for heading in everything if heading != title]


def test_half_of_a_section_is_enough() -> None:
    for title, keys in SECTIONS.items():
        for key in keys:
            others = {other: None for other in keys if other != key}
            assert title in headings(report_page(full(**others), None))
    assert "How it was made" not in headings(report_page(full(), None))


def test_nothing_at_all_is_still_a_page() -> None:
    page = report_page({}, None)
    Tags(page)
    assert "Not kept" in page


def poisoned(value: Any, poison: Any) -> Any:
    """Every text replaced."""
    if isinstance(value, dict):
        return {key: poisoned(item, poison) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, poison) for item in value]
    return poison if isinstance(value, str) else value


def test_no_exponent_breaks_over_lines() -> None:
    """In reasons, in what is lost, and in steps; a browser would break after each hyphen."""
    found = [finding("weights", True, sentence="it is 2.2e-06")]
    given = full(**KEPT | {"promise": "bounded", "lost": "up to 1.1e-05 of it", "findings": found})
    made = manifest()
    made["recipe"]["steps"][0]["tolerance"] = "3.3e-07"
    page = report_page(given, made)
    for number in ("1.1e-05", "2.2e-06", "3.3e-07"):
        assert number in page
        assert number not in page.replace(f'<span class="whole">{number}</span>', "")


@pytest.mark.parametrize("kept", [True, False])
def test_text_from_files_is_escaped(kept: bool) -> None:
    hostile = poisoned(full(kept=kept), HOSTILE)
    made = poisoned(manifest(), HOSTILE) | {"source_files": {HOSTILE: HOSTILE}}
    page = report_page(hostile, made)
    tags = Tags(page)
    assert "alert('x')" in tags.text  # it is shown
    assert not OUTSIDE.search(page)
    assert len(tags.tags) >= 100
    assert {tag for tag, _ in tags.tags} <= {tag for tag, _ in Tags(report_page(full(), made)).tags}
    assert charts(page)
    page.encode()


def test_the_control_sees_what_is_not_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growkit.report.markup.escape_markup", str)
    assert OUTSIDE.search(report_page(poisoned(full(), HOSTILE.replace("\x00", "")), None))


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.0, -1.0])
def test_any_number_is_shown(number: float | None) -> None:
    """Every figure of the result replaced by one that is none, or at an end of the floats."""

    def replaced(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: replaced(item) for name, item in value.items()}
        if isinstance(value, list):
            return [replaced(item) for item in value]
        return number if isinstance(value, float) else value

    page = report_page(replaced(full()), manifest())
    Tags(page)
    assert not re.search(r"\b(nan|inf)\b", Tags(page).text, re.IGNORECASE)
    for chart in charts(page):
        for element in chart.iter():
            assert not re.search("nan|inf", " ".join(element.attrib.values()))
    if number is None or not math.isfinite(number):
        assert "none" in Tags(page).text


SOUND: dict[str, Any] = {
    "first_lost_tensor": None,
    "weights_recovered": True,
    "fault": None,
    "first_difference": None,
    "strict_float64": measured(relative=1e-15, tolerance=1e-12),
    "modes": [],
}
"""Nothing is wrong, though it was rejected."""

KEPT: dict[str, Any] = SOUND | {
    "kept": True,
    "verdict": "preserved",
    "reason": "preserved: every weight is recovered",
    "findings": [finding("weights", True, sentence="every weight is recovered")],
}


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        (KEPT, "good"),
        ({}, "bad"),
        ({"verdict": "no verdict"}, "warn"),
        (KEPT | {"verdict": "changed as requested", "promise": "bounded"}, "warn"),
        (KEPT | {"verdict": "within the limit", "promise": "different"}, "warn"),
        ({"verdict": "not as asked", "promise": "bounded"}, "bad"),
        ({"verdict": "preserved, but it cannot train as asked"}, "bad"),
    ],
)
def test_the_verdict_in_words_and_color(changes: dict[str, Any], kind: str) -> None:
    result = full(**changes)
    page, verdict = report_page(result, None), result["verdict"].capitalize()
    assert f"{verdict}</h1>" in page
    assert f"<title>{verdict}: " in page
    assert f'class="verdict {kind}"' in page
    assert sum(f'class="verdict {other}"' in page for other in ("good", "warn", "bad")) == 1


def test_charts_say_what_they_show() -> None:
    drawn = charts(report_page(full(), manifest()))
    assert len(drawn) == 6
    for chart in drawn:
        assert chart.get("role") == "img"
        assert chart[0].tag == "title"
        assert chart[0].text
        assert chart[1].tag == "desc"
        assert re.search(r"\d", chart[1].text or "")
    layers = drawn[0][1].text or ""
    for said in ("smallest 0 at embed_tokens", "largest 0.02 at 1", "none at norm, lm_head"):
        assert said in layers
    assert "limit 1e-12" in layers


def heights(svg: str) -> list[float]:
    return [float(dot.get("cy", "nan")) for dot in ElementTree.fromstring(svg).iter("circle")]


TITLES = {"title": "t", "x_title": "x", "y_title": "y"}


def test_a_logarithmic_axis_has_equal_decades() -> None:
    svg = drawing.line([1e-15, 1e-12, 1e-9, 0.0], log=True, **TITLES)
    first, second, third, zero = heights(svg)
    assert first - second == pytest.approx(second - third, abs=0.2)
    assert zero > first
    linear = heights(drawing.line([1.0, 10.0, 100.0], **TITLES))
    assert linear[0] - linear[1] != pytest.approx(linear[1] - linear[2], abs=1)


def test_what_is_no_number_leaves_a_gap() -> None:
    root = ElementTree.fromstring(drawing.line([1.0, None, 2.0], **TITLES))
    kinds = [path.get("class") for path in root.iter("path")]
    assert kinds.count("lost") == 1
    data = next(path for path in root.iter("path") if path.get("class") == "data")
    assert (data.get("d") or "").count("M") == 2
    assert "lost" not in drawing.line([1.0, 2.0], **TITLES)


def cloud(pairs: list[list[float]], **options: Any) -> list[tuple[float, float]]:
    found = re.search(r'class="cloud" d="(.*?)"', drawing.residuals(pairs, **TITLES, **options))
    assert found
    return [(float(x), float(y)) for x, y in re.findall(r"M([\d.]+) ([\d.]+)h0", found[1])]


def test_equal_logits_lie_on_the_line_of_zero() -> None:
    """And differences that no diagonal would show are seen."""
    heights = [y for _, y in cloud([[-4.0, -4.0], [1.0, 1.0 + 1e-7], [9.0, 9.0 - 1e-7]])]
    zero, above, below = heights
    assert above < zero < below
    assert zero - above == pytest.approx(below - zero, abs=0.2)
    assert zero - above > 50
    assert len({y for _, y in cloud([[-4.0, -4.0], [1.0, 1.0], [9.0, 9.0]])}) == 1


def test_the_rounding_of_the_source_is_a_band_around_zero() -> None:
    svg = drawing.residuals([[1.0, 1.1], [2.0, 1.9]], **TITLES, band=(0.4, "alone"))
    lines = re.findall(r'class="limit" d="M\d+ ([\d.]+)H', svg)
    points = [y for _, y in cloud([[1.0, 1.1], [2.0, 1.9]], band=(0.4, "alone"))]
    upper, lower = sorted(map(float, lines))
    assert upper < min(points) < max(points) < lower
    assert "alone" in svg
    assert 'class="limit"' not in drawing.residuals([[1.0, 1.1]], **TITLES)
    # Within the cloud its name would be hidden by the points.
    thin = drawing.residuals([[1.0, 1.9], [2.0, 1.1]], **TITLES, band=(0.001, "alone"))
    name = next(each for each in ElementTree.fromstring(thin).iter("text") if "alone" in each.text)
    assert float(name.get("y")) < min(y for _, y in cloud([[1.0, 1.9]], band=(0.001, "alone")))


def ticks(svg: str) -> list[str]:
    texts = ElementTree.fromstring(svg).iter("text")
    return [each.text or "" for each in texts if each.get("text-anchor") == "end"]


def test_zeros_have_a_line_of_their_own() -> None:
    """No decade is theirs, and nothing leads from them to numbers."""
    svg = drawing.line([0.0, 1e-16, 1e-14], log=True, **TITLES)
    zero, small, _ = heights(svg)
    decade = small - heights(drawing.line([1e-16, 1e-15, 1e-14], log=True, **TITLES))[1]
    assert zero - small == pytest.approx(drawing.ZERO_ROOM, abs=0.2)
    assert zero - small != pytest.approx(decade, abs=10)
    data = re.search(r'class="data" d="(.*?)"', svg)
    assert data
    assert data[1].count("M") == 2
    assert "1e-17" not in ticks(svg)
    assert "0" in ticks(svg)
    whole = re.search(r'class="data" d="(.*?)"', drawing.line([1e-15, 1e-16], log=True, **TITLES))
    assert whole
    assert whole[1].count("M") == 1


@pytest.mark.parametrize("log", [True, False])
def test_no_scale_is_made_up_for_zeros(log: bool) -> None:
    def numbers(svg: str) -> list[str]:
        return [tick for tick in ticks(svg) if re.match(r"-?\d", tick)]

    assert numbers(drawing.line([0.0, 0.0, 0.0], log=log, names=["a", "b", "c"], **TITLES)) == ["0"]
    shown = numbers(drawing.line([0.0, 0.0, 1e-16], log=log, names=["a", "b", "c"], **TITLES))
    assert len(shown) > 1


def test_positions_in_bins_with_their_counts() -> None:
    values = [float(position) for position in range(100)]
    found = binned(values, [4] * 100)
    assert len(found) == 13
    assert [each.name for each in found[:2]] == ["0–7", "8–15"]
    assert [each.tokens for each in found] == [32] * 12 + [16]
    assert found[0].mean == pytest.approx(3.5)
    assert sum((each.mean or 0) * each.tokens for each in found) == pytest.approx(4 * sum(values))
    weighed = binned([1.0, 4.0] * 16, [3, 1] * 16)
    assert weighed[0].mean == pytest.approx(1.75)
    assert binned([1.0, None] * 16, [3, 1] * 16)[0].mean is None
    assert [each.name for each in binned([1.0, 2.0], [])] == ["0", "1"]


def test_bins_and_counts_are_shown() -> None:
    page = report_page(full(kl_by_position=[1e-4] * 64, tokens_by_position=[6] * 64), None)
    assert "Each point is the mean of 24 tokens." in page
    assert '<th scope="row">60–63</th><td class="n" data-head="tokens">24</td>' in page
    assert "Each point" not in report_page(full(tokens_by_position=None), None)


def test_the_sources_own_rounding_is_a_column() -> None:
    page = report_page(full(), None)
    assert ">source&#x27;s own rounding</th>" in page
    row = re.search(r"largest \|Δlogit\| / scale</th>(.*?)</tr>", page)
    assert row
    assert re.findall(r">([\d.e-]+)</td>", row[1]) == ["0.06", "0.06", "0.055"]
    assert "0.055" not in report_page(full(rounding=None), None)


def test_losses_as_it_runs_beside_strict_ones() -> None:
    text = Tags(report_page(full(), None)).text
    for words in ("strict float641.2500000001.500000000+0.25", "bfloat161.2600001.510000+0.25"):
        assert words in text
    gone = full(loss_source_native=None, loss_target_native=None)
    assert "1.510000" not in Tags(report_page(gone, None)).text


def test_on_a_failure_where_why_and_what_to_do_come_first() -> None:
    page = report_page(full(), manifest())
    places = [
        page.index(each) for each in ("</h1>", ">Where<", ">Why<", ">Next<", 'class="reason"')
    ]
    assert places == sorted(places)
    assert page.index('class="reason"') < page.index('class="glance"') < page.index("<h2>")
    kept = report_page(full(**KEPT), manifest())
    assert ">Next<" not in kept


def test_it_begins_with_what_was_tried() -> None:
    page = report_page(full(), manifest())
    tried = (
        "<strong>large</strong>, made from <strong>small</strong> (grow hypercloning, hidden x2)"
    )
    assert page.index(tried) < page.index("</h1>")
    unknown = report_page(full(), None)
    assert unknown.index("held against its source <strong>small</strong>") < page.index("</h1>")
    assert "made from" not in unknown


def test_what_is_kept_says_what_to_do() -> None:
    kept = KEPT
    exact, lossy = "Nothing is left to be done", "choose options that lose less"
    assert exact in report_page(full(**kept), None)
    assert lossy in report_page(full(**kept, promise="bounded"), None)
    broken = report_page(full(), None)
    assert exact not in broken
    assert lossy not in broken


def test_it_says_what_the_target_loads_with() -> None:
    kept = KEPT
    loads = "X's own code; not transformers"
    page = report_page(full(**kept), manifest(loads_with=loads))
    assert "Nothing is left to be done" not in page
    assert "Use it or train it in the place of its source. It loads with X&#x27;s own code" in page
    assert "<dt>loads with</dt>" in page
    lossy = report_page(full(**kept, promise="bounded"), manifest(loads_with=loads))
    assert "It loads with X" in lossy
    plain = report_page(full(**kept), manifest(loads_with=None))
    assert "It loads with" not in plain
    assert "<dt>loads with</dt>" not in plain
    without = report_page(full(**kept), manifest(not_kept=["model.safetensors"]))
    assert "Its weights are not kept" in without


def test_warnings_of_the_operation_are_shown() -> None:
    page = report_page(full(), manifest(warnings=["rank 8 makes <it> larger"]))
    assert page.index("! Rank 8 makes &lt;it&gt; larger.") < page.index("<h2>")
    assert "! " not in Tags(report_page(full(), manifest(warnings=[]))).text
    Tags(report_page(full(), manifest(warnings={"of": "another form"})))


def test_few_predictions_leave_something_to_be_done() -> None:
    amount = finding("amount", None, advice="prove it on more: real text")
    few = full(**KEPT | {"findings": [*KEPT["findings"], amount], "predictions": 1})
    page = report_page(few, None)
    assert page.index(">Next<") < page.index("prove it on more") < page.index("<h2>")
    assert "Nothing is left to be done" not in page
    assert "1 prediction (" in page
    assert "1 predictions" not in page
    enough = report_page(full(**KEPT), None)
    assert ">Next<" not in enough


def test_tensors_that_went_into_others_are_not_said_to_come_back() -> None:
    some = {"weights_recovered": True, "tensors_recovered": 38, "source_tensors": 54}
    page = report_page(full(**some), None)
    said = "38 of 54 tensors are recovered bit for bit, the other 16 went into tensors that are"
    assert said in page
    assert "every element, bit for bit" not in page
    every = report_page(full(**some | {"tensors_recovered": 54}), None)
    assert "every element, bit for bit" in every


def test_advice_names_keys_and_folders() -> None:
    name = "rms_norm_eps in config.json"
    values = [{"name": name, "expected": "1e-05", "found": "0.0001"}]
    changed = VerifyResult(**full(**SOUND, changed=[name], changed_values=values))
    changed.findings = [Finding(**finding("files", place=name))]
    found = to_do(name_result(changed, "/m/my model", "/m/out.rejected"))
    assert found["Where"] == name
    assert found["Next"].startswith(f"set {name} back to 1e-05 (it is 0.0001); or ")
    command = (
        "growkit run /m/out.rejected/growkit.json --source '/m/my model' --output /m/out-again"
    )
    assert f"({command})" in found["Next"]
    assert "0.0001 in place of 1e-05" in Tags(report_page(changed, None)).text
    changed.weights_recovered = None
    assert "growkit.json" not in to_do(name_result(changed, "a", "b"))["Next"]


def mark_of(spectrum: dict[str, Any]) -> tuple[str, bool]:
    """What a spectrum's chart and caption say of what is kept; whether a line is drawn."""
    page = report_page(full(spectra=[spectrum], kl_by_rank=[]), None)
    (drawn,) = re.findall(r"<figure><figcaption>.*?</figure>", page)
    return Tags(drawn).text, 'class="limit"' in drawn


def test_a_spectrum_says_how_many_values_are_kept() -> None:
    spectrum = full()["spectra"][0]
    text, line = mark_of(spectrum | {"kept": 3})
    assert "3 kept (rank 2)" in text
    assert line
    text, line = mark_of(spectrum | {"kept": 2})
    assert "2 kept" in text
    assert "rank" not in text
    # The last of four values is not set apart where all are kept.
    text, line = mark_of(spectrum | {"kept": 4})
    assert "all 4 kept (rank 2)" in text
    assert not line
    page = report_page(full(spectra=[spectrum | {"kept": 4}]), None)
    assert "Every singular value is kept" in page
    assert "on the left of the dashed line" not in page


def test_ranks_stand_where_they_are_on_their_axis() -> None:
    ranks = [1, 2, 8]
    svg = drawing.line([3.0, 2.0, 1.0], names=["1", "2", "8"], places=ranks, **TITLES)
    first, second, third = (
        float(dot.get("cx", "nan")) for dot in ElementTree.fromstring(svg).iter("circle")
    )
    assert third - second == pytest.approx(6 * (second - first), rel=0.01)
    costs = [{"rank": rank, "kl_nats_per_token": 1 / rank} for rank in ranks]
    page = report_page(full(kl_by_rank=costs), None)
    assert "rank 2, chosen" in page
    spectra = [full()["spectra"][0] | {"rank": rank} for rank in (1, 8)]
    assert "chosen" not in report_page(full(kl_by_rank=costs, spectra=spectra), None)


def test_what_is_only_zero_is_a_sentence() -> None:
    layers = [{"module": "model.layers.0", "relative": 0.0}]
    zeros = {
        "by_layer": layers,
        "kl_by_position": [0.0, 0.0],
        "logit_sample": [[1.0, 1.0]],
        "symmetry": [full()["symmetry"][0] | {"relative_distance": 0.0}],
    }
    page = report_page(full(**zeros), manifest())
    all_of_them = len(charts(report_page(full(), manifest())))
    assert len(charts(page)) == all_of_them - len(zeros) + 1  # that of the logits is never left out
    assert page.count("identical to the source") == 2
    assert "Error by layer" in headings(page)


def test_the_first_layer_has_its_label() -> None:
    names = ["embed_tokens", "0", "1", "2", "3"]
    found = ElementTree.fromstring(drawing.line([1.0] * 5, names=names, **TITLES)).iter("text")
    assert [each.text for each in found if float(each.get("y", 0)) > 240][:5] == names


def test_lines_break_between_the_parts_of_names() -> None:
    name = "model.layers.0.self_attn.weight"
    assert flowing(name) == "model.<wbr>layers.<wbr>0.<wbr>self_<wbr>attn.<wbr>weight"
    assert flowing("trust_remote_code=True") == "trust_remote_code=True"
    assert flowing("--max-kl or 1e-14") == (
        '<span class="whole">--max-kl</span> or <span class="whole">1e-14</span>'
    )
    assert flowing("0.001 & <b>") == "0.001 &amp; &lt;b&gt;"


def test_texts_are_those_of_the_promise() -> None:
    exact = report_page(full(), None)
    lossy = report_page(full(promise="bounded", kept=True), None)
    for words in ("A fault shows as a step", "a slope or a shift is a fault"):
        assert words in exact
        assert words not in lossy
    assert "Copies learn different things" in exact
    nothing = full(symmetry=[])
    nothing["trainability"]["copied"] = 0
    assert "Copies learn different things" not in report_page(nothing, None)


def test_where_nothing_was_measured_nothing_is_said_to_be_none() -> None:
    free = {"name": "prefill", "relative": 0.5, "tolerance": None, "kept": None, "note": ""}
    other = {"name": "generate", "relative": None, "tolerance": None, "kept": True, "note": ""}
    page = report_page(full(modes=[free, other]), None)
    rows = dict(re.findall(r'<th scope="row">(prefill|generate)</th>(.*?)</tr>', page))
    assert re.findall(r">([^<>]+)</td>", rows["prefill"]) == [
        "no limit",
        "0.5",
        "no limit",
        "–",
        "–",
    ]
    assert re.findall(r">([^<>]+)</td>", rows["generate"]) == ["✓ kept", "–", "–", "–", "–"]


def test_what_cannot_train_as_it_is_has_something_left_to_be_done() -> None:
    kept = KEPT
    stuck = {"copied": 8, "identical_gradients": 4, "first_identical": "w"}
    page = report_page(
        full(**kept, trainability={**stuck, "without_gradient": 0, "trainable": False}), None
    )
    assert "Nothing is left to be done" not in page
    assert "copies stay equal" in page
    silent = {**stuck, "identical_gradients": 0, "silent_parameters": ["w"], "trainable": False}
    assert "cannot train as it is" in report_page(full(**kept, trainability=silent), None)


@pytest.mark.parametrize(
    ("kl", "most", "said"),
    [
        (0.7579573, 0.001, "0.758 nats per token of KL are more than the 0.001 allowed"),
        (0.00100049, 0.001, "0.00100049 nats per token of KL are more than the 0.001 allowed"),
    ],
)
def test_a_limit_that_was_just_passed_shows_its_digits(kl: float, most: float, said: str) -> None:
    assert too_much(kl, most) == said


def test_a_lossy_conversion_leads_with_what_was_lost() -> None:
    found = [finding("strict_float64", True, sentence="0.1 nats")]
    lossy = full(**KEPT | {"promise": "bounded", "lost": "a <b> of it", "findings": found})
    page = report_page(lossy, None)
    assert page.index("</h1>") < page.index("Lost: a &lt;b&gt; of it.") < page.index("0.1 nats")
    assert page.count("a &lt;b&gt; of it") == 1
    assert "Lost:" not in report_page(full(**KEPT), None)


def test_cells_carry_the_heads_of_their_columns() -> None:
    """Where rows are stacked, they are all that says what a number is."""
    page = report_page(full(), manifest())
    cells = re.findall(r"<td ([^>]*)>", page)
    unnamed = [each for each in cells if "data-head" not in each and "small" not in each]
    nameless_columns = page.count('<th scope="col" class="t"></th>')
    assert len(unnamed) == nameless_columns * len(full()["spectra"])
    assert "attr(data-head)" in page
    assert "thead { display: none; }" in page


def test_bars_are_as_long_as_their_values() -> None:
    rows = [Bar("first", 0.2, 0.1, 0.3), Bar("second", 0.4, 0.4, 0.4)]
    root = ElementTree.fromstring(drawing.bars(rows, title="t", x_title="x"))
    first, second = (float(bar.get("width", "nan")) for bar in root.iter("rect"))
    assert second == pytest.approx(2 * first, abs=0.2)
    assert "first: 0.2 (0.1 to 0.3); second: 0.4" in (root[1].text or "")


@pytest.mark.parametrize("count", [1, 2, 3, 7, 36, 83, 512, 4096])
def test_labels_do_not_touch(count: int) -> None:
    names = ["embed_tokens", *map(str, range(count)), "norm", "lm_head"]
    svg = drawing.line([1.0] * len(names), names=names, **TITLES)
    spans = []
    for text in ElementTree.fromstring(svg).iter("text"):
        if text.text in names and float(text.get("y", 0)) > 240:
            x, size = float(text.get("x", 0)), 7 * len(text.text or "")
            start = {"start": x, "middle": x - size / 2, "end": x - size}[
                text.get("text-anchor", "")
            ]
            spans.append((start, start + size))
    spans.sort()
    assert len(spans) >= 3 or count < 3
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_a_chart_stands_alone() -> None:
    svg = drawing.standalone(drawing.line([1.0, 2.0], **TITLES))
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert [child.tag for child in root][:3] == [f"{SVG}title", f"{SVG}desc", f"{SVG}style"]
    style = root[2].text or ""
    assert "prefers-color-scheme: dark" in style
    used = set(re.findall(r'class="([\w-]+)', svg))
    assert used - {"chart"} <= set(re.findall(r"\.([\w-]+)", style))
    assert not OUTSIDE.search(svg)


def contrast(first: str, second: str) -> float:
    """WCAG 2.2, contrast ratio of two colours #rrggbb."""

    def luminance(colour: str) -> float:
        channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_read() -> None:
    schemes = drawing.style_rules().split("@media")
    assert len(schemes) == 2
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        for name in ("ink", "muted", "accent", "good", "bad"):
            assert contrast(colours[name], colours["paper"]) >= 4.5
        for name in ("good", "warn", "bad"):
            assert contrast(colours[name], colours[f"{name}-paper"]) >= 4.5
            assert contrast(colours["ink"], colours[f"{name}-paper"]) >= 4.5
        assert contrast(colours["grid"], colours["paper"]) < 4.5  # what it should not be for text
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_marks_that_let_the_paper_through_can_be_seen() -> None:
    """WCAG 2.2, 1.4.11: at least 3 : 1, with the opacity of the mark."""
    style = drawing.style_rules()
    rule = r"\.chart ([^{}]*) \{([^{}]*)(?:stroke|fill)-opacity: ([\d.]+)"
    marks = [(m[1], m[2], float(m[3])) for m in re.finditer(rule, style)]
    assert len(marks) == 5
    for scheme in style.split("@media"):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        lines = [name for name in colours if name.startswith("line-")]
        for mark, declared, opacity in marks:
            names = re.findall(r"var\(--([\w-]+)\)", declared) or lines
            for name in names:
                seen = mixed(colours[name], colours["paper"], opacity)
                assert contrast(seen, colours["paper"]) >= 3, (mark, name, scheme[:20])
    assert contrast(mixed("#0b5cad", "#ffffff", 0.45), "#ffffff") < 3  # the control


def mixed(colour: str, paper: str, opacity: float) -> str:
    """What is seen of a colour that lets paper through."""
    pairs = [(int(colour[i : i + 2], 16), int(paper[i : i + 2], 16)) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(a * opacity + b * (1 - opacity)):02x}" for a, b in pairs)


def test_every_colour_and_class_exists() -> None:
    """A class without a rule and a variable without a value would fail in silence."""
    page = report_page(full(), manifest())
    style = page[page.index("<style>") : page.index("</style>")]
    defined = set(re.findall(r"(--[\w-]+):", style))
    assert set(re.findall(r"var\((--[\w-]+)\)", style)) == defined
    assert style.count("{") == style.count("}")


@pytest.mark.parametrize("kind", ["llama", "diffllama"])
def test_a_real_proof(kind: str, tmp_path: Path, make: Callable[..., Path]) -> None:
    source = save_model(tmp_path / "source", kind)
    quick = growkit.Settings(prompts=2, length=12)
    made = growkit.grow(source, tmp_path / "target", hidden="x2", verify=quick)
    beside = json.loads((tmp_path / "target" / "growkit.json").read_text())
    result = growkit.verify(source, tmp_path / "target", prompts=2, length=12)
    assert made["kept"]
    page = report_page(result, beside)
    tags = Tags(page)
    assert "Preserved</h1>" in page
    assert "source → target" in page
    assert f"{result['strict_float64']['relative']:.3g}" in tags.text
    assert beside["source_files"]["config.json"] in tags.text
    other = growkit.verify(make(kind, seed=1), tmp_path / "target", prompts=2, length=12)
    page = report_page(other, beside)
    assert "Not preserved</h1>" in page
    assert "Where and why it differs" in headings(page)


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5, 1e-9, 12345.0])
def test_numbers_of_an_axis_are_not_cut_off(scale: float) -> None:
    """As where it begins at the edge of the drawing, and they are centred on its lines."""
    rows = [Interval("one", 0.02 * scale, 0.01 * scale, 0.03 * scale, [], noise=False)]
    drawn = intervals(rows, title="", x_title="")
    middles = re.findall(r'<text x="([\d.]+)"[^>]*text-anchor="middle">([^<]+)<', drawn)
    assert len(middles) > 2
    for x, label in middles:
        half = LETTER * len(label) / 2 - 0.1
        assert half <= float(x) <= WIDTH - half, label
