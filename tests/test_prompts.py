"""How much a proof compares, unless somebody says otherwise, and that batches change nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import growkit
from growkit.base.settings import FEW, LONG, MANY, MOST_PROMPTS, SHORT
from growkit.checkpoint.reading import Checkpoint
from growkit.engine import calls, prompts
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.strict import strict_float64
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


def test_many_tokens_are_taken_where_a_weight_is_lost_or_no_manifest_says(tmp_path: Path) -> None:
    source, target, _ = grown(tmp_path, prompts=1, length=12)
    file = target / "growkit.json"
    manifest = json.loads(file.read_text())
    manifest["recipe"]["steps"][0]["hidden"] = "x4"
    file.write_text(json.dumps(manifest))
    result = growkit.verify(source, target)
    assert (result["kept"], result["tokens"]) == (False, MANY * LONGEST)
    file.unlink()
    assert tokens(growkit.verify(source, target)) == MANY * LONGEST


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
            assert bool(layerwise._forward.batches) == (together > 7)
        return list(last.after)

    alone = states(1)
    for together in (14, 21, 512):
        for one, other in zip(alone, states(together), strict=True):
            assert one.shape == other.shape
            assert float((one - other).abs().max()) < 1e-12 * float(one.abs().max())
    assert not alone[0].equal(alone[1])


@pytest.mark.parametrize("seed", range(12))
def test_windows_are_those_of_a_text_that_is_cut_up(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against torch's own way to split; what is not chosen never becomes a tensor."""
    generator = random.Random(seed)
    lengths = [generator.choice([0, 1, 2, 3, generator.randrange(40)]) for _ in range(9)] + [20]
    ids = [torch.randint(50, (each,)) for each in lengths]
    monkeypatch.setattr(prompts, "_tokenize", lambda parts, folder: ids)
    (tmp_path / "text").write_text("text")
    length, count = generator.randrange(2, 9), generator.randrange(1, 30)
    settings = growkit.Settings(text=str(tmp_path / "text"), prompts=count, length=length)
    found = prompts.make_prompts(settings, tmp_path, {"vocab_size": 50}).windows
    parts = [part for each in ids for part in each.split(length) if len(part) > 1]
    assert len(found) == min(count, len(parts))
    at = [(2 * i + 1) * len(parts) // (2 * len(found)) for i in range(len(found))]
    assert all(one.equal(parts[i]) for one, i in zip(found, at, strict=True))


def test_more_prompts_than_can_be_held_are_refused() -> None:
    with pytest.raises(growkit.InputError, match="at most 65,536 prompts"):
        growkit.Settings(prompts=1_000_000, length=2)
    growkit.Settings(prompts=MOST_PROMPTS, length=2)
