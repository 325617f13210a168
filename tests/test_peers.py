"""What others grow, rebuilt by hand; and models of which growkit knows nothing but their logits."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GemmaConfig, LlamaConfig
from typer.testing import CliRunner

import growkit
from growkit.cli.app import app
from tests import families
from tests.conftest import save_random as save

QUICK = {"prompts": 2, "length": 12}

SIZES: dict[str, Any] = families.SIZES | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "head_dim": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}
GROWN = SIZES | {
    key: 2 * SIZES[key]
    for key in ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
}


def hypercloned(name: str, weight: Tensor) -> Tensor:
    """The published rule for what is twice as wide, without noise (arXiv 2409.12903, section 3).

    A linear layer becomes [[W/2, W/2], [W/2, W/2]]; embeddings, norms and biases are repeated.
    """
    if weight.dim() == 1:
        return weight.repeat(2)
    if "embed_tokens" in name:
        return weight.repeat(1, 2)
    return weight.repeat(1 if "lm_head" in name else 2, 2) / 2


def hyperclone(source: Path, folder: Path, config: Any, faults: Mapping[str, float]) -> Path:
    """Grow by the published rule; tensors whose names end like a fault's are multiplied by it."""
    model = AutoModelForCausalLM.from_config(config).double()  # no factor is rounded
    state = {}
    for name, weight in AutoModelForCausalLM.from_pretrained(source).state_dict().items():
        factor = next((f for end, f in faults.items() if name.endswith(end)), 1.0)
        state[name] = hypercloned(name, weight.double()) * factor
    model.load_state_dict(state)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save(tmp_path / "llama", LlamaConfig(**SIZES))


def test_what_hypercloning_makes_is_preserved(llama: Path, tmp_path: Path) -> None:
    grown = hyperclone(llama, tmp_path / "grown", LlamaConfig(**GROWN), {})
    result = growkit.verify(llama, grown, **QUICK)
    assert result["kept"]
    assert result["weights_recovered"] is None
    assert "weights were not compared" in result["reason"]
    assert result["negative_control_caught"]
    assert result["fault"] is None
    assert all(mode["kept"] is not False for mode in result["modes"])


def test_a_head_that_is_split_once_too_often(llama: Path, tmp_path: Path) -> None:
    """As in hypercloning's OPT, whose head is tied, and split nevertheless: half of all logits."""
    faults = {"lm_head.weight": 0.5}
    grown = hyperclone(llama, tmp_path / "grown", LlamaConfig(**GROWN), faults)
    result = growkit.verify(llama, grown, **QUICK)
    assert not result["kept"]
    assert result["fault"] is not None
    assert result["first_difference"] == "lm_head"
    assert result["fault"]["factor"] == pytest.approx(0.5)


@pytest.mark.parametrize(("factor", "kept"), [(1.0, False), (0.5**0.5, True)])
def test_a_normaliser_that_grows(factor: float, kept: bool, tmp_path: Path) -> None:
    """Gemma multiplies embeddings by √hidden; they must be divided by √2 for twice the width."""
    source = save(tmp_path / "source", GemmaConfig(**SIZES))
    faults = {"embed_tokens.weight": factor}
    grown = hyperclone(source, tmp_path / "grown", GemmaConfig(**GROWN), faults)
    result = growkit.verify(source, grown, **QUICK)
    assert result["kept"] is kept
    if not kept:
        assert result["fault"] is not None
        assert result["fault"]["component"] == "embedding"


GPT: dict[str, Any] = {"vocab_size": 29, "n_embd": 16, "n_layer": 3, "n_head": 4, "n_positions": 64}


def test_names_without_the_prefix_of_the_class(tmp_path: Path) -> None:
    """Many a file on the Hub holds the tensors of the base model."""
    source = save(tmp_path / "source", transformers.GPT2Config(**GPT))
    copy = shutil.copytree(source, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    renamed = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, copy / "model.safetensors", {"format": "pt"})
    assert growkit.verify(source, copy, **QUICK)["kept"]
    renamed.pop("h.1.mlp.c_fc.weight")
    save_file(renamed, copy / "model.safetensors", {"format": "pt"})
    sentence = refused(source, copy)
    assert "h.1.mlp.c_fc.weight" in sentence


def test_what_has_no_layers_to_run_alone_is_refused(tmp_path: Path) -> None:
    config = transformers.XLMConfig(
        vocab_size=29, emb_dim=16, n_layers=2, n_heads=2, max_position_embeddings=64
    )
    source = save(tmp_path / "source", config)
    assert "XLMWithLMHeadModel" in refused(source, shutil.copytree(source, tmp_path / "copy"))


def test_encoders_with_decoders_are_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=29, d_model=16, d_ff=24, num_layers=2, num_heads=4, d_kv=4
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path / "source")
    sentence = refused(tmp_path / "source", shutil.copytree(tmp_path / "source", tmp_path / "copy"))
    assert "type t5" in sentence


def refused(source: Path, target: Path, *arguments: str) -> str:
    """The one sentence with which ``growkit verify`` ends."""
    result = CliRunner().invoke(app, ["verify", str(source), str(target), *arguments])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line
