"""Models of all kinds: a sound pair is preserved or refused in a sentence, a fault is caught."""

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import growkit
from growkit.base.errors import InputError
from growkit.base.settings import Settings
from tests import architectures
from tests.architectures import TYPES, outcome, save, with_fault
from tests.conftest import edit_json, listed, save_model
from tests.test_families import ROPES

ACTIVATIONS = ("silu", "gelu", "relu", "gelu_pytorch_tanh", "tanh", "relu2", "mish", "sigmoid")
SCALES = (0.0, 1e-6, 1e-3, 1.0, 1.0, 1.0, 30.0)
DTYPES = (torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)


def odd_config(pick: random.Random, kind: str) -> dict[str, Any]:
    """Keys of a config that no model has, yet."""
    kv_heads = pick.choice([1, 1, 2])
    heads = kv_heads * pick.choice([1, 2, 3]) if kind in ("llama", "mistral") else 2 * kv_heads
    keys: dict[str, Any] = {
        "vocab_size": pick.choice([1, 2, 3, 29, 29]),
        "hidden_size": heads * pick.choice([1, 2, 4]),
        "intermediate_size": pick.choice([1, 3, 8]),
        "num_hidden_layers": pick.choice([1, 1, 2, 3]),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads if kind in ("llama", "mistral") else 2 * kv_heads,
        "head_dim": pick.choice([2, 4, 6]),
        "max_position_embeddings": pick.choice([2, 3, 16, 64, 100_000]),
        "tie_word_embeddings": pick.random() < 0.4,
        "hidden_act": pick.choice(ACTIVATIONS),
        "rms_norm_eps": pick.choice([1e-6, 1e-5, 1e-2]),
        "initializer_range": pick.choice([0.0, 0.02]),
        "use_cache": pick.choice([True, True, False]),
        "pad_token_id": pick.choice([None, 0, -1]),
        "eos_token_id": pick.choice([None, 0, [0, 1]]),
        "rope_parameters": pick.choice([None, *ROPES[1:]]),
    }
    if kind == "diff_transformer":
        keys["num_noise_heads"] = heads // 2
    if kind in ("llama", "mistral"):  # DIFF models have none
        keys["attention_dropout"] = pick.choice([0.0, 0.3])
    if kind == "mistral":
        keys["sliding_window"] = pick.choice([None, 1, 3, 40])
    elif kind != "diff_transformer":
        keys["attention_bias"] = pick.random() < 0.5
    return {key: value for key, value in keys.items() if value is not None or "token" in key}


def odd_model(seed: int, folder: Path) -> str:
    """Save an odd model; what it is."""
    pick = random.Random(seed)
    kind = pick.choice(["llama", "mistral", "diffllama", "diff_transformer"])
    config, scale, dtype = odd_config(pick, kind), pick.choice(SCALES), pick.choice(DTYPES)
    save_model(folder, kind, seed, dtype, **config)
    file = folder / "model.safetensors"
    if scale != 1:
        part = pick.choice(["", "lm_head", "embed_tokens", "layers.0", "norm"])
        scaled = {
            name: tensor * scale if part in name else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(scaled, file, {"format": "pt"})
    with edit_json(folder / "config.json") as written:
        for key in ("dtype", "architectures", "transformers_version", "use_cache"):
            if pick.random() < 0.2:
                written.pop(key, None)
        if pick.random() < 0.2:
            written["_attn_implementation"] = "eager"
    return f"{kind} {scale} {dtype} {config}"


def odd_outcome(seed: int, folder: Path) -> tuple[str, str]:
    """What growkit says of an odd model that it grows, and what the model is."""
    try:
        what = odd_model(seed, folder / "source")
    except (ArithmeticError, ValueError, TypeError) as error:  # the class itself does not take it
        return f"not sound: {error}", ""
    pick = random.Random(seed)
    sizes = pick.choice([{"hidden": "x2"}, {"hidden": "x3"}, {"ffn": "x2"}])
    symmetry = pick.choice(["break", "keep"])
    try:
        result = growkit.grow(
            folder / "source",
            folder / "target",
            symmetry=symmetry,
            seed=seed,
            verify=Settings(prompts=2, length=12),
            **sizes,
        )
    except InputError as error:
        written = [each.name for each in folder.iterdir() if each.name != "source"]
        return f"refused{' LATE ' + str(written) if written else ''}: {error}", what
    return result["verification"]["reason"], what


KINDS = listed("architectures", "kinds")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.sampled(1)
def test_a_copy_is_preserved_and_a_fault_is_caught(kind: str, tmp_path: Path) -> None:
    if kind not in TYPES:
        pytest.skip(f"transformers has no {kind}")
    source = save(kind, tmp_path / "source")
    shutil.copytree(source, tmp_path / "copy")
    assert outcome(source, tmp_path / "copy").startswith("preserved")
    assert with_fault(source, tmp_path / "spoiled")
    assert outcome(source, tmp_path / "spoiled").startswith("not preserved")


@pytest.mark.usage
def test_experts_are_saved_and_generate(tmp_path: Path) -> None:
    source = save("mixtral", tmp_path / "source")
    modes = {
        mode["name"]: mode
        for mode in growkit.verify(source, source, prompts=2).sections.modes.modes
    }
    assert modes["generate"]["kept"] is True
    assert modes["save and reload"]["kept"] is True


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", TYPES)
def test_no_kind_gives_a_false_alarm(kind: str, tmp_path: Path) -> None:
    try:
        source = save(kind, tmp_path / "source")
    except Exception as error:  # what transformers itself cannot make
        pytest.skip(f"{kind}: {error}")
    shutil.copytree(source, tmp_path / "copy")
    found = outcome(source, tmp_path / "copy")
    assert found.startswith(("preserved", "refused"))
    if found.startswith("preserved") and with_fault(source, tmp_path / "spoiled"):
        assert not outcome(source, tmp_path / "spoiled").startswith("preserved")


def test_what_text_does_not_reach_is_named(tmp_path: Path) -> None:
    if "git" not in TYPES:
        pytest.skip("transformers has no git")
    source = save("git", tmp_path / "source")
    assert "holds weights that text does not reach" in outcome(source, source)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(200))
def test_odd_but_sound_models_are_preserved(seed: int, tmp_path: Path) -> None:
    said, what = odd_outcome(seed, tmp_path)
    assert said.startswith(("preserved", "not sound", "refused: the model in")), (said, what)


def test_sizes_fit_types() -> None:
    assert set(architectures.KINDS) <= set(TYPES) | {"blt"}
