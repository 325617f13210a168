"""Without a manifest: what no prompt shows, because it takes long texts, or rare words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CONFIG_MAPPING, AutoTokenizer

import growkit
from growkit.checkpoint.folder import Folder
from growkit.engine.oracle import resolved
from growkit.engine.user_family import temporary_family
from growkit.proof.config import different_settings, not_compared
from growkit.proof.sidecars import same_ids
from tests.conftest import save_random
from tests.test_other_settings import MODEL
from tests.test_without_manifest import QUICK, Make, change, found

TABLES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("n_positions", "wpe", {"n_embd": 16, "n_head": 4, "n_layer": 2}),
    "opt": (
        "max_position_embeddings",
        "embed_positions",
        {
            "hidden_size": 16,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "ffn_dim": 24,
            "word_embed_proj_dim": 16,
        },
    ),
}
DESCRIBED: dict[str, Any] = {
    "family": "Mine",
    "model_type": "mine",
    "sizes": {
        "n_tokens": "vocab",
        "width": "hidden",
        "depth": "layers",
        "longest": "positions",
        "farthest": "reach",
    },
    "tensors": {
        "wte.weight": "vocab -> hidden",
        "wpe.weight": "positions -> hidden",
        "h.{layer}.norm.weight": "hidden",
    },
}
NO_IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
MERGES = ["z q", "q w"]


def bare(folder: Path) -> Path:
    """A folder that says nothing of how it was made."""
    for name in ("growkit.json", "README.md"):
        (folder / name).unlink()
    return folder


@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("kind", TABLES)
def test_positions_in_a_table(kind: str, rows: int, tmp_path: Path) -> None:
    key, table, sizes = TABLES[kind]
    known = {key: 64, "vocab_size": 29, "bos_token_id": None, "eos_token_id": None}
    source = save_random(tmp_path / "source", CONFIG_MAPPING[kind](**sizes, **known))
    target = tmp_path / "target"
    growkit.grow(source, target, hidden="x2", verify=False)
    file = bare(target) / "model.safetensors"
    weights = load_file(file)
    (name,) = (name for name in weights if table in name)
    extra = len(weights[name]) - 64
    weights[name] = torch.cat([weights[name], weights[name]])[: rows + extra].contiguous()
    save_file(weights, file, {"format": "pt"})
    change(target, **{key: rows})
    assert found(source, target)[0] == (() if rows == 64 else (f"{key} in config.json",))
    if kind == "gpt2":
        assert growkit.verify(source, target, **QUICK)["kept"] == (rows == 64)


@pytest.mark.parametrize(
    ("key", "changed"), [("hidden_size", []), ("width", ["width"]), ("longest", ["longest"])]
)
def test_a_description_makes_no_setting_a_size(key: str, changed: list[str]) -> None:
    config = {"model_type": "mine", "hidden_size": 8, **dict.fromkeys(DESCRIBED["sizes"], 8)}
    with temporary_family(DESCRIBED):
        assert different_settings(config, config) == ([], [])
        assert different_settings(config, config | {key: 16}) == (changed, [])


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("window", [None, 4096])
def test_the_window_that_a_class_assumes(
    window: int | None, layers: int, make: Make, tmp_path: Path
) -> None:
    source = make("llama", max_position_embeddings=16384)
    target = tmp_path / "target"
    growkit.grow(source, target, method="depth", layers=layers + 1, verify=False)
    if layers == 2:
        shutil.copy(source / "config.json", target)
        shutil.copy(source / "model.safetensors", target)
    bare(target)
    config = json.loads((target / "config.json").read_text())
    assert CONFIG_MAPPING["mistral"]().sliding_window == 4096
    said = {} if window else {"sliding_window": None}
    names = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    (target / "config.json").write_text(json.dumps(config | names | said))
    result = growkit.verify(source, target, **QUICK)
    assert result["kept"] == (window is None), result["reason"]
    assert ("sliding_window in config.json" in result["reason"]) == (window is not None)


def test_what_a_class_assumes_of_long_texts_is_named() -> None:
    llama, other = resolved({"model_type": "llama"}), resolved({"model_type": "gpt_neo"})
    assert llama is not None
    assert other is not None
    assert "window_size" in not_compared(llama, other)
    assert "window_size" not in not_compared(llama | {"window_size": 256}, other)
    assert "classifier_dropout" not in not_compared(llama, other)


def vocabulary(folder: Path, kind: str) -> Path:
    """A tokenizer of bytes and two merges, whose order shows in one word alone."""
    folder.mkdir()
    tokens = ["<|endoftext|>", *sorted(ByteLevel.alphabet()), "zq", "qw", "zq@@", "qw@@"]
    (folder / "vocab.json").write_text(json.dumps({t: i for i, t in enumerate(tokens)}))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    special = dict.fromkeys(("unk_token", "eos_token", "bos_token"), "<|endoftext|>")
    change(folder, "tokenizer_config.json", tokenizer_class=kind, **special)
    return merged(folder, MERGES)


def merged(folder: Path, merges: list[str]) -> Path:
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    return folder


def saved_again(source: Path, target: Path) -> Path:
    AutoTokenizer.from_pretrained(source).save_pretrained(target)
    shutil.copy(source / "config.json", target)
    return target


@pytest.mark.parametrize(
    ("kind", "said"),
    [("GPT2Tokenizer", "the way from texts to ids"), ("CTRLTokenizer", "merges.txt")],
)
@pytest.mark.parametrize("again", [shutil.copytree, saved_again])
def test_merges_in_another_order(
    again: Callable[[Path, Path], Path], kind: str, said: str, tmp_path: Path
) -> None:
    source = vocabulary(tmp_path / "source", kind)
    same = again(source, tmp_path / "same")
    assert same_ids(Folder(source), Folder(same)) == (None, None)
    turned = merged(shutil.copytree(source, tmp_path / "turned"), MERGES[::-1])
    other = again(turned, tmp_path / "other")
    assert same_ids(Folder(source), Folder(other)) == (said, None)


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({}, []),
        ({"no_rope_layers": [1, 1, 0]}, []),
        ({"no_rope_layers": [0, 0]}, None),
        ({"eos_token_id": [2, 3]}, ["eos_token_id in config.json"]),
    ],
)
def test_more_entries_than_layers(
    changes: dict[str, Any], changed: list[str] | None, tmp_path: Path
) -> None:
    given = {"num_hidden_layers": 1, "no_rope_layers": [1, 0], "eos_token_id": [2]}
    config = CONFIG_MAPPING["smollm3"](**MODEL | given)
    source = save_random(tmp_path / "source", config)
    target = tmp_path / "target"
    growkit.grow(source, target, method="depth", layers=2, verify=False)
    change(bare(target), **changes)
    if changed is not None:
        assert [*found(source, target)[0]] == changed
    assert growkit.verify(source, target, **QUICK)["kept"] == (changed == [])
