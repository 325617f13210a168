"""How much a proof compares, unless somebody says otherwise, and that batches change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import growkit
from growkit.checkpoint.reading import Checkpoint
from growkit.engine import calls
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.strict import strict_float64
from growkit.settings import FEW, LONG, MANY, SHORT
from tests.conftest import save_model

LONGEST = 80


def grown(folder: Path, **verify: Any) -> tuple[Path, Path, Any]:
    source = save_model(folder / "source", "llama", max_position_embeddings=LONGEST)
    settings = growkit.Settings(**verify)
    return (
        source,
        folder / "out",
        growkit.grow(source, folder / "out", hidden="x2", verify=settings),
    )


def tokens(result: Any) -> int:
    assert result["kept"]
    return int(result["tokens"])


def test_few_tokens_do_where_no_weight_can_be_lost(tmp_path: Path) -> None:
    source, target, result = grown(tmp_path)
    assert tokens(result["verification"]) == FEW * SHORT
    assert tokens(growkit.verify(source, target)) == FEW * SHORT
    assert tokens(growkit.verify(source, target, prompts=2)) == 2 * SHORT
    assert tokens(growkit.verify(source, target, length=12)) == FEW * 12
    assert tokens(growkit.verify(source, target, prompts=1, length=LONG)) == LONGEST


def test_many_tokens_are_taken_without_a_manifest(tmp_path: Path) -> None:
    source, target, _ = grown(tmp_path, prompts=1, length=12)
    (target / "growkit.json").unlink()
    assert tokens(growkit.verify(source, target)) == MANY * LONGEST


def test_many_tokens_are_taken_where_a_weight_is_lost(tmp_path: Path) -> None:
    source, target, _ = grown(tmp_path, prompts=1, length=12)
    manifest = json.loads((target / "growkit.json").read_text())
    manifest["recipe"]["steps"][0]["hidden"] = "x4"
    (target / "growkit.json").write_text(json.dumps(manifest))
    result = growkit.verify(source, target)
    assert not result["kept"]
    assert result["tokens"] == MANY * LONGEST


@pytest.mark.parametrize("kind", ["llama", "mistral", "diffllama", "diff_transformer"])
def test_a_batch_gives_what_its_prompts_give_alone(
    kind: str, make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Checkpoint(make(kind))
    prompts = [Call(each) for each in torch.randint(29, (5, 7), generator=torch.manual_seed(0))]
    mask = torch.ones(1, 7, dtype=torch.long)
    places = [torch.arange(begin, begin + 7)[None] for begin in (0, 4)]
    placed = [Call(prompts[0].ids, {"position_ids": p, "attention_mask": mask}) for p in places]

    def states(together: int) -> list[torch.Tensor]:
        monkeypatch.setattr(calls, "TOGETHER", together)
        with strict_float64():
            layerwise = Layerwise(model, torch.float64, torch.device("cpu"), None)
            *_, last = layerwise.stages([*prompts, *placed])
            assert bool(layerwise._batches) == (together > 7)
        return list(last.after)

    alone = states(1)
    for together in (14, 21, 512):
        for one, other in zip(alone, states(together), strict=True):
            assert one.shape == other.shape
            assert float((one - other).abs().max()) < 1e-12 * float(one.abs().max())
    assert not alone[0].equal(alone[1])
