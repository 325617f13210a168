"""Experts that are cast one at a time: the model computes and learns what it does with all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import growkit
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call, Spool
from growkit.engine.layerwise import Layerwise
from growkit.engine.lending import Stored
from growkit.engine.oracle import CPU, load_model
from growkit.engine.strict import strict_float64
from tests.architectures import TYPES, outcome, save, with_fault

KINDS = ["mixtral", "granitemoe", "gpt_oss", "deepseek_v3", "llama4_text"]
IDS = torch.randint(2, 60, (12,), generator=torch.Generator().manual_seed(0))


def run(folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of their cross-entropy, one layer at a time in strict float64."""
    gradients: dict[str, Tensor] = {}
    with strict_float64():
        model = Layerwise(Checkpoint(folder), torch.float64, CPU, "eager")
        given = Spool()
        for stage in model.stages([Call(IDS)]):
            given.append(stage.after[0])
        with model.head() as head:
            logits = head(stage.after[0])
        model.gradients(IDS, given, gradients.__setitem__)
    return logits, gradients


@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_gradients(kind: str, tmp_path: Path, small_parts: int) -> None:
    if kind not in TYPES:
        pytest.skip(f"transformers has no {kind}")
    folder = save(kind, tmp_path / "model")
    logits, found = run(folder)
    with strict_float64():
        model = load_model(folder, torch.float64, CPU, "eager")
        expected = model(IDS[None], use_cache=False).logits[0]
        functional.cross_entropy(expected[:-1], IDS[1:]).backward()
    assert (logits - expected).abs().max() <= 1e-13 * expected.abs().max()
    experts = {
        name: p for name, p in model.named_parameters() if p.dim() == 3 and "conv" not in name
    }
    assert experts
    for name, parameter in experts.items():
        assert parameter.grad is not None
        largest = parameter.grad.abs().max()
        assert (found[name] - parameter.grad).abs().max() <= 1e-12 * largest, name


@pytest.mark.parametrize(("kind", "all_at_once"), [("mixtral", False), ("llama4_text", True)])
def test_only_experts_that_are_asked_for_are_cast(
    kind: str, all_at_once: bool, tmp_path: Path, small_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Llama 4 multiplies with all of them together."""
    folder, together = save(kind, tmp_path / "model"), []
    counts: set[int] = set()
    whole, cast = Stored.whole, Stored.cast
    monkeypatch.setattr(
        Stored, "whole", lambda self: (self.ndim == 3 and together.append(self)) or whole(self)
    )
    monkeypatch.setattr(
        Stored,
        "cast",
        lambda self, rows, **o: counts.add(rows.stop - rows.start) or cast(self, rows, **o),
    )
    run(folder)
    assert 1 in counts
    assert bool(together) == all_at_once


@pytest.mark.parametrize("kind", ["mixtral", "granitemoe"])
def test_a_fault_is_caught(kind: str, tmp_path: Path, small_parts: int) -> None:
    source = save(kind, tmp_path / "source")
    assert outcome(source, source).startswith("preserved")
    assert growkit.verify(source, source, prompts=1, length=12)["negative_control_caught"]
    assert with_fault(source, tmp_path / "spoiled")
    assert outcome(source, tmp_path / "spoiled").startswith("not preserved")
