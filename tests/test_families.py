"""Every family: random models of its class, grown, and judged by transformers in strict float64.

``python -m tests.families`` does the same with as many seeds as one likes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import growkit
from growkit.errors import InputError
from growkit.families.family import families
from tests.conftest import relative_error, seeded
from tests.families import FAMILIES, Case, grow_any, save

QUICK = growkit.Settings(prompts=1, length=16)


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_growth(kind: str, tmp_path: Path) -> None:
    seed = sorted(FAMILIES).index(kind)
    assert grow_any(kind, seed, tmp_path) < 1e-12


@pytest.mark.parametrize("kind", FAMILIES)
def test_its_proof_holds(kind: str, tmp_path: Path) -> None:
    """And a changed weight is another model: the control of the test above."""
    case = Case(FAMILIES[kind], seeded(sorted(FAMILIES).index(kind)))
    source, out = save(tmp_path / "source", case, 3), tmp_path / "out"
    grown = growkit.grow(source, out, verify=QUICK, **{case.first: f"x{case.least}"})
    assert grown["kept"], grown["verification"]
    tensors = load_file(out / "model.safetensors")
    name = max(tensors, key=lambda each: (tensors[each].dim() == 2, tensors[each].numel()))
    tensors[name].view(-1)[::2] *= 1.5
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert relative_error(source, out) > 1e-3
