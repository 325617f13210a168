"""The examples run: a training goes on with Trainer, is taken up again, and with adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import growkit
from growkit.cli.demo import held_out_text
from tests.conftest import save_model, with_tokenizer

pytest.importorskip("accelerate")
from examples import grow_on_many_ranks
from examples.continue_training import main
from tests.fsdp import on_two

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument:UserWarning", "ignore:`is_gradient_checkpointing`:FutureWarning"
)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    sizes = {"vocab_size": 256, "max_position_embeddings": 256, "num_hidden_layers": 1}
    source = with_tokenizer(save_model(tmp_path / "source", "llama", **sizes))
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    (tmp_path / "text").write_text(held_out_text()[:2000], encoding="utf-8")
    files = [str(tmp_path / name) for name in ("out", "text", "run")]
    return [*files, "--cpu", "--batch", "1", "--lr", "1e-2", "--save-steps", "2"]


def test_continue_training(given: list[str], tmp_path: Path) -> None:
    at_once = main([*given, "--steps", "3"])
    assert at_once[-1] != at_once[0]
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    assert main([*given, "--steps", "3"]) == pytest.approx(at_once, abs=1e-6)
    assert (tmp_path / "run" / "trained" / "tokenizer.json").is_file()


def test_adapters_alone(given: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    main([*given, "--steps", "2", "--lora", "q_proj", "v_proj"])
    assert (tmp_path / "run" / "trained" / "adapter_model.safetensors").is_file()


RECIPE = """
source: {source}
output: {out}
steps: [{{grow: hypercloning, hidden: x2, ffn: x2}}]
verify: false
"""


def grown_by_ranks(recipe: str, output: str) -> int:
    grow_on_many_ranks.grow(recipe, Path(output))
    return dist.get_rank()


def test_ranks_save_what_one_process_writes(tmp_path: Path) -> None:
    """Held against the written folder as torch reads both; and with the control, a changed bit."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16, hidden_size=24)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(source=source, out=tmp_path / "whole"), encoding="utf-8")
    growkit.run(recipe)
    given = str(recipe), str(tmp_path / "out")
    assert on_two(grown_by_ranks, *given, scratch=tmp_path / "scratch") == [0, 1]
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    expected["model.norm.weight"].view(torch.int16)[3] ^= 1
    assert not torch.equal(found["model.norm.weight"], expected["model.norm.weight"])
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 2
    result = growkit.verify(tmp_path / "source", tmp_path / "out", prompts=1, length=8)
    assert result["kept"], result["reason"]
