"""Softmax models whose layers are more than Llama's become differential ones, and stay the same."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint.folder import read_json
from growkit.engine.strict import strict_float64
from tests.conftest import edit_json, load_strict, relative_error, save_model, save_random, seeded
from tests.families import coin, softmax

LIMIT = 1e-12

MULTIPLIERS = {
    "embedding_multiplier": 1.7,
    "residual_multiplier": 0.8,
    "attention_multiplier": 0.3,
    "logits_scaling": 1.3,
}
KINDS = {
    "qwen2": lambda c: softmax(c, head_dim=coin(c)),
    "qwen3": lambda c: softmax(c, "attention_bias"),
    "granite": lambda c: softmax(c, "attention_bias", "mlp_bias", head_dim=coin(c), **MULTIPLIERS),
}
"""Random configs, by ``model_type``."""


def save(kind: str, seed: int, folder: Path, **more: Any) -> Path:
    choose: Random = seeded(seed)
    config = CONFIG_MAPPING[kind](**(KINDS[kind](choose) | more))
    return save_random(folder, config, seed, choose.choice([torch.float32, torch.bfloat16]))


def convert(source: Path, out: Path, to: str, **options: Any) -> Any:
    return growkit.convert(source, out, to, verify=False, **options)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_becomes_differential(kind: str, seed: int, tmp_path: Path) -> None:
    source, out = save(kind, seed, tmp_path / "source"), tmp_path / "out"
    to = ("diff-v2", "diff")[seed]
    assert convert(source, out, to)["promise"] == "exact"
    assert relative_error(source, out) < LIMIT


@pytest.mark.parametrize("kind", KINDS)
def test_it_generates_the_same_from_its_cache(kind: str, tmp_path: Path) -> None:
    source, out, again = (tmp_path / name for name in ("source", "out", "again"))
    save(kind, 2, source)
    convert(source, out, "diff-v2")
    load_strict(out).save_pretrained(again)
    ids = torch.arange(1, 7)[None]
    texts = []
    for folder in (source, out, again):
        with strict_float64(), torch.no_grad():
            model = load_strict(folder)
            texts.append(model.generate(ids, max_new_tokens=12, do_sample=False).tolist())
            stepwise = model.generate(ids, max_new_tokens=12, do_sample=False, use_cache=False)
        assert texts[-1] == stepwise.tolist()
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_back(kind: str, tmp_path: Path) -> None:
    """As a DIFF Transformer without noise heads it is the same model, and all its tensors."""
    source, out, back = (tmp_path / name for name in ("source", "out", "back"))
    save(kind, 1, source)
    convert(source, out, "diff-transformer")
    convert(out, back, kind)
    assert relative_error(source, out) < LIMIT
    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize("kind", KINDS)
def test_it_grows_on(kind: str, tmp_path: Path) -> None:
    """Hidden and everything with it, and signal heads by themselves."""
    source, diff, wide, out = (tmp_path / name for name in ("source", "diff", "wide", "out"))
    save(kind, 0, source)
    convert(source, diff, "diff-v2")
    growkit.grow(diff, wide, hidden="x2", verify=False)
    growkit.grow(wide, out, method="group-diff", signal_heads="x2", verify=False)
    assert relative_error(source, out) < LIMIT


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("qwen3", "qk_norm", False),
        ("qwen2", "attention_output_bias", True),
        *(("granite", key, 2 * value) for key, value in MULTIPLIERS.items()),
    ],
)
def test_another_model_is_not_the_same(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    """What each of the keys does is seen in the logits, or in the tensors that there are."""
    source, out = save(kind, 0, tmp_path / "source"), tmp_path / "out"
    convert(source, out, "diff-v2")
    with edit_json(out / "config.json") as config:
        assert config[key] != value
        config[key] = value
    if isinstance(value, float):
        assert relative_error(source, out) > 1e-3
        return
    with pytest.raises(InputError, match=r"tensor|dropped|q_norm"):
        growkit.grow(out, tmp_path / "none", hidden="x2", verify=False)


WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("kind", "more", "to", "message"),
    [
        ("qwen3", WINDOW, "diff-v2", "layer of type 'sliding_attention'"),
        ("qwen3", {"thinking_budget": 3}, "diff-v2", "thinking_budget 3, which growkit does not"),
        ("granite", {"attention_multiplier": "0.3"}, "diff-v2", "attention_multiplier '0.3'"),
        ("granite", {"logits_scaling": -1.5}, "diff-v2", "logits_scaling -1.5"),
        ("qwen3", {}, "llama", "qk_norm True .it has False."),
        ("qwen2", {}, "llama", "attention_output_bias False .it has True."),
        ("granite", {}, "mistral", "residual_multiplier 0.8 .it has 1.0."),
    ],
)
def test_what_is_not_known_is_refused(
    kind: str, more: dict[str, Any], to: str, message: str, tmp_path: Path
) -> None:
    source = save(kind, 0, tmp_path / "source")
    with edit_json(source / "config.json") as config:
        config.pop("layer_types", None)
        config |= more
    with pytest.raises(InputError, match=message):
        convert(source, tmp_path / "out", to)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", ["llama", "diffllama", "motif"])
@pytest.mark.parametrize(("key", "value"), [("qk_norm", True), ("embedding_multiplier", 12.0)])
def test_others_do_not_have_the_keys(kind: str, key: str, value: Any, tmp_path: Path) -> None:
    """Their classes pass them over, so that a DIFF Transformer with them were another model."""
    source = save_model(tmp_path / "source", "llama" if kind == "llama" else "diffllama")
    if kind == "motif":
        convert(source, tmp_path / "motif", "motif")
        source = tmp_path / "motif"
    with edit_json(source / "config.json") as config:
        config[key] = value
    with pytest.raises(InputError, match=f"{key} {value}, which growkit does not know"):
        convert(source, tmp_path / "out", "diff-transformer")


@pytest.mark.parametrize("kind", KINDS)
def test_public_layouts_do_not_have_the_keys(kind: str, tmp_path: Path) -> None:
    source, diff = save(kind, 0, tmp_path / "source", attention_bias=False), tmp_path / "diff"
    convert(source, diff, "diff", head_norm="affine")
    for to in ("motif", "microsoft", "diffllama"):
        with pytest.raises(InputError, match=r"cannot express .*(qk_norm|_bias|_multiplier)"):
            convert(diff, tmp_path / to, to)


def test_what_was_made_before_is_as_it_was(tmp_path: Path) -> None:
    """A config without the keys means what it meant."""
    source = save_model(tmp_path / "source", "diff_transformer", attention_bias=True)
    keys = ["qk_norm", "attention_output_bias", *MULTIPLIERS]
    complete = load_strict(source).config.to_dict()
    with edit_json(source / "config.json") as config:
        for key in keys:
            del config[key]
    assert load_strict(source).config.to_dict() == complete
    assert [complete[key] for key in keys] == [False, True, 1.0, 1.0, 0.5, 1.0]
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert relative_error(source, tmp_path / "out") < LIMIT
    assert not {*keys} & read_json(tmp_path / "out" / "config.json").keys()
