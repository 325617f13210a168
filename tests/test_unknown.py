"""What growkit does not know, or cannot use, is refused in one sentence that says what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import growkit

Make = Callable[..., Path]
Q = "model.layers.0.self_attn.q_proj."
GATE = "model.layers.0.mlp.gate_proj"
WORDS = torch.zeros(16, 2, dtype=torch.int32)
BYTES = torch.zeros(24, 1, 16, dtype=torch.uint8)
ONE = torch.ones(1)


def changed(source: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor | None]) -> Path:
    """The folder with other keys and tensors; None for one that goes."""
    (source / "config.json").write_text(
        json.dumps(json.loads((source / "config.json").read_text()) | config)
    )
    held = load_file(source / "model.safetensors") | tensors
    kept = {name: each for name, each in held.items() if each is not None}
    save_file(kept, source / "model.safetensors", {"format": "pt"})
    return source


@pytest.mark.parametrize(
    ("config", "tensors", "says"),
    [
        ({"model_type": "nobody"}, {}, "growkit inspect --infer"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {}, "dequantise it first"),
        ({"quantization_config": {}}, {}, "dequantise it first"),
        ({"compression_config": {"format": "pack-quantized"}}, {}, "dequantise it first"),
        ({}, {Q + "weight": None, Q + "qweight": WORDS, Q + "scales": ONE}, "dequantise it first"),
        ({}, {GATE + ".weight": None, GATE + "_blocks": BYTES}, "dequantise it first"),
        ({}, {Q + "weight_scale_inv": ONE}, "dequantise it first"),
        ({}, {Q + "weight": torch.zeros(128, 1, dtype=torch.uint8)}, "dequantise the model first"),
        ({}, {Q + "weight": None, Q + "W_q": BYTES}, "dequantise it first"),
        ({}, {Q + "lora_A.weight": ONE}, "has an adapter, merge that into it first"),
        ({}, {Q + "weight": None, Q + "base_layer.weight": ONE}, "merge that into it first"),
    ],
)
def test_what_cannot_be_grown(
    config: dict[str, Any],
    tensors: dict[str, torch.Tensor | None],
    says: str,
    make: Make,
    tmp_path: Path,
) -> None:
    source = changed(make("llama", attention_bias=False), config, tensors)
    with pytest.raises(growkit.InputError, match=says):
        growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("key", ["final_logit_softcapping", "attention_multiplier", "whatever"])
def test_forms_refuse_keys_that_they_do_not_know(key: str, make: Make, tmp_path: Path) -> None:
    """A class may read any key; one that is off changes nothing."""
    source = changed(make("llama", attention_bias=False), {key: 0.5}, {})
    with pytest.raises(growkit.InputError, match=f"{key} 0.5, which growkit does not know"):
        growkit.convert(source, tmp_path / "out", "diff-v2", verify=False)
    assert not (tmp_path / "out").exists()
    changed(source, {key: None}, {})
    assert growkit.convert(source, tmp_path / "out", "diff-v2", verify=False)["promise"] == "exact"
