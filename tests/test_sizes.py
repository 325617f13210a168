"""Sizes that are no multiples, separate heads, and more tokens, as users ask for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    MixtralConfig,
    OlmoConfig,
    Qwen3Config,
)

import growkit
from growkit.algebra.axes import Pattern
from growkit.algebra.expansion import filled_up, index_map, padded
from growkit.algebra.law import grow_moments
from growkit.base.errors import InputError
from growkit.checkpoint.reading import Checkpoint
from growkit.growth import copying
from growkit.recipe.planner import change
from growkit.recipe.recipe import GrowStep, load_recipe
from growkit.results.proof import VerifyResult
from tests.conftest import edit_weights, folder_bytes, relative_error, save_random, seeded
from tests.families import SIZES
from tests.sizes import KINDS, asked, error, grown, model

Make = Callable[..., Path]
QUICK = growkit.Settings(prompts=1, length=12)
SMALL: dict[str, Any] = SIZES | {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
HEADS = {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
NORM = "model.layers.0.input_layernorm.weight"


def proof_of(result: growkit.GrowResult) -> VerifyResult:
    found = result["verification"]
    assert found is not None
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_growth_of_any_family(kind: str, seed: int, tmp_path: Path) -> None:
    source, case = model(tmp_path / "source", kind, seed)
    wanted = seeded(seed).choice(asked(kind, case.config, seeded(seed)))
    grown(source, tmp_path / "out", wanted, case.dtype)


@pytest.mark.parametrize(("tied", "kv_heads"), [(True, None), (False, "x1")])
def test_heads_and_widths_that_are_no_multiples(
    tied: bool, kv_heads: str | None, make: Make, tmp_path: Path
) -> None:
    """The MLP from 172 to 400, heads from 8 to 12, their key-value heads with them or not."""
    source = make("llama", **HEADS, intermediate_size=172, tie_word_embeddings=tied)
    out = tmp_path / "out"
    result = growkit.grow(source, out, ffn=400, heads=12, kv_heads=kv_heads, verify=QUICK)
    assert (result["promise"], result["kept"], result["lost"]) == ("exact", True, None)
    assert proof_of(result)["trainability"]["trainable"]  # type: ignore[index]
    assert relative_error(source, out) < 1e-12
    config = json.loads((out / "config.json").read_text())
    assert config["num_key_value_heads"] == (4 if kv_heads else 6)
    with edit_weights(out) as tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][-1] *= 1.5  # one of three copies
    assert not growkit.verify(source, out, prompts=1, length=12)["kept"]


def test_every_size_is_written_alike(make: Make, tmp_path: Path) -> None:
    """A factor in any way, or a number: whatever the size is of."""
    dense = Checkpoint(make("llama", **HEADS, num_hidden_layers=4))
    experts = MixtralConfig(**{**SMALL, "num_local_experts": 4})
    sparse = Checkpoint(save_random(tmp_path / "sparse", experts))
    for source, method, option, key, present in (
        (dense, "hypercloning", "ffn", "intermediate_size", 24),
        (dense, "hypercloning", "heads", "num_attention_heads", 8),
        (dense, "hypercloning", "hidden", "hidden_size", 48),
        (dense, "depth", "layers", "num_hidden_layers", 4),
        (sparse, "experts", "experts", "num_local_experts", 4),
    ):
        twice = [" x2.0 ", "×2", "X4/2", 2 * present, str(2 * present)]
        half_more = ["x1.5", "x3/2", 3 * present // 2]
        wanted = dict.fromkeys(twice, 2 * present)
        if option not in ("hidden", "experts"):
            wanted |= dict.fromkeys(half_more, 3 * present // 2)
        for form, size in wanted.items():
            plans = change(GrowStep(method, {option: form}), source, 0).plans
            assert plans[-1].config[key] == size, (option, form)


def test_sizes_that_cannot_be_had_are_refused(make: Make, tmp_path: Path) -> None:
    source = make("llama", **HEADS)
    refused: list[tuple[dict[str, Any], str]] = [
        ({"ffn": "x23/24"}, "less than the present 24"),
        ({"ffn": "x10/7"}, "would make ffn 34.28571429; choose"),
        ({"heads": 10, "kv_heads": "x1"}, "no multiple of num_key_value_heads 4"),
        ({"hidden": 72}, "rounds; hidden can grow .* whole copies.* --promise bounded"),
        ({"vocab": 10**9}, "choose a smaller size"),
        ({"untie": 1}, "true or false was expected"),
    ]
    for sizes, why in refused:
        with pytest.raises(InputError, match=why):
            growkit.grow(source, tmp_path / "out", verify=False, **sizes)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_zeros_that_round_are_bounded(
    tied: bool, dtype: torch.dtype, make: Make, tmp_path: Path
) -> None:
    """Hidden from 48 to 72, where nothing exact is to be had: norms are rounded, nothing else."""
    source, out = make("llama", **HEADS, tie_word_embeddings=tied, dtype=dtype), tmp_path / "out"
    plan = growkit.grow(source, out, hidden=72, promise="bounded", dry_run=True)
    assert plan["promise"] == "bounded"
    assert str(plan["lost"]).startswith("one rounding of every element of 5 tensors")
    result = growkit.grow(source, out, hidden=72, promise="bounded", verify=QUICK)
    found = proof_of(result)
    assert (result["promise"], result["kept"]) == ("bounded", True)
    assert found["weights_recovered"]
    assert found["trainability"]["trainable"]  # type: ignore[index]
    limit = found["strict_float64"]["tolerance"]
    assert limit is not None
    assert 0 < relative_error(source, out) < limit
    manifest = json.loads((out / "growkit.json").read_text())
    assert manifest["recipe"]["steps"][0]["promise"] == manifest["promise"] == "bounded"
    # The control: what is far from its rounding is not as asked, nor what is not made again.
    with edit_weights(out) as tensors:
        tensors[NORM] *= 1.5
    assert NORM in growkit.verify(source, out, prompts=1, length=12)["reason"]


def test_a_bound_that_is_not_kept_is_rejected(make: Make, tmp_path: Path) -> None:
    """Where eps is most of the mean, a norm inside of heads notices that it has changed."""
    config = Qwen3Config(**{**SMALL, "rms_norm_eps": 1.0, "head_dim": 6})
    source = save_random(tmp_path / "source", config)
    result = growkit.grow(source, tmp_path / "out", hidden=24, promise="bounded", verify=QUICK)
    assert result["kept"] is False
    assert "rounding to float32 does to the source itself" in proof_of(result)["reason"]
    assert not (tmp_path / "out").exists()


def test_zeros_that_nothing_learns_are_found(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: zeros that are read by zeros, as in an MLP that is filled up with neurons."""
    source = make("llama", **HEADS, num_hidden_layers=1)
    monkeypatch.setattr(copying, "placed_copies", lambda *_, **__: {"ffn": padded(24, 30)})
    settings = growkit.Settings(prompts=1, length=12, trainability=True)
    result = growkit.grow(source, tmp_path / "out", ffn=30, verify=settings)
    assert result["kept"] is False
    assert "no gradient at all for zeros in model.layers.0.mlp" in proof_of(result)["reason"]


def test_what_reads_zeros_has_gathered_nothing() -> None:
    """The moments of weights that were copied for zeros: their gradients are zero so far."""
    form = Pattern.parse("ffn <- hidden").dimensions
    grown = {"hidden": filled_up(4, 6)}
    maps = [index_map(each, {"hidden": 4, "ffn": 3}, grown) for each in form]
    assert maps[1].source.tolist() == [0, 1, 2, 3, 0, 1]
    moments = torch.arange(1.0, 13).view(3, 4)

    def read(rows: slice, columns: slice | None = None) -> torch.Tensor:
        return moments[rows][:, columns or slice(None)]

    found = grow_moments(read, maps, 1, [slice(0, 3), slice(0, 6)])
    assert found[:, :4].equal(moments)
    assert not found[:, 4:].any()


def test_what_the_root_of_hidden_rounds_is_bounded(tmp_path: Path) -> None:
    source, out = (
        save_random(tmp_path / "source", GemmaConfig(**SMALL, head_dim=6)),
        tmp_path / "out",
    )
    result = growkit.grow(source, out, hidden="x2", promise="bounded", verify=QUICK)
    assert (result["promise"], result["kept"]) == ("bounded", True), result["verification"]
    assert proof_of(result)["trainability"]["trainable"]  # type: ignore[index]
    assert 0 < relative_error(source, out) < 1e-5


def test_a_head_of_its_own_lets_a_model_grow(tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", OlmoConfig(**SMALL, tie_word_embeddings=True))
    out = tmp_path / "out"
    with pytest.raises(InputError, match="--untie"):
        growkit.grow(source, out, hidden="x2", verify=False)
    result = growkit.grow(source, out, hidden="x2", untie=True, verify=QUICK)
    assert (result["promise"], result["kept"]) == ("exact", True)
    assert relative_error(source, out) < 1e-12
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert "lm_head.weight" in load_file(out / "model.safetensors")
    # A recipe in a manifest makes it again.
    recipe = load_recipe(out / "growkit.json", output=str(tmp_path / "again"))
    growkit.run(replace(recipe, verify=None))
    one, other = (folder / "model.safetensors" for folder in (out, tmp_path / "again"))
    assert one.read_bytes() == other.read_bytes()


@pytest.mark.parametrize(("rows", "tied"), [("mean", True), ("zero", False)])
def test_more_tokens(rows: str, tied: bool, make: Make, tmp_path: Path) -> None:
    source, out = make("llama", tie_word_embeddings=tied, dtype=torch.bfloat16), tmp_path / "out"
    result = growkit.grow(source, out, vocab=37, new_tokens=rows, hidden="x2", verify=QUICK)
    assert (result["promise"], result["kept"]) == ("exact", True)
    assert str(result["lost"]).startswith("8 new tokens share the softmax")
    assert "the logits of the source's 29 were compared; the new ones take 0." in str(
        proof_of(result)["reason"]
    )
    assert error(source, out) < 1e-12
    tensors = load_file(out / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    old, new = embedding[:29].double(), embedding[29:]
    expected = old.mean(0).bfloat16() if rows == "mean" else torch.zeros(32).bfloat16()
    torch.testing.assert_close(new, expected.expand(8, -1))
    # Without a manifest the old tokens are compared; with it, the new rows are as well.
    tensors["model.embed_tokens.weight"][-1] += 0.25
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    lost = growkit.verify(source, out, prompts=1, length=12)
    assert lost["first_lost_tensor"] == "model.embed_tokens.weight"
    (out / "growkit.json").unlink()
    assert growkit.verify(source, out, prompts=1, length=12)["kept"]
    tensors["model.embed_tokens.weight"][:29] *= 1.5
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    same = r"only models of the same vocabulary can be compared: the logits differ by \d"
    with pytest.raises(InputError, match=rf"^vocab_size is 29 .* and 37 .*; {same}"):
        growkit.verify(source, out, prompts=1, length=12)


@pytest.mark.usage
def test_more_tokens_in_use(make: Make, tmp_path: Path) -> None:
    """Logits that are all below zero: the old tokens still say the same among themselves."""
    source = make("llama")
    result = growkit.grow(source, tmp_path / "out", vocab=64, new_tokens="zero", verify=QUICK)
    ways = {mode["name"]: mode["kept"] for mode in proof_of(result)["modes"]}
    assert ways["generate"] is ways["save and reload"] is True


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
