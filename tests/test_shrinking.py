"""Growth that is undone: the same bits as long as nothing was trained, else the nearest model."""

import json
import re
import shutil
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import growkit
from growkit import GrowStep, Recipe
from tests import architectures
from tests.commands import refusal
from tests.families import (
    CONFIGS,
    DENSE,
    FAMILIES,
    IDENTITY,
    Config,
    coin,
    dense_config,
    save_lively,
)
from tests.files import edit_weights
from tests.models import random_ids, relative_error, same_bits, save_model, seeded

QUICK = growkit.Settings(prompts=2, length=24)


def random_growth(kind: str, config: Config, choose: Random) -> tuple[GrowStep, ...]:
    """One or two random steps that a model of a type can take."""
    symmetry = {"symmetry": choose.choice(["break", "keep"])}
    family = FAMILIES.get(kind)
    steps = [GrowStep("depth", {"layers": choose.choice(["x2", "x3/2"])})]
    if any(config.get(key, value) != value for key, value in IDENTITY.items()):
        steps.clear()  # no layer can return its input
    if family is None or family.ffn:
        steps.append(GrowStep("hypercloning", {"ffn": choose.choice(["x2", "x3"]), **symmetry}))
    if family is None or family.grows(config):
        factor = choose.choice(family.hidden if family else (2, 3))
        steps.append(GrowStep("hypercloning", {"hidden": f"x{factor}", **symmetry}))
    if kind in DENSE:
        pieces = choose.choice([1, 2, 4])
        steps.append(GrowStep("upcycle", {"experts": 8, "top_k": 4, "granularity": pieces}))
    elif any("experts" in key for key in config):
        steps.append(GrowStep("experts", {"experts": "x2", **symmetry}))
    if kind in ("diffllama", "diff_transformer"):
        steps.append(GrowStep("group-diff", {"hidden": "x2", "signal_heads": "x3", **symmetry}))
    steps.append(GrowStep("hypercloning", {"vocab": choose.choice([31, 64])}))
    return tuple(choose.sample(steps, choose.choice([1, 2])))


def assert_same_model(source: Path, back: Path) -> None:
    """Every tensor has the bits that it had, and every config key its value."""
    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    for config in (first, second):
        config.pop("auto_map", None)  # the code that growkit writes
        config.pop("num_nextn_predict_layers", None)  # no class runs them; growth leaves them out
    assert first == second


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", sorted({*CONFIGS, *DENSE}))
def test_a_growth_is_undone_bit_for_bit(kind: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config = dense_config(kind, choose) if kind in DENSE else CONFIGS[kind](choose)
    if isinstance(ranks := config.get("shared_rank"), list):
        config["num_hidden_layers"] = len(ranks)
    dtype = choose.choice([torch.float32, torch.bfloat16])
    source = save_lively(tmp_path / "source", kind, config, seed, dtype)
    grown, back = tmp_path / "grown", tmp_path / "back"
    steps = random_growth(kind, config, choose)
    wide = "float32" if coin(choose) else None
    growkit.run(Recipe(str(source), steps, str(grown), False, seed=seed, dtype=wide))
    result = growkit.shrink(grown, back, verify=QUICK)
    assert result["kept"], result["verification"]["reason"]
    assert_same_model(source, back)
    assert result["promise"] == json.loads((grown / "growkit.json").read_text())["promise"]


def trained(grown: Path, out: Path, steps: int) -> Path:
    """The grown model after some steps, with the manifest of its growth."""
    model = AutoModelForCausalLM.from_pretrained(grown)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        ids = random_ids(model, step)
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(out)
    shutil.copy(grown / "growkit.json", out)
    return out


def test_after_training_the_nearest_model_is_the_mean_of_copies(tmp_path: Path) -> None:
    source, grown = save_model(tmp_path / "source", "llama"), tmp_path / "grown"
    growkit.grow(source, grown, hidden="x2", kv_heads="x1", verify=False)
    later, back = trained(grown, tmp_path / "trained", 3), tmp_path / "back"
    result = growkit.shrink(later, back, verify=QUICK)
    assert (result["kept"], result["promise"]) == (True, "different")
    assert "of their norm" in result["lost"]
    assert "nats per token of KL" in result["verification"]["reason"]
    stored, found = (load_file(folder / "model.safetensors") for folder in (later, back))
    attention = "model.layers.1.self_attn."
    heads = stored[f"{attention}q_proj.weight"].view(4, 2, 4, 2, 16)  # two of each
    expected = {  # the mean of copies, the sum of parts
        "model.embed_tokens.weight": stored["model.embed_tokens.weight"].view(29, 2, 16).mean(1),
        f"{attention}k_proj.weight": stored[f"{attention}k_proj.weight"].view(8, 2, 16).sum(1),
        f"{attention}q_proj.weight": heads.mean(1).sum(2).view(16, 16),
    }
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=1e-6, atol=1e-7), name


def test_a_changed_bit_is_no_growth_that_could_be_undone(tmp_path: Path) -> None:
    source, grown = save_model(tmp_path / "source", "llama"), tmp_path / "grown"
    growkit.grow(source, grown, hidden="x2", verify=False)
    with edit_weights(grown) as weights:
        weights["model.layers.1.mlp.up_proj.weight"][0, 0] *= 1 + 2.0**-23
    result = growkit.shrink(grown, tmp_path / "back", verify=QUICK, dry_run=True)
    assert result["promise"] == "different"
    assert "in model.layers.1.mlp.up_proj.weight" in result["lost"]


LAST = ("down_proj.weight", "fc2.weight", "mlp.c_proj.weight", "mlp.dense_4h_to_h.weight")
"""Endings of the names of the last matrices of MLPs."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    "kind", ["diffllama", "gemma", "gpt2", "gpt_neox", "llama", "opt", "phi3", "qwen3_5_text"]
)
def test_parts_that_change_nothing_are_left_out(kind: str, seed: int, tmp_path: Path) -> None:
    """Layers that return their input, and units whose column in the last matrix is zero."""
    choose, source, deeper, out = seeded(seed), *(tmp_path / name for name in ("s", "d", "o"))
    config = CONFIGS[kind](choose) | {k: v for k, v in IDENTITY.items() if kind == "opt"}
    save_lively(source, kind, config, seed, choose.choice([torch.float32, torch.bfloat16]))
    few = [choose.randint(0, 2) for _ in range(2)]
    with edit_weights(source) as weights:
        for layer, name in enumerate(sorted(name for name in weights if name.endswith(LAST))):
            matrix = weights[name].T if kind == "gpt2" else weights[name]
            matrix[:, choose.sample(range(matrix.shape[1]), few[layer])] = 0
            width = matrix.shape[1] - min(few)
    growkit.grow(source, deeper, method="depth", layers="x2", verify=False)
    (deeper / "growkit.json").unlink()
    result = growkit.shrink(deeper, out, method="unused", verify=QUICK)
    assert (result["kept"], result["promise"]) == (True, "exact")
    assert relative_error(source, out) < 1e-12
    with edit_weights(out) as weights:
        names = [name for name in weights if name.endswith(LAST)]
        assert [weights[name].shape[kind != "gpt2"] for name in names] == [width] * 2
        weights[choose.choice(names)].mul_(1.5)
    assert not growkit.verify(deeper, out, QUICK)["kept"]
    command = ("shrink", out, tmp_path / "no", "--method", "unused")
    assert "nothing can be left out" in refusal(*command)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    "kind",
    [
        *("deepseek_v3", "flex_olmo", "gpt_oss", "granitemoe", "mixtral", "olmoe", "qwen3_moe"),
        "granitemoeshared",  # has no description
    ],
)
def test_equal_experts_are_merged(kind: str, seed: int, tmp_path: Path) -> None:
    choose, source, grown, out = seeded(seed), *(tmp_path / name for name in ("s", "g", "o"))
    if kind in CONFIGS:
        config = CONFIGS[kind](choose) | {"n_group": 1, "topk_group": 1} | {"hidden_size": 72}
        save_lively(source, kind, config, seed, torch.float32)
    else:
        architectures.save(kind, source, seed)
    options = {"method": "experts", "experts": choose.choice(["x2", "x4"]), "symmetry": "keep"}
    growkit.grow(source, grown, verify=False, **options)
    (grown / "growkit.json").unlink()
    result = growkit.shrink(grown, out, method="unused", verify=QUICK)
    assert (result["kept"], result["promise"]) == (True, "exact")
    assert relative_error(source, out) < 1e-12
    assert_same_model(source, out)
    with edit_weights(grown) as weights:  # one copy of one expert differs
        last = re.compile(r"((?<!shared_)experts.*down_proj|w2|output_linear).*")
        name = choose.choice([name for name in sorted(weights) if last.search(name)])
        weights[name].view(-1)[0] += 1
    refused = refusal("shrink", grown, tmp_path / "no", "--method", "unused")
    assert "have no common divisor" in refused


def test_what_is_shrunk_is_proved(tmp_path: Path) -> None:
    source, grown = save_model(tmp_path / "source", "llama"), tmp_path / "grown"
    growkit.grow(source, grown, hidden="x2", verify=False)
    assert growkit.inspect(grown).possible[-1].command == "growkit shrink SRC OUT"
    growkit.shrink(grown, tmp_path / "back", verify=False)
    assert not any("shrink" in step.command for step in growkit.inspect(tmp_path / "back").possible)
    assert growkit.verify(grown, tmp_path / "back", QUICK)["kept"]
    with edit_weights(tmp_path / "back") as weights:
        weights["model.layers.1.mlp.up_proj.weight"][0, 0] *= 1 + 2.0**-23
    verdict = growkit.verify(grown, tmp_path / "back", QUICK)
    assert not verdict["kept"]
    assert "model.layers.1.mlp.up_proj.weight" in verdict["reason"]


def test_what_cannot_be_undone_is_refused(tmp_path: Path) -> None:
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    assert "no growkit.json" in refusal("shrink", source, out)
    growkit.convert(source, tmp_path / "latent", "mla", verify=False)
    assert "cannot be recovered" in refusal("shrink", tmp_path / "latent", out)
    growkit.grow(source, tmp_path / "grown", hidden="x2", verify=False)
    deeper, undo = GrowStep("depth", layers="x2"), growkit.ShrinkStep("undo", {})
    with pytest.raises(growkit.InputError, match="make shrink: undo the first step"):
        growkit.run(Recipe(str(tmp_path / "grown"), (deeper, undo), str(out), None))
    growkit.shrink(tmp_path / "grown", tmp_path / "back", verify=False)
    assert "made smaller itself" in refusal("shrink", tmp_path / "back", out)
    shutil.copy(tmp_path / "grown" / "growkit.json", source)
    assert "has shape [29, 16]" in refusal("shrink", source, out)
    assert not out.exists()
