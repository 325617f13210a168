"""The integral in linear time, against the exact one in float64.

An error is the largest of a row, over the root mean square of the row's output. It must stay below
a quarter of what rounding the exact output to bfloat16 does, in every row.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

import growkit
from growkit.cli.demo import MODEL
from growkit.extras.differential.checks import series as proof_series
from growkit.extras.differential.modeling import differential_attention
from growkit.extras.differential.modeling.differential_attention import (
    EXACT_ROWS,
    SignalHeads,
    Sums,
    causal_integral,
    column_sums,
    fused_attention,
    heavy_columns,
    integral_series,
)
from growkit.extras.differential.results.series_section import SeriesError
from growkit.results.proof_result import Finding
from tests.models import seeded
from tests.test_modeling import CACHED, VOCABULARY, build, distance, left_padded, tokens

SCALING = 0.3
GAMMA = torch.full((1, 1, 1, 1), 0.7)
ROWS_OF_BLOCK = 256
SHAPES = ("spread", "sink of 3", "sink of 6", "sink of 10", "hot column", "padded")
LATE = {
    "late column": lambda rows: [(258, rows)],
    "two in turn": lambda rows: [(258, rows), (259, rows)],
    "from 1,000 on": lambda rows: [(1000, rows)],
    "for a quarter": lambda rows: [(rows * 3 // 8, rows * 5 // 8)],
    "every 500 another": lambda rows: [(first, first + 500) for first in range(258, rows, 500)],
}
"""Columns that become hot after the series' first rows, each with the row after its last."""


@dataclass(frozen=True)
class Case:
    """Inputs, numbers of bfloat16 in float32, with the exact heads in float64.

    Attributes:
        query: [2, signal, rows, 16].
        key: [2, key heads, rows, 16].
        value: [2, key heads, rows, 24].
        real: false for padding.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    real: Tensor | None

    @cached_property
    def exact(self) -> Tensor:
        """(A₁ + γ softmax(G)) V in float64."""
        return self.heads(self.query.double(), self.key.double(), self.value.double())

    def heads(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.cat([found for found, _ in self.blocks(query, key, value)], 2)

    def gradients(self, gradient: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Of the exact heads, to queries, keys and values."""
        inputs = [
            each.detach().to(dtype).requires_grad_() for each in (self.query, self.key, self.value)
        ]
        return torch.autograd.grad(self.heads(*inputs), inputs, gradient.to(dtype))

    def blocks(self, query: Tensor, key: Tensor, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Some rows of the heads and of G at a time, which are computed again for gradients."""
        groups, rows = query.shape[1] // key.shape[1], query.shape[2]
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        sums = query.new_zeros(*query.shape[:2], 0)
        for first in range(0, rows, ROWS_OF_BLOCK):
            last = min(first + ROWS_OF_BLOCK, rows)
            given = query[:, :, first:last], key[:, :, :last], value[:, :, :last]
            heads, means, sums = checkpoint(self.block, *given, sums, use_reentrant=False)
            yield heads, means

    def block(self, query: Tensor, key: Tensor, value: Tensor, sums: Tensor) -> tuple[Tensor, ...]:
        """The last rows of these columns, after column sums of earlier rows."""
        last = key.shape[2]
        rows = torch.arange(last - query.shape[2], last)
        visible = torch.arange(last) <= rows[:, None]
        if self.real is not None:
            visible = visible & self.real[:, None, None, :last] & self.real[:, None, rows, None]
        maps = self.softmax(query @ key.mT * SCALING, visible)
        sums = functional.pad(sums, (0, query.shape[2]))[:, :, None] + maps.cumsum(-2)
        means = sums / visible.sum(-1, keepdim=True).clamp_min(1)
        weights = maps + GAMMA.to(maps.dtype) * self.softmax(means, visible)
        return weights @ value, means, sums[:, :, -1]

    @staticmethod
    def softmax(scores: Tensor, visible: Tensor) -> Tensor:
        return scores.masked_fill(~visible, -1e30).softmax(-1) * visible

    def series(self, *given: Tensor) -> Tensor:
        attend = partial(fused_attention, scaling=SCALING, past=0, real=self.real)
        return integral_series(SignalHeads(*given, GAMMA, SCALING, 0, self.real), attend)[0]

    @property
    def counts(self) -> Tensor:
        """Number of real columns so far, [batch or 1, rows]."""
        real = torch.ones(1, self.query.shape[2]) if self.real is None else self.real
        return real.cumsum(-1).long()

    def starts(self, query: Tensor, key: Tensor) -> Tensor:
        """The row from which on each column is exact, [batch, key heads, rows]."""
        rows, counts, real = query.shape[2], self.counts, self.real
        exact = int((counts <= EXACT_ROWS).any(0).sum())
        sums = column_sums(query[:, :, :exact], key, SCALING, 0, real)
        columns, starts = heavy_columns(query, key, SCALING, counts, real, sums)
        never = columns.new_full((*columns.shape[:2], rows + 1), rows)
        return never.scatter(2, columns, starts)[..., :rows]

    def errors(self, found: Tensor) -> Tensor:
        """Of all real rows."""
        exact = self.exact
        scale = exact.square().mean(-1).sqrt()
        errors = (found.double() - exact).abs().amax(-1) / scale.clamp_min(1e-30)
        return errors if self.real is None else errors[self.real[:, None].expand_as(errors)]

    @property
    def quarter(self) -> Tensor:
        """Of what rounding to bfloat16 does, in every row."""
        return self.errors(self.exact.bfloat16()) / 4


def drawn(seed: int, shape: str, rows: int | None = None) -> Case:
    choose, generator = seeded(seed), torch.Generator().manual_seed(seed)
    rows = rows or choose.choice([EXACT_ROWS + 1, 300, 333, 700, 1024, 1500])
    heads = choose.choice([1, 2])
    signal = heads * choose.choice([1, 2, 3])
    query = torch.randn(2, signal, rows, 16, generator=generator)
    key = torch.randn(2, heads, rows, 16, generator=generator)
    value = torch.randn(2, heads, rows, 24, generator=generator)
    real = None
    if shape == "padded":
        real = left_padded((2, rows), choose.randrange(1, 90), 0).bool()
    elif shape != "spread":
        height = 8.0 if shape == "hot column" else float(shape.rpartition(" ")[2])
        place = rows // 2 if shape == "hot column" else 0
        key[:, :, place] = 0
        key[:, :, place, 0], query[..., 0] = height / SCALING / 3, 3
    return Case(*(each.bfloat16().float() for each in (query, key, value)), real)


def long_text(shape: str, rows: int) -> Case:
    """A single text and head."""
    case = drawn(2, shape, rows)
    real = None if case.real is None else case.real[:1]
    return Case(case.query[:1], case.key[:1], case.value[:1], real)


def late(shape: str, rows: int, size: float = 1) -> Case:
    """The series at its worst: columns that become hot late, with values that many times as large.

    Half of the rows see little else than one of them; the others spread their weight, so that they
    are small.
    """
    case, generator = long_text("spread", rows), torch.Generator().manual_seed(0)
    query, key, value = (each.clone() for each in (case.query, case.key, case.value))
    hot, spans = torch.rand(rows, generator=generator) < 0.5, LATE[shape](rows)
    which, row = torch.rand(len(spans), rows, generator=generator), torch.arange(rows)
    for index, (first, last) in enumerate(spans):
        which[index, (row < first) | (row >= last)] = 0
        key[:, :, first], value[:, :, first] = 0, value[:, :, first] * size
        key[:, :, first, index % 8] = 8 / SCALING / 3
    largest, chosen = which.max(0)
    query[..., : min(len(spans), 8)] = 0
    seen = (hot & (largest > 0)).nonzero()[:, 0]
    query[:, :, seen, chosen[seen] % 8] = 3
    return Case(*(each.bfloat16().float() for each in (query, key, value)), None)


def of_bound(case: Case) -> Tensor:
    """The error of each row, [rows], over its bound, in float64, where nothing else rounds.

    Both integrals are means of values. In row n, r of some columns is left out of the weights, so
    that it is off by Σ r (V - H) / (n + 1 + Σ r), with Σ r ≤ (e - 2) Σ G² over these columns.
    """
    query, key, value = (each.double() for each in (case.query, case.key, case.value))
    found, group = case.series(query, key, value), query.shape[1] // key.shape[1]
    starts = case.starts(query, key).repeat_interleave(group, 1)[:, :, None]
    squares, first = [], 0
    for _, means in case.blocks(query, key, value):
        rows = torch.arange(first, first + means.shape[2])[:, None]
        left = means * (rows < starts[..., : means.shape[-1]])
        squares.append(left.square().sum(-1, keepdim=True))
        first += len(rows)
    extent = (value.amax(2) - value.amin(2)).repeat_interleave(group, 1)
    counts = case.counts[:, None, :, None]
    bound = torch.cat(squares, 2) * extent[:, :, None] / (counts + 1)
    bound = GAMMA.double() * (math.e - 2) * bound
    off = ((found - case.exact).abs() - 1e-12) / bound.clamp_min(1e-30)
    return (off if case.real is None else off * case.real[:, None, :, None]).amax((0, 1, 3))


def check(case: Case) -> None:
    """In float32 and bfloat16, with and without gradients."""
    given = case.query, case.key, case.value
    halves = [each.bfloat16() for each in given]
    exact, _ = causal_integral(SignalHeads(*halves, GAMMA, SCALING, 0, case.real), None)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            ours, narrow = case.series(*given), case.series(*halves)
        assert bool((case.errors(ours) < case.quarter).all())
        assert float(case.errors(narrow).max()) < 2 * float(case.errors(exact).max())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(12))
def test_the_series_is_the_integral(seed: int, shape: str) -> None:
    check(drawn(seed, shape))


@pytest.mark.sampled(1, "spread-4096")
@pytest.mark.parametrize("rows", [4096, 16384])
@pytest.mark.parametrize("shape", SHAPES)
def test_long_texts(shape: str, rows: int) -> None:
    case = long_text(shape, rows)
    check(case)
    assert float(of_bound(case).max()) < 1


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("shape", ["late column", "two in turn", "every 500 another"])
def test_columns_that_become_heavy_later(
    shape: str, size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = late(shape, 1100, size)
    given = case.query, case.key, case.value
    check(case)
    assert float(of_bound(case).max()) < 1
    sound = (case.errors(case.series(*given)) / case.quarter).max()
    monkeypatch.setattr(differential_attention, "INTERVAL_POWER", 2)  # looks for none later
    assert float((case.errors(case.series(*given)) / case.quarter).max()) > 3 * float(sound)


@pytest.mark.parametrize("shape", [*LATE, "sink of 6"])
def test_exact_rows_after_a_series(shape: str) -> None:
    case, rows = late(shape, 1100, 5) if shape in LATE else long_text(shape, 1100), 1050
    query, *given = case.query, case.key, case.value
    attend = partial(fused_attention, scaling=SCALING, past=0, real=None)
    before = (each[:, :, :rows] for each in (query, *given))
    heads, sums = integral_series(SignalHeads(*before, GAMMA, SCALING), attend)
    after = SignalHeads(query[:, :, rows:], *given, GAMMA, SCALING, rows)
    later, _ = causal_integral(after, sums)
    assert bool((case.errors(torch.cat([heads, later], 2)) < case.quarter).all())


def test_later_tokens_move_no_earlier_row() -> None:
    """A sink of the first rows alone, then nine hot columns, which are none for earlier rows."""
    case = drawn(3, "sink of 10", 1000)
    query, key, value = (each.clone() for each in (case.query, case.key, case.value))
    whole = case.series(query, key, value)
    query[:, :, 600:, 0], query[:, :, 600:, 1] = 0, 3
    key[:, :, 590:599] = 0
    key[:, :, 590:599, 1] = 10 / SCALING / 3
    other = Case(query, key, value, None)
    found = other.series(query, key, value)
    assert float((found - whole)[:, :, :590].abs().max()) < 1e-6
    assert float((found - whole)[:, :, 600:].abs().max()) > 1e-2
    assert bool((other.errors(found) < other.quarter).all())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_errors_are_below_their_bound(seed: int, shape: str) -> None:
    found = of_bound(drawn(seed, shape, 700))
    assert float(found[:EXACT_ROWS].max()) <= 0
    assert 0.01 < float(found.max()) < 1


def test_errors_beyond_their_bound_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact columns lose their r, which the bound does not allow."""
    monkeypatch.setattr(torch, "expm1", torch.clone)
    assert float(of_bound(drawn(1, "sink of 6", 700)).max()) > 2


def gradients(heads: Callable[..., Tensor], given: list[Tensor], real: Tensor | None) -> list[Any]:
    given = [each.clone().requires_grad_() for each in given]
    generator = torch.Generator().manual_seed(0)
    found = heads(*given)
    weights = torch.randn(found.shape, generator=generator).to(found.dtype)
    weights = weights if real is None else weights * real[:, None, :, None]
    (found * weights).sum().backward()
    return [each.grad for each in given]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_gradients(seed: int, shape: str) -> None:
    """Closer to the exact ones than a quarter of what rounding these to bfloat16 does."""
    case = drawn(seed, shape)
    given = [case.query, case.key, case.value]
    exact = gradients(case.heads, [each.double() for each in given], case.real)
    found = gradients(case.series, given, case.real)
    for expected, ours in zip(exact, found, strict=True):
        error, limit = ((each.double() - expected).norm() for each in (ours, expected.bfloat16()))
        assert float(error) < float(limit) / 4


# Models


def pair(variant: str, method: str = "series") -> tuple[Any, Any]:
    """The same model in float32, with the exact integral and with another method."""
    exact = build(**CACHED[variant], max_position_embeddings=1024).float()
    series = copy.deepcopy(exact)
    series.config.integral_method = method
    return exact, series


def logits(model: Any, ids: Tensor, mask: Tensor | None, crop: int = 0) -> Tensor:
    """Of all tokens: a long prompt, single tokens of which some are taken back, and the rest."""
    cache, found = DynamicCache(config=model.config), ids.new_zeros(*ids.shape, VOCABULARY).float()
    places = [0, 400, 401, 402, 402 - crop, ids.shape[1]]
    for first, last in pairwise(places):
        if last < first:
            cache.crop(last - first)
        elif last > first:
            seen = {} if mask is None else {"attention_mask": mask[:, :last]}
            with torch.no_grad():
                found[:, first:last] = model(ids[:, first:last], cache=cache, **seen).logits
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", ["dint", "gated dint", "shared dint"])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("crop", [0, 2, 40])
def test_models_with_a_cache(variant: str, padded: bool, crop: int) -> None:
    exact, series = pair(variant)
    ids, mask = tokens((2, 440)), left_padded((2, 440), 0, 30) if padded else None
    with torch.no_grad():
        whole = exact(ids, attention_mask=mask, use_cache=False).logits
    assert 1e-7 < distance(whole, logits(series, ids, mask, crop), mask) < 1e-3


def test_sums_without_their_rest_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    _, series = pair("dint")
    ids = tokens((2, 440))
    found = logits(series, ids, None)
    sums = differential_attention._sums
    monkeypatch.setattr(differential_attention, "_sums", lambda *a: sums(*a)._replace(rest=None))
    assert distance(found[:, 400:], logits(series, ids, None)[:, 400:]) > 1e-3


def test_when_the_series_is_taken() -> None:
    """Not in float64, nor for short texts, where ``auto`` and the exact integral are the same."""
    exact, series = pair("dint")
    ids = tokens((1, 300))
    with torch.no_grad():
        assert not torch.equal(exact(ids).logits, series(ids).logits)
        series.config.integral_method = "auto"
        assert torch.equal(exact(ids).logits, series(ids).logits)
        long = tokens((1, differential_attention.SHORTEST_SERIES))
        assert not torch.equal(exact(long).logits, series(long).logits)
        assert torch.equal(exact.double()(long).logits, series.double()(long).logits)


def test_the_proof_measures_the_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the demo model, whose first layer has a sink; with a fault, it is far off."""
    options: dict[str, Any] = {"gamma": "unified", "integral_method": "series", "verify": False}
    growkit.convert(MODEL, tmp_path / "dint", "dint", **options)
    settings = growkit.Settings(prompts=1, length=400)

    def measured() -> tuple[Finding, list[SeriesError]]:
        result = growkit.verify(tmp_path / "dint", tmp_path / "dint", settings)
        found = next(each for each in result.findings if each.name == "series")
        assert result["reason"].count(found.sentence) == 1
        assert result["kept"] is (found.kept is None)
        return found, result.sections.series.layers

    found, layers = measured()
    assert found.kept is None
    assert "400 tokens" in found.sentence
    assert [each.module for each in layers] == [f"model.layers.{index}" for index in range(4)]
    assert found.measured == max(each.error for each in layers)
    for each in layers:
        assert 1e-7 < each.error < each.rounding / 4
        assert 0 < each.of_bound < 1
    with monkeypatch.context() as patched:
        patched.setattr(differential_attention, "HEAVY_MEAN", 2)
        assert measured()[0].measured > 2 * found.measured

    sound = proof_series.integral_series

    def off(*given: Any) -> tuple[Tensor, Sums]:
        heads, sums = sound(*given)
        return heads * 1.001, sums

    with monkeypatch.context() as patched:
        patched.setattr(proof_series, "integral_series", off)
        broken, layers = measured()
    assert broken.kept is False
    assert "model.layers.0 by more than" in broken.sentence
    assert layers[0].of_bound > 1
    settings = growkit.Settings(prompts=1, length=100)
    found, layers = measured()
    assert "too few" in found.sentence
    assert {(each.error, each.of_bound) for each in layers} == {(0, 0)}


def test_an_integral_without_weight_is_within_its_bound(tmp_path: Path) -> None:
    """The gates of a model that was just converted are 0, and so is the bound."""
    out = tmp_path / "dint"
    growkit.convert(MODEL, out, "dint", gamma="gated", integral_method="series", verify=False)
    result = growkit.verify(out, out, growkit.Settings(prompts=1, length=400))
    assert [each.of_bound for each in result.sections.series.layers] == [0, 0, 0, 0]
