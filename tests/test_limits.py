"""One rule decides what is within a limit: for the verdict, its sentences, the advice, the page."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import growkit
from growkit.base import limits
from growkit.base.limits import Limit, within, within_each
from growkit.engine.metrics import Distance
from growkit.proof.logits import Strict
from growkit.report.proof_page import proof_view
from growkit.report.saving import page
from tests.files import listed

QUICK: dict[str, Any] = {"prompts": 1, "length": 8}
UP, DOWN = (math.nextafter(0.25, side) for side in (1, 0))
RULE = [
    *((0.25, 0.25, True), (UP, 0.25, False), (DOWN, 0.25, True), (0.0, 0.0, True)),
    *((5e-324, 0.0, False), (-0.0, 0.0, True), (math.nan, 1.0, False), (1.0, math.nan, False)),
    *((math.inf, math.inf, False), (1.0, math.inf, True)),
]


STATED = listed("limits", "stated")


@pytest.mark.parametrize(("margin", "page", "sentence"), STATED)
def test_the_documents_have_the_margins(margin: str, page: str, sentence: str) -> None:
    (file,) = (Path(growkit.__file__).parents[1] / "docs").rglob(f"{page}.md")
    assert sentence.format(getattr(limits, margin)) in " ".join(file.read_text("utf-8").split())


@pytest.mark.parametrize(("distance", "limit", "kept"), RULE)
def test_the_rule(distance: float, limit: float, kept: bool) -> None:
    assert within(distance, limit) is kept
    assert bool(within_each(torch.tensor(distance, dtype=torch.float64), limit)) is kept
    assert not within(None, limit)
    assert within(distance, None) is math.isfinite(distance)


def test_a_proof_at_its_limit(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equality is kept, and nothing above it is, in strict float64."""
    pair = place / "source", place / "exact"
    measured_ways = growkit.verify(*pair, **QUICK).sections.modes.modes
    most = max(mode["relative"] or 0.0 for mode in measured_ways if mode["tolerance"])
    assert most > 0
    for limit, kept in ((most, True), (DOWN * 4 * most, False)):
        fixed = Limit(limit, "")
        monkeypatch.setattr(Strict, "limit", property(lambda self, fixed=fixed: fixed))
        result = growkit.verify(*pair, **QUICK)
        assert result["kept"] is kept
        assert result["reason"].startswith("preserved: ") is kept
        assert all(mode["kept"] is not False for mode in result.sections.modes.modes) is kept
        view = proof_view(result)
        assert (view.heading == "Preserved") is kept
        assert ("✗" in page(view)) is not kept


def distance_of(source: torch.Tensor, target: torch.Tensor) -> Distance:
    found = Distance()
    found.add(source, target, torch.full((len(source),), -1))
    return found


def test_rounding_is_no_kl() -> None:
    """Other orders of a sum leave negative KL and KL of 1e-17; a real difference stays."""
    generator = torch.Generator().manual_seed(1)
    raw, shown = [], []
    for _ in range(50):
        logits = 9 * torch.randn(6, 300, generator=generator, dtype=torch.float64)
        disturbed = logits * (1 + 1e-15 * torch.randn(logits.shape, generator=generator).double())
        found = distance_of(logits, disturbed)
        raw.append(found.kl / found.tokens)
        shown += [found.measured("float64", "cpu", None)["kl_nats_per_token"]]
        shown += found.kl_by_position()
    assert any(kl < 0 for kl in raw)
    assert any(kl > 0 for kl in raw)
    assert {repr(kl) for kl in shown} == {"0.0"}
    moved = logits + 1e-6 * torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    assert distance_of(logits, moved).kl_per_token == pytest.approx(4e-13, rel=1)
