"""A narrower dtype rounds the source once, and what is promised holds of the rounded source."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from tests.conftest import folder_bytes

Make = Callable[..., Path]
QUICK = growkit.Settings(prompts=1, length=12)


def saved_in(source: Path, dtype: torch.dtype, folder: Path) -> Path:
    """What transformers makes of a model in a dtype: the reference, which growkit did not round."""
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("stored", "dtype", "method"),
    [
        pytest.param(torch.float32, torch.bfloat16, {"hidden": "x2"}, marks=pytest.mark.usage),
        (torch.float32, torch.float16, {"method": "upcycle", "experts": 4, "top_k": 2}),
        (torch.bfloat16, torch.float16, {"ffn": "x3/2"}),
        (torch.float64, torch.float32, {"method": "depth", "layers": 3}),
    ],
)
def test_what_grows_is_the_rounded_source(
    stored: torch.dtype, dtype: torch.dtype, method: dict[str, object], make: Make, tmp_path: Path
) -> None:
    name = str(dtype).removeprefix("torch.")
    source = make("llama", dtype=stored)
    before = folder_bytes(source)
    result = growkit.grow(source, tmp_path / "out", dtype=name, verify=QUICK, **method)
    assert result["kept"]
    assert result["rounded"] == result["dtype"] == name
    proof = result["verification"]
    assert proof["weights_recovered"]
    assert f"rounded to {name}, once" in proof["reason"]
    assert any(f"rounded to {name}" in each for each in result["warnings"])
    manifest = json.loads((tmp_path / "out" / "growkit.json").read_text())
    assert manifest["rounded"] == manifest["recipe"]["dtype"] == name

    plain = saved_in(source, dtype, tmp_path / "plain")
    growkit.grow(plain, tmp_path / "expected", verify=False, **method)
    found, expected = (
        load_file(tmp_path / each / "model.safetensors") for each in ("out", "expected")
    )
    assert found.keys() == expected.keys()
    assert all(
        found[each].dtype == dtype and found[each].equal(expected[each]) for each in expected
    )
    assert folder_bytes(source) == before
    again = growkit.verify(source, tmp_path / "out", QUICK)
    assert again["kept"]
    assert f"rounded to {name}, once" in again["reason"]


def test_another_rounding_is_found(make: Make, tmp_path: Path) -> None:
    """One number that was rounded the other way, and the weights are not those that were asked."""
    source = make("llama")
    growkit.grow(source, tmp_path / "out", ffn="x2", dtype="bfloat16", verify=False)
    file = tmp_path / "out" / "model.safetensors"
    tensors = load_file(file)
    name = "model.embed_tokens.weight"
    tensors[name][0, 0] = torch.nextafter(tensors[name][0, 0], torch.tensor(9.0).bfloat16())
    save_file(tensors, file, {"format": "pt"})
    result = growkit.verify(source, tmp_path / "out", QUICK)
    assert not result["kept"]
    assert result["first_lost_tensor"] == name


def test_training_is_that_of_the_rounded_source(make: Make, tmp_path: Path) -> None:
    steps = growkit.Settings(prompts=1, length=12, steps=2)
    result = growkit.grow(
        make("llama"), tmp_path / "out", ffn="x2", symmetry="keep", dtype="bfloat16", verify=steps
    )
    assert result["verification"]["training"]["kept"]


def test_what_is_stored_wider_or_is_no_float_stays(make: Make, tmp_path: Path) -> None:
    source = make("llama", dtype=torch.float32)
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    save_file(tensors, file, {"format": "pt"})
    growkit.grow(source, tmp_path / "out", ffn="x2", dtype="bfloat16", verify=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in found.items()}
    assert dtypes.pop("model.norm.weight") == torch.float64
    assert set(dtypes.values()) == {torch.bfloat16}


def test_numbers_that_are_too_large_are_refused(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    file = source / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = 1e6
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError, match=r"model\.norm\.weight.*too large for float16"):
        growkit.grow(source, tmp_path / "out", ffn="x2", dtype="float16")
    assert [each.name for each in tmp_path.iterdir()] == [source.name]
    growkit.grow(source, tmp_path / "out", ffn="x2", dtype="bfloat16", verify=False)
