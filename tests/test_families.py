"""Every family: random models of its class, grown, and judged by transformers in strict float64.

``python -m tests.families`` does the same with as many seeds as one likes.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import growkit
from growkit.errors import InputError
from growkit.families.family import families
from tests.conftest import relative_error, seeded
from tests.families import FAMILIES, Case, grow_any, save

QUICK = growkit.Settings(prompts=1, length=16)


@pytest.mark.parametrize("kind", FAMILIES)
def test_any_growth(kind: str, tmp_path: Path) -> None:
    seed = sorted(FAMILIES).index(kind)
    assert grow_any(kind, seed, tmp_path) < 1e-12


@pytest.mark.parametrize("kind", FAMILIES)
def test_its_proof_holds(kind: str, tmp_path: Path) -> None:
    """And a changed weight is another model: the control of the test above."""
    case = Case(FAMILIES[kind], seeded(sorted(FAMILIES).index(kind)))
    source, out = save(tmp_path / "source", case, 3), tmp_path / "out"
    grown = growkit.grow(source, out, verify=QUICK, **{case.first: f"x{case.least}"})
    assert grown["kept"], grown["verification"]
    tensors = load_file(out / "model.safetensors")
    for name in tensors:
        if "embed" in name or "wte" in name:
            tensors[name].view(-1)[::2] *= 1.5
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert relative_error(source, out) > 1e-3


@pytest.mark.parametrize(
    ("kind", "changes", "size", "why"),
    [
        ("olmo", {"tie_word_embeddings": True}, "hidden", "set tie_word_embeddings to false"),
        ("falcon", {"alibi": True}, "heads", "slopes"),
        ("gemma2", {}, "hidden", "powers of four"),
        ("gemma3_text", {}, "hidden", "powers of four"),
        ("mamba", {}, "heads", "has no heads to grow"),
    ],
)
def test_what_cannot_be_exact_is_refused_in_the_plan(
    kind: str, changes: dict[str, object], size: str, why: str, tmp_path: Path
) -> None:
    case = Case(FAMILIES[kind], seeded(1))
    case.config |= changes
    source = save(tmp_path / "source", case, 1)
    with pytest.raises(InputError, match=why):
        growkit.grow(source, tmp_path / "out", verify=False, **{size: "x2"})
    assert not (tmp_path / "out").exists()
    growkit.grow(source, tmp_path / "wider", verify=False, ffn="x2")  # and what works, works
    assert relative_error(source, tmp_path / "wider") < 1e-12


def test_experts_follow_the_width_of_the_others(tmp_path: Path) -> None:
    case = Case(FAMILIES["deepseek_v3"], seeded(1))
    source, out = save(tmp_path / "source", case, 1), tmp_path / "out"
    growkit.grow(source, out, verify=False, ffn="32")
    sizes = growkit.inspect(out)["sizes"]
    assert sizes["ffn"] == 32
    assert sizes["expert_ffn"] == 2 * case.config["moe_intermediate_size"]


def test_a_key_keeps_the_name_that_it_has(tmp_path: Path) -> None:
    """Files of Qwen3-MoE call the number of experts num_experts, or num_local_experts."""
    source = save(tmp_path / "source", Case(FAMILIES["qwen3_moe"], seeded(2)), 2)
    file = source / "config.json"
    config = json.loads(file.read_text())
    number = config.pop("num_local_experts", None) or config.pop("num_experts")
    for name in ("num_experts", "num_local_experts"):
        file.write_text(json.dumps(config | {name: number}))
        growkit.grow(source, tmp_path / name, verify=False, ffn="x2")
        found = json.loads((tmp_path / name / "config.json").read_text())
        assert [each for each in found if each.endswith("_experts")] == [name]


def test_every_family_of_one_file_has_its_tests() -> None:
    elsewhere = {"llama", "mistral", "mixtral", "qwen3", "gpt2", "gemma"}
    shown = {
        kind for family in families().values() if not family.form for kind in family.model_types
    }
    assert shown - elsewhere == set(FAMILIES)


@pytest.mark.parametrize("name", families())
def test_a_grown_model_names_the_class_that_loads_it(name: str) -> None:
    """Other engines than transformers look for it."""
    family = families()[name]
    for kind in set(family.model_types) & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        wanted = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        assert family.named({"model_type": kind})["architectures"] == [wanted]
