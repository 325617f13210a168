"""The page of a proof: a file by itself, safe from what folders contain, without empty frames."""

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
from benchmarks.continual.report import standalone
from growkit.report import drawing
from growkit.report.drawing import LETTER, WIDTH, Interval, Titles, intervals
from growkit.report.proof import binned, proof_view
from growkit.report.saving import flowing, page
from tests.conftest import save_model

HOSTILE = "<script>alert('x')</script>&\"\x00\ud800"
SVG = "{http://www.w3.org/2000/svg}"
VOID = {"wbr", "meta", "br", "hr", "img", "link", "input"}
OUTSIDE = re.compile(
    r"""(?:src|href|action|data|poster|srcset)\s*=\s*["']?(?!\#)|url\(|@import|<(?:script|iframe|link|img|base|object|embed)\b""",
    re.IGNORECASE,
)
TITLES = Titles("t", "x", "y")
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
    """A result with everything in it, rejected because of a factor in one matrix."""
    return {**json.loads(EXAMPLE.read_text("utf-8"))["result"], **changes}


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


LOSSES = "loss_source loss_target loss_source_native loss_target_native"
SECTIONS = {
    "Where and why it differs": "fault first_difference first_differing_layer first_lost_tensor",
    "The numbers": "",
    "Loss before and after": LOSSES,
    "Inference modes": "modes",
    "Error by layer": "by_layer",
    "Logits, source against target": "logit_sample",
    "KL by position": "kl_by_position",
    "Can the new capacity train?": "trainability symmetry",
    "What the low rank holds": "spectra kl_by_rank",
    "How it was measured": "",
    "How it was made": "",
}


def test_a_section_is_there_exactly_with_its_data() -> None:
    everything = list(SECTIONS)
    assert headings(paged(manifest())) == everything
    assert headings(paged()) == everything[:-1]
    for title, keys in SECTIONS.items():
        empty = {key: [] if isinstance(full()[key], list) else None for key in keys.split()}
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
    shown.encode()


def test_the_control_sees_what_is_not_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("growkit.report.drawing.escape_markup", str)
    assert OUTSIDE.search(page(proof_view(poisoned(full(), HOSTILE.replace("\x00", "")))))


@pytest.mark.parametrize("form", [[], {}, "text", 1, None, [{"a": []}]])
def test_a_manifest_of_any_form_has_a_page(form: Any) -> None:
    keys = ("recipe", "warnings", "papers", "source_files", "loads_with", "not_kept", "created")
    for made in [manifest() | {key: form} for key in keys] + [{"recipe": {"steps": form}}]:
        Tags(paged(made))


@pytest.mark.parametrize("number", [None, math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.0, -1.0])
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
    shown, result = paged(**changes), full(**changes)
    verdict = result["verdict"].capitalize()
    assert f"{verdict}</h1>" in shown
    assert f"<title>{verdict}: " in shown
    assert re.findall(r'class="verdict (\w+)"', shown) == [kind]
    assert result["reason"][1:] in Tags(shown).text


def test_on_a_failure_where_why_and_what_to_do_come_first() -> None:
    shown = paged(manifest())
    marks = ("</h1>", 'class="reason"', ">At fault<", ">Next<", 'class="glance"', "<h2>")
    places = [shown.index(each) for each in marks]
    assert places == sorted(places)
    for named in ("layer 1, mlp, model", "a factor is missing"):
        assert named in shown.replace("<wbr>", "")[: places[-1]]
    nowhere = {"fault": None, "findings": [finding("native")]}
    assert ">At fault<" not in paged(**nowhere)
    assert ">Next<" not in paged(**KEPT)
    few = KEPT | {"predictions": 1, "findings": [finding("amount", None, advice="prove more")]}
    text = Tags(paged(**few)).text
    assert text.index("Nextprove more") < text.index("The numbers") < text.index("1 prediction (")
    assert "in place of its source" not in text


STUCK = {"trainable": False, "copied": 8, "identical_gradients": 6, "first_identical": "a.b.c"}
CODE = {"loads_with": "X's own code; not transformers"}


@pytest.mark.parametrize(
    ("made", "changes", "use"),
    [
        ({}, KEPT, "Use it or train it in place of its source."),
        ({}, KEPT | {"promise": "bounded"}, "choose options that lose less"),
        ({}, KEPT | {"trainability": full()["trainability"] | STUCK}, "before training, read “new"),
        (CODE, {}, "It loads with X's own code"),
        ({"not_kept": ["model.safetensors"]}, KEPT, "Its weights are not kept: "),
    ],
)
def test_what_to_do_with_the_target(
    made: dict[str, Any], changes: dict[str, Any], use: str
) -> None:
    assert use in Tags(paged(manifest(**made), **changes)).text
    assert use not in Tags(paged(manifest())).text


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


def test_lines_break_between_the_parts_of_names() -> None:
    """Never inside of options and exponents, where a browser would break after each hyphen."""
    name = "model.layers.0.self_attn.weight"
    assert flowing(name) == "model.<wbr>layers.<wbr>0.<wbr>self_<wbr>attn.<wbr>weight"
    assert flowing("trust_remote_code=True") == "trust_remote_code=True"
    whole = '<span class="whole">{}</span>'
    assert flowing("--max-kl or 1e-14") == f"{whole.format('--max-kl')} or {whole.format('1e-14')}"
    assert flowing("0.001 & <b>") == "0.001 &amp; &lt;b&gt;"


def test_positions_in_bins_with_their_counts() -> None:
    values = [float(position) for position in range(100)]
    found = binned(values, [4] * 100)
    assert [name for name, _, _ in found[:2]] == ["0–7", "8–15"]
    assert [tokens for _, _, tokens in found] == [32] * 12 + [16]
    assert found[0][1] == pytest.approx(3.5)
    assert sum((mean or 0) * tokens for _, mean, tokens in found) == pytest.approx(4 * sum(values))
    assert binned([1.0, 4.0] * 16, [3, 1] * 16)[0][1] == pytest.approx(1.75)
    assert binned([1.0, None] * 16, [3, 1] * 16)[0][1] is None
    assert [name for name, _, _ in binned([1.0, 2.0], [1, 1])] == ["0", "1"]
    shown = paged(kl_by_position=[1e-4] * 64, tokens_by_position=[6] * 64)
    assert row(shown, "60–63") == ["24", "0.0001"]


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


def test_what_is_only_zero_is_a_sentence() -> None:
    zeros = {
        "by_layer": [{"module": "model.layers.0", "relative": 0.0}],
        "kl_by_position": [0.0, 0.0],
        "tokens_by_position": [1, 1],
        "logit_sample": [[1.0, 1.0]],
        "symmetry": [full()["symmetry"][0] | {"relative_distance": 0.0}],
    }
    shown = paged(manifest(), **zeros)
    assert len(charts(shown)) == len(charts(paged(manifest()))) - 3  # logits are always drawn
    assert shown.count("identical to the source") == 2
    assert "Error by layer" in headings(shown)


def test_a_spectrum_shows_how_many_values_are_kept() -> None:
    def caption(**changes: Any) -> tuple[str, bool]:
        shown = paged(spectra=[full()["spectra"][0] | changes], kl_by_rank=[])
        (figure,) = re.findall(r"<figure><figcaption>model.*?</figure>", shown)
        return Tags(figure).text, 'class="limit"' in figure

    text, line = caption()
    assert "3 kept, rank 2; residual 0.03 of the norm" in text
    assert line
    assert caption(kept=4)[1] is False  # the last value is not set apart where all are kept
    costs = [{"rank": rank, "kl_nats_per_token": 1 / rank} for rank in (1, 2, 8)]
    assert "rank 2, chosen" in paged(kl_by_rank=costs)
    spectra = [full()["spectra"][0] | {"rank": rank} for rank in (1, 8)]
    assert "chosen" not in paged(kl_by_rank=costs, spectra=spectra)


def dots(svg: str, kind: str = "dot") -> list[tuple[float, float]]:
    """Where a chart has its points."""
    paths = re.findall(rf'class="{kind}" d="(.*?)"', svg)
    points = re.findall(r"M([\d.]+) ([\d.]+)h0", "".join(paths))
    return [(float(x), float(y)) for x, y in points]


def numbers(svg: str) -> list[str]:
    """The numbers of the vertical axis."""
    return re.findall(r'text-anchor="end">(-?\d[^<]*)<', svg)


def labels(svg: str) -> list[tuple[float, str]]:
    """The labels of the horizontal axis, by their middles."""
    found = re.findall(r'x="([\d.]+)"[^>]*text-anchor="middle">([^<]+)<', svg)
    return [(float(x), label) for x, label in found]


def data(svg: str) -> str:
    (found,) = re.findall(r'class="data" d="(.*?)"', svg)
    return found


def test_a_logarithmic_axis_has_equal_decades_and_zeros_below() -> None:
    svg = drawing.line([1e-15, 1e-12, 1e-9, 0.0], TITLES, log=True)
    first, second, third, zero = (y for _, y in dots(svg))
    assert first - second == pytest.approx(second - third, abs=0.2)
    assert zero > first
    assert data(svg).count("M") == 2  # nothing leads from zero to numbers
    assert "0" in numbers(svg)
    assert not {"1e-16", "1e-17"} & {*numbers(svg)}  # no decade is that of zero
    whole = drawing.line([1e-15, 1e-16], TITLES, log=True)
    assert data(whole).count("M") == 1
    assert "0" not in numbers(whole)
    for log in (True, False):  # no scale is made up for zeros
        assert numbers(drawing.line([0.0, 0.0], TITLES, log=log)) == ["0"]
        assert len(numbers(drawing.line([0.0, 1e-16], TITLES, log=log))) > 1
    linear = [y for _, y in dots(drawing.line([1.0, 10.0, 100.0], TITLES))]
    assert linear[0] - linear[1] != pytest.approx(linear[1] - linear[2], abs=1)


def test_values_are_where_they_belong_on_their_axis() -> None:
    gap = drawing.line([1.0, None, 2.0], TITLES)
    assert gap.count('class="lost"') == 1
    assert data(gap).count("M") == 2
    svg = drawing.line([3.0, 2.0, 1.0], TITLES, names="128", places=[1, 2, 8])
    assert "lost" not in svg
    first, second, third = (x for x, _ in dots(svg))
    assert third - second == pytest.approx(6 * (second - first), rel=0.01)


def test_differences_of_logits_are_above_and_below_zero() -> None:
    """Even those that no diagonal would show."""
    svg = drawing.residuals([[-4.0, -4.0], [1.0, 1.0 + 1e-7], [9.0, 9.0 - 1e-7]], TITLES)
    zero, above, below = (y for _, y in dots(svg, "cloud"))
    assert zero - above > 50
    assert zero - above == pytest.approx(below - zero, abs=0.2)
    assert 'class="limit"' not in svg
    same = drawing.residuals([[-4.0, -4.0], [1.0, 1.0], [9.0, 9.0]], TITLES)
    assert len({y for _, y in dots(same, "cloud")}) == 1


@pytest.mark.parametrize(("band", "within"), [(0.4, True), (0.001, False)])
def test_the_rounding_of_the_source_is_a_band_around_zero(band: float, within: bool) -> None:
    svg = drawing.residuals([[1.0, 1.1], [2.0, 1.9]], TITLES, band=(band, "alone"))
    upper, lower = sorted(map(float, re.findall(r'class="limit" d="M\d+ ([\d.]+)H', svg)))
    points = [y for _, y in dots(svg, "cloud")]
    assert (upper < min(points) < max(points) < lower) is within
    # Points must not hide the name of the lines.
    (name,) = re.findall(r'y="([\d.]+)" text-anchor="end">(?:dashed: )?alone', svg)
    assert float(name) < min(points)


def test_intervals_are_as_long_as_their_values() -> None:
    rows = [Interval("first", 0.2, 0.1, 0.3), Interval("second", 0.4, 0.4, 0.4)]
    svg = intervals(rows, TITLES, around_zero=False)
    zero, *_ = re.findall(r'class="axis" d="M([\d.]+) ', svg)
    first, second = (float(x) - float(zero) for x in re.findall(r'"middle" d="M([\d.]+) ', svg))
    assert second == pytest.approx(2 * first, abs=0.2)
    (low, high), _ = re.findall(r'class="interval sure" d="M([\d.]+) [\d.]+H([\d.]+)"', svg)
    assert float(high) - float(low) == pytest.approx(first, abs=0.2)
    assert "first: 0.2 (0.1 to 0.3); second: 0.4" in svg


@pytest.mark.parametrize("scale", [1.0, 1e-2, 1e-5, 1e-9, 12345.0])
def test_numbers_of_an_axis_are_not_cut_off(scale: float) -> None:
    """Even if it begins at the edge of the drawing, and they are centred on its lines."""
    rows = [Interval("one", 0.02 * scale, 0.01 * scale, 0.03 * scale)]
    found = labels(intervals(rows, TITLES))
    assert len(found) > 2
    for x, label in found:
        half = LETTER * len(label) / 2 - 0.1
        assert half <= x <= WIDTH - half, label


@pytest.mark.parametrize("count", [1, 2, 3, 7, 36, 83, 512, 4096])
def test_labels_do_not_touch(count: int) -> None:
    names = ["embed_tokens", *map(str, range(count)), "norm", "lm_head"]
    found = labels(drawing.line([1.0] * len(names), TITLES, names=names))
    spans = sorted((x - 3.5 * len(name), x + 3.5 * len(name)) for x, name in found)
    assert len(spans) >= 3 or count < 3
    assert "0" in [name for _, name in found] or count > 2
    assert all(first[1] <= second[0] for first, second in pairwise(spans))


def test_a_chart_can_be_a_file_of_its_own() -> None:
    svg = standalone(drawing.line([1.0, 2.0], TITLES))
    root = ElementTree.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    assert [root[0].tag, root[1].tag, root[2].tag] == [f"{SVG}title", f"{SVG}desc", f"{SVG}style"]
    style = root[2].text or ""
    assert "prefers-color-scheme: dark" in style
    used = set(re.findall(r'class="([\w-]+)', svg))
    assert used - {"chart"} <= set(re.findall(r"\.([\w-]+)", style))
    assert not OUTSIDE.search(svg)


def contrast(first: str, second: str, opacity: float = 1.0) -> float:
    """WCAG 2.2, contrast ratio of two colours #rrggbb; the first lets the second through."""

    def luminance(channels: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    mark, paper = ([int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in (first, second))
    mixed = [a * opacity + b * (1 - opacity) for a, b in zip(mark, paper, strict=True)]
    light, dark = sorted((luminance(mixed), luminance(paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_colours_can_be_read() -> None:
    """WCAG 2.2: 4.5 : 1 for text, 3 : 1 for marks with their opacity (1.4.11)."""
    style = drawing.style_rules()
    rule = r"\.chart ([^{}]*) \{([^{}]*)(?:stroke|fill)-opacity: ([\d.]+)"
    marks, schemes = re.findall(rule, style), style.split("@media")
    assert (len(schemes), len(marks)) == (2, 4)
    for scheme in schemes:
        colours = dict(re.findall(r"--([\w-]+): (#\w{6});", scheme))
        paper = colours["paper"]
        for name in ("ink", "muted", "accent", "good", "bad"):
            assert contrast(colours[name], paper) >= 4.5
        for name in ("good", "warn", "bad"):
            assert contrast(colours[name], colours[f"{name}-paper"]) >= 4.5
            assert contrast(colours["ink"], colours[f"{name}-paper"]) >= 4.5
        assert contrast(colours["grid"], paper) < 4.5  # the control: it is not for text
        lines = [name for name in colours if name.startswith("line-")]
        for mark, declared, opacity in marks:
            for name in re.findall(r"var\(--([\w-]+)\)", declared) or lines:
                assert contrast(colours[name], paper, float(opacity)) >= 3, (mark, name)
    assert contrast("#0b5cad", "#ffffff", 0.45) < 3  # the control
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_a_real_proof(tmp_path: Path, make: Callable[..., Path]) -> None:
    source = save_model(tmp_path / "source", "diffllama")
    quick = growkit.Settings(prompts=2, length=12)
    made = growkit.grow(source, tmp_path / "target", hidden="x2", verify=quick)
    recorded = json.loads((tmp_path / "target" / "growkit.json").read_text())
    result = growkit.verify(source, tmp_path / "target", prompts=2, length=12)
    assert made["kept"]
    shown = page(proof_view(result, recorded))
    tags = Tags(shown)
    assert "<title>Preserved: source → target" in shown
    assert f"{result['strict_float64']['relative']:.3g}" in tags.text
    assert recorded["source_files"]["config.json"] in tags.text
    other = growkit.verify(make("diffllama", seed=1), tmp_path / "target", prompts=2, length=12)
    shown = page(proof_view(other, recorded))
    assert "Not preserved</h1>" in shown
    assert "Where and why it differs" in headings(shown)
