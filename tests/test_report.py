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
from growkit.report.drawing import Bar
from growkit.report.page import report_page
from tests.conftest import save_model

HOSTILE = "<script>alert('x')</script>&\"\x00\ud800"
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "hr", "img", "link", "input"}
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


def full(**changes: Any) -> dict[str, Any]:
    """A result with everything in it."""
    modules = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "lm_head"]
    errors = [0.0, 1e-16, 2e-2, None, math.nan]
    found = {
        "promise": "exact",
        "kept": False,
        "reason": "not preserved: the logits differ by 3.1e-02 of their scale",
        "weights_recovered": False,
        "first_lost_tensor": "model.layers.1.mlp.up_proj.weight",
        "strict_float64": measured(dtype="float64", tolerance=1e-12, tolerance_why="sum of 64"),
        "native": measured(),
        "loss_source": 1.25,
        "loss_target": 1.5,
        "first_differing_layer": 1,
        "first_difference": "model.layers.1",
        "negative_control_caught": True,
        "negative_control": "model.layers.0.mlp.up_proj.weight × 1.001",
        "trainability": {
            "copied": 48,
            "identical_gradients": 0,
            "without_gradient": 0,
            "first_identical": None,
        },
        "tokens": 24,
        "predictions": 22,
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
    "The numbers": ("strict_float64", "native"),
    "Loss before and after": ("loss_source", "loss_target"),
    "Where and why it differs": (
        "fault",
        "first_difference",
        "first_differing_layer",
        "first_lost_tensor",
    ),
    "Error by layer": ("by_layer",),
    "How it was run": ("modes",),
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
    assert "Not as asked" in page


def poisoned(value: Any, poison: Any) -> Any:
    """Every text replaced."""
    if isinstance(value, dict):
        return {key: poisoned(item, poison) for key, item in value.items()}
    if isinstance(value, list):
        return [poisoned(item, poison) for item in value]
    return poison if isinstance(value, str) else value


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


@pytest.mark.parametrize(
    ("changes", "verdict", "kind"),
    [
        ({"kept": True, "reason": "preserved: all"}, "Preserved", "good"),
        ({}, "Not preserved", "bad"),
        ({"reason": "no verdict: the negative control was not noticed"}, "No verdict", "warn"),
        ({"kept": True, "promise": "bounded"}, "Bounded, as asked for", "warn"),
        ({"kept": True, "promise": "different"}, "Different, as asked for", "warn"),
        ({"promise": "bounded"}, "Not as asked", "bad"),
    ],
)
def test_the_verdict_in_words_and_colour(changes: dict[str, Any], verdict: str, kind: str) -> None:
    page = report_page(full(**changes), None)
    assert f"{verdict}</h1>" in page
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


def test_points_on_the_diagonal_are_on_the_diagonal() -> None:
    def cloud(pairs: list[list[float]]) -> list[tuple[float, float]]:
        svg = drawing.scatter(pairs, **TITLES)
        found = re.search(r'class="cloud" d="(.*?)"', svg)
        assert found
        moves = re.findall(r"M([\d.]+) ([\d.]+)h0", found[1])
        return [(float(x), float(y)) for x, y in moves]

    def bend(points: list[tuple[float, float]]) -> float:
        (ax, ay), (bx, by), (cx, cy) = points
        return abs((bx - ax) * (cy - ay) - (by - ay) * (cx - ax))

    assert bend(cloud([[-4.0, -4.0], [1.0, 1.0], [9.0, 9.0]])) < 100
    assert bend(cloud([[-4.0, -4.0], [1.0, 4.0], [9.0, 9.0]])) > 1000


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
