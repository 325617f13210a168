"""What shows only in texts that are longer than a prompt, or in what layers hand to later ones."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import growkit
from tests.architectures import save
from tests.files import edit_weights, listed
from tests.models import distance, load_strict, logits_of, same_bits

FEW = growkit.Settings(prompts=1, length=24)
TOP_K = {"index_topk": 64, "max_position_embeddings": 128}
BLOCKS = {"layer_types": ["full_attention", "minimax_m3_sparse"]}
LAYERS: dict[str, dict[str, Any]] = listed("long_texts", "layers")
"""Layers of models; in all but the last, later layers use what earlier ones have computed."""


def error(source: Path, target: Path) -> float:
    """How far the logits of a text longer than all thresholds are apart."""
    ids = torch.randint(64, (1, 96), generator=torch.Generator().manual_seed(0))
    before, after = (logits_of(load_strict(each), ids) for each in (source, target))
    return distance(before, after)


@pytest.mark.sampled(0)
@pytest.mark.parametrize(
    ("kind", "options"), listed("long_texts", "layers keep what others hand them")
)
def test_layers_keep_what_others_hand_them(
    kind: str, options: dict[str, str], tmp_path: Path
) -> None:
    source = save(kind, tmp_path / "source", **LAYERS[kind])
    assert growkit.grow(source, tmp_path / "out", verify=FEW, **options)["kept"]
    assert error(source, tmp_path / "out") < 1e-12


@pytest.mark.sampled(1, "deepseek_v32-indexer-settings0")
@pytest.mark.parametrize(
    ("kind", "part", "settings"),
    [
        ("deepseek_v32", "indexer", TOP_K),
        ("glm_moe_dsa", "indexer", LAYERS["glm_moe_dsa"]),
        ("minimax_m3_vl_text", "index", BLOCKS),
        ("qwen4_exp_text", "indexer", {"indexer_budget": 64}),
    ],
)
def test_weights_of_long_texts_are_compared(
    kind: str, part: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Without a manifest, only the logits show that they are others."""
    source = save(kind, tmp_path / "source", **settings)
    target = shutil.copytree(source, tmp_path / "target")
    with edit_weights(target) as tensors:
        for name in (name for name in tensors if part in name):
            tensors[name] = torch.randn_like(tensors[name])
    assert growkit.verify(source, source, FEW)["kept"]
    found = growkit.verify(source, target, FEW)
    assert [mode.name for mode in found.sections.modes.modes if mode.kept is False] == [
        "long texts"
    ]
    assert not found["kept"]


def test_prompts_reach_blocks_of_a_fixed_size(tmp_path: Path) -> None:
    """DeepSeek-V4 compresses 64 tokens with as many rows of weights, so that no fewer will do.

    Its class says that a table of experts holds whole numbers, so it stays; weights do not.
    """
    kinds = {"layer_types": 2 * ["heavily_compressed_attention"]}
    kinds["mlp_layer_types"] = ["hash_moe", "moe"]
    source, out = save("deepseek_v4", tmp_path / "source", **kinds), tmp_path / "out"
    rows, table = "model.layers.1.attn.compressor.ape", "model.layers.0.ffn.gate.tid2eid"
    result = growkit.grow(source, out, hidden="x2", verify=FEW)["verification"]
    assert result["kept"]
    assert "no logit" not in result["reason"]
    before, after = (load_file(each / "model.safetensors") for each in (source, out))
    assert same_bits(before[table], after[table])
    (out / "growkit.json").unlink()
    with edit_weights(out) as weights:
        weights[rows].mul_(1.1)
    assert not growkit.verify(source, out, FEW)["kept"]
    for name, dtype in ((table, torch.float32), (rows, torch.int64)):
        wrong = shutil.copytree(source, tmp_path / name)
        with edit_weights(wrong) as weights:
            weights[name] = weights[name].to(dtype)
        with pytest.raises(growkit.InputError, match=f"{name} .* has dtype"):
            growkit.grow(wrong, tmp_path / "other", hidden="x2", verify=False)


def test_weights_without_effect_are_named(tmp_path: Path) -> None:
    """A constant that is added to all keys changes no softmax."""
    source = save("opt", tmp_path / "source")
    reason = growkit.verify(source, source, FEW)["reason"]
    assert "k_proj.bias" in reason
    assert "no logit of these prompts depends on 1 kind of tensors" in reason


@pytest.mark.sampled(0)
@pytest.mark.parametrize("tokens", [20, 24])
def test_noise_breaks_no_tie_between_equal_tokens(tokens: int, tmp_path: Path) -> None:
    """Doge's first layer chooses tokens by their values, which are those of equal tokens alike."""
    source = save("doge", tmp_path / "source", keep_window_size=16)
    few = growkit.Settings(prompts=1, length=tokens)
    assert growkit.grow(source, tmp_path / "out", hidden="x2", verify=few)["kept"]
    with edit_weights(tmp_path / "out") as weights:
        weights["model.layers.0.self_attn.dt_proj.weight"].mul_(1.01)
    assert not growkit.verify(source, tmp_path / "out", few)["kept"]


@pytest.mark.sampled(0)
@pytest.mark.parametrize("options", [{"hidden": "x2"}, {"heads": "x2", "kv_heads": "x2"}])
def test_lower_settings_leave_buffers_of_files(options: dict[str, str], tmp_path: Path) -> None:
    """MiniMax's class computes other decays for more heads than the file holds, its old ones."""
    source, out = save("minimax", tmp_path / "source"), tmp_path / "out"
    assert growkit.grow(source, out, verify=FEW, **options)["kept"]
    assert error(source, out) < 1e-12
