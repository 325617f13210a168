"""The examples run: a training goes on with Trainer, is taken up again, and with adapters."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import growkit
from growkit.demo.story import MODEL
from growkit.demo.text import held_out_text
from tests.conftest import save_model

pytest.importorskip("accelerate")
from examples.continue_training import main

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument:UserWarning", "ignore:`is_gradient_checkpointing`:FutureWarning"
)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    sizes = {"vocab_size": 256, "max_position_embeddings": 256, "num_hidden_layers": 1}
    source = save_model(tmp_path / "source", "llama", **sizes)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, source)
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
