"""An output gate for attention, judged by the class that has it in strict float64."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import growkit
from growkit import ConvertStep, GrowStep, Recipe
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from tests.families import FAMILIES
from tests.files import edit_weights
from tests.models import load_strict, relative_error, save_model, save_random, seeded

QUICK = growkit.Settings(prompts=2, length=24, trainability=True)


def qwen3(folder: Path, seed: int, dtype: torch.dtype = torch.float32, **more: Any) -> Path:
    """A random Qwen3, with all that its class can have but windows."""
    choose = seeded(seed)
    config = FAMILIES["qwen3"].any(choose) | {"use_sliding_window": False} | more
    if choose.random() < 0.5:
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        config["rope_parameters"] = rope | {"rope_theta": 1e4}
    return save_random(folder, CONFIG_MAPPING["qwen3"](**config), seed, dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(8))
def test_an_output_gate_changes_nothing_and_learns_at_once(seed: int, tmp_path: Path) -> None:
    source, out = qwen3(tmp_path / "source", seed, torch.bfloat16), tmp_path / "out"
    found = growkit.convert(source, out, "output-gate", dtype="float32", verify=QUICK)
    assert found["kept"]
    assert found["promise"] == "exact"
    assert found["verification"].sections.weights.recovered is True
    assert relative_error(source, out) < 1e-12
    model = load_strict(out)
    ids = torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(seed))
    with strict_float64():
        model(ids, labels=ids).loss.backward()
    for layer in model.model.layers:
        matrix = layer.self_attn.q_proj.weight
        heads = model.config.num_attention_heads
        gate, gradient = (each.unflatten(0, (heads, 2, -1))[:, 1] for each in (matrix, matrix.grad))
        assert not gate.any()
        assert float(gradient.abs().amax(-1).min()) > 1e-9  # every row
    with edit_weights(out) as weights:
        weights["model.layers.1.self_attn.o_proj.weight"].mul_(0.5)
    assert relative_error(source, out) > 1e-3  # the control
    assert not growkit.verify(source, out, QUICK)["kept"]


def test_an_output_gate_is_undone(tmp_path: Path) -> None:
    source, out, back = qwen3(tmp_path / "source", 0), tmp_path / "out", tmp_path / "back"
    growkit.convert(source, out, "output-gate", verify=False)
    assert growkit.shrink(out, back, verify=QUICK)["kept"]
    assert relative_error(source, back) == 0


def test_norms_of_an_output_gate_round_only_if_asked(tmp_path: Path) -> None:
    source, out = qwen3(tmp_path / "source", 0, torch.bfloat16), tmp_path / "out"
    with edit_weights(source) as weights:
        for name in (each for each in weights if each.endswith("norm.weight")):
            weights[name].clamp_(0.5, 1.5)
        weights["model.norm.weight"][0] = 0.0999
    for dry in (True, False):
        with pytest.raises(InputError, match=r"model\.norm\.weight .*--promise bounded"):
            growkit.convert(source, out, "output-gate", verify=QUICK, dry_run=dry)
    found = growkit.convert(source, out, "output-gate", promise="bounded", verify=QUICK)
    assert found["kept"]
    assert found["promise"] == "bounded"
    assert 0 < relative_error(source, out) < 0.1


def test_a_norm_that_an_earlier_step_halves_is_refused_in_the_plan(tmp_path: Path) -> None:
    """That before a tied head; after the gate, the step is exact."""
    source = save_model(tmp_path / "source", "qwen3", tie_word_embeddings=True)
    gate, wider = ConvertStep("output-gate", {}), GrowStep("hypercloning", {"hidden": "x2"})
    recipe = Recipe(str(source), (wider, gate), str(tmp_path / "out"), QUICK)
    for plan in (growkit.plan, partial(growkit.run, dry_run=True)):
        with pytest.raises(
            InputError, match=r"model\.norm\.weight .* this rounds in torch\.float32"
        ):
            plan(recipe)
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_bytes((source / "config.json").read_bytes())
    assert "values of 9 tensors" in growkit.plan(replace(recipe, source=str(alone)))["warnings"][-1]
    assert growkit.run(replace(recipe, steps=(gate, wider)))["kept"]
