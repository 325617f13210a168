"""Sizes that are no multiples, separate heads, and more tokens, as users ask for them."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.engine.recipe_planning import change
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.recipe import GrowStep
from tests.families import FAMILIES, Case, Kind, save, softmax
from tests.files import edit_weights, folder_bytes
from tests.models import Make, relative_error, save_model, save_random, seeded

ROUNDING = {torch.float32: 1e-4, torch.bfloat16: 0.5}
"""What one rounding of weights may do to the logits of such small models."""

NORMS_OVER_HEADS = {"olmo2", "olmo3", "olmoe"}

ROOTS = {"gemma", "gemma2", "gemma3_text"}
"""Those that multiply their embedding by the root of hidden."""

FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_size": 24}

OTHERS: dict[str, Kind] = {
    "llama": Kind(lambda c: softmax(c, "attention_bias", "mlp_bias", **FEW_HEADS)),
    "mistral": Kind(lambda c: softmax(c, **FEW_HEADS)),
    "diffllama": Kind(lambda c: softmax(c, **(FEW_HEADS | {"num_attention_heads": 8}))),
}
"""Those that have tests of their own, by ``model_type``."""

KINDS = FAMILIES | OTHERS


@dataclass(frozen=True)
class Asked:
    """A growth that is asked for.

    Attributes:
        options: of the growth.
        promise: what is promised; None where it is refused in the plan.
        may_refuse: whether the class may not have such sizes.
    """

    options: dict[str, Any]
    promise: str | None = "exact"
    may_refuse: bool = False


def asked(kind: str, config: dict[str, Any], choose: Random) -> list[Asked]:
    """What is asked of a model: a width, heads, tokens, a head of its own, a hidden size."""
    tied = config["tie_word_embeddings"]
    tokens = {"vocab": choose.choice([30, 37, 64]), "new_tokens": choose.choice(["mean", "zero"])}
    found = [Asked(tokens), Asked({"untie": True} | tokens, "exact" if tied else None)]
    if kind not in ("mamba", "bloom"):  # whose width is a multiple of hidden
        keys = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
        ffn = next((config[key] for key in keys if config.get(key)), 4 * config.get("n_embd", 0))
        options = {"ffn": ffn + choose.randrange(1, 2 * ffn)} | tokens
        # Products with experts of an odd width do not run in bfloat16.
        found.append(Asked(options, may_refuse=any("expert" in key for key in config)))
        found += _heads(kind, config, choose)
    found += _hidden(kind, config)
    return found


def _heads(kind: str, config: dict[str, Any], choose: Random) -> list[Asked]:
    """More heads beside each other; some classes want hidden to be a multiple."""
    heads = config.get("num_attention_heads", config.get("n_head"))
    kv = config.get("num_key_value_heads", config.get("num_kv_heads"))
    each = 2 * kv if kind == "diffllama" else kv or 1
    options: dict[str, Any] = {"heads": heads + each * choose.choice([1, 2])}
    if kv and not kind.startswith("deepseek"):
        options["kv_heads"] = "x1"
    promise = None if kind in NORMS_OVER_HEADS and options["heads"] % heads else "exact"
    return [Asked(options, promise, may_refuse=kind not in OTHERS)]


def _hidden(kind: str, config: dict[str, Any]) -> list[Asked]:
    """Half as much again, by zeros; and twice as much, where a head of its own is needed."""
    rounded = None if KINDS[kind].centred else "bounded"
    tied = config["tie_word_embeddings"]
    found = [
        Asked({"hidden": "x3/2", "promise": "bounded"}, rounded, may_refuse=True),
        Asked({"hidden": "x3/2"}, None),
        Asked({"hidden": "x2"} | ({"untie": True} if tied else {}), may_refuse=True),
    ]
    if kind in ROOTS:
        found[2] = Asked({"hidden": "x2", "promise": "bounded"}, "bounded")
    return found


def model(folder: Path, kind: str, seed: int) -> tuple[Path, Case]:
    """A lively random model, and what it is."""
    case = Case(KINDS[kind], seeded(seed))
    if kind in FAMILIES:
        return save(folder, case, seed), case
    return save_random(folder, CONFIG_MAPPING[kind](**case.config), seed, case.dtype), case


def grown(source: Path, out: Path, wanted: Asked, dtype: torch.dtype) -> float | None:
    """The error of a growth; None where it is refused as it should be."""
    quick = growkit.Settings(prompts=1, length=16)
    try:
        result = growkit.grow(source, out, verify=quick, **wanted.options)
    except InputError:
        if wanted.promise is None or wanted.may_refuse:
            return None
        raise
    assert result["promise"] == wanted.promise, result["promise"]
    if not result["kept"] and wanted.may_refuse:  # one epsilon serves norms that change apart
        assert result["verification"].reason.startswith("not as asked")
        return None
    assert result["kept"], result["verification"]
    found = relative_error(source, out)
    assert found < (1e-12 if wanted.promise == "exact" else ROUNDING[dtype]), found
    return found if wanted.promise == "exact" else 0.0


QUICK = growkit.Settings(prompts=1, length=12)
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
HEADS = {"hidden_size": 48, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 6}
NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_growth_of_any_family(kind: str, seed: int, tmp_path: Path) -> None:
    source, case = model(tmp_path / "source", kind, seed)
    wanted = seeded(seed).choice(asked(kind, case.config, seeded(seed)))
    grown(source, tmp_path / "out", wanted, case.dtype)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("kind", "axis"), [("diffllama", "head_dim"), ("qwen3", "head_dim"), ("llama", None)]
)
def test_an_epsilon_that_also_serves_norms_over_heads_is_named(
    kind: str, axis: str | None, seed: int, make: Make, tmp_path: Path
) -> None:
    """Zeros beside hidden divide it for every norm, so a head norm is another function then."""
    source, out = make(kind, seed=seed, hidden_size=16, rms_norm_eps=0.01), tmp_path / "out"
    asked = {"hidden": "x3/2", "heads": "x1", "promise": "bounded"}
    if kind == "diffllama":  # its head norm has no weight, and reads differences near zero
        with pytest.raises(InputError, match="rms_norm_eps serves norms over both"):
            growkit.grow(source, out, dry_run=True, **asked)
    else:
        result = growkit.grow(source, out, verify=QUICK, **asked)
        assert result["kept"] is (axis is None)
        shared = f"rms_norm_eps of norms over {axis} times 0.666667, as over hidden"
        assert (shared in result["lost"]) is (axis is not None)
        assert (shared in result["verification"]["reason"]) is (axis is not None)
    growkit.convert(source, tmp_path / "own", "diff-transformer", verify=False)  # a key of its own
    found = growkit.grow(tmp_path / "own", tmp_path / "larger", verify=QUICK, **asked)
    assert (found["kept"], "eps" in found["lost"]) == (kind != "qwen3", kind == "qwen3")


@pytest.mark.parametrize("hidden", [17, 35, 70])
def test_suggested_sizes_can_be_planned(hidden: int, make: Make, tmp_path: Path) -> None:
    """Control: the size itself cannot."""
    source, out = make("llama"), tmp_path / "out"
    with pytest.raises(InputError) as refusal:
        growkit.grow(source, out, hidden=hidden, dry_run=True)
    choices = re.findall(r"hidden (\d+)( with --promise bounded)?(?: or |$)", str(refusal.value))
    assert len(choices) > 1
    for size, rounded in choices:
        promise = "bounded" if rounded else "exact"
        result = growkit.grow(source, out, hidden=int(size), promise=promise, dry_run=True)
        assert result["promise"] == promise


@pytest.mark.parametrize("form", [" x2.0 ", "×2", "X4/2", 48, "48"])
def test_every_size_is_written_alike(form: Any, make: Make) -> None:
    """A factor in any way, or a number."""
    source = Checkpoint(make("llama", intermediate_size=24))
    plan = change(GrowStep("hypercloning", {"ffn": form}), source, 0).plans[-1]
    assert plan.config["intermediate_size"] == 48


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("tied", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_zeros_that_round_are_bounded(
    tied: bool, dtype: torch.dtype, make: Make, tmp_path: Path
) -> None:
    """Hidden from 48 to 72, where nothing exact is to be had: norms are rounded, nothing else."""
    source, out = make("llama", **HEADS, tie_word_embeddings=tied, dtype=dtype), tmp_path / "out"
    plan = growkit.grow(source, out, hidden=72, promise="bounded", dry_run=True)
    assert plan["promise"] == "bounded"
    assert str(plan["lost"]).startswith("one rounding of every element of 5 tensors")
    learns = growkit.Settings(prompts=1, length=12, trainability=True)
    result = growkit.grow(source, out, hidden=72, promise="bounded", verify=learns)
    found = result["verification"]
    assert (result["promise"], result["kept"]) == ("bounded", True)
    assert found.sections.weights.recovered
    assert found.sections.trainability.trainable
    limit = found.sections.logits.strict_float64.tolerance
    assert 0 < relative_error(source, out) < limit
    manifest = json.loads((out / "growkit.json").read_text())
    assert manifest["recipe"]["steps"][0]["promise"] == manifest["promise"] == "bounded"
    # The control: what is far from its rounding is not as asked, nor what is not made again.
    with edit_weights(out) as tensors:
        tensors[NORM] *= 1.5
    assert NORM in growkit.verify(source, out, prompts=1, length=12)["reason"]


def test_a_bound_that_is_not_kept_is_rejected(make: Make, tmp_path: Path) -> None:
    """Where eps is most of the mean, a norm inside of heads notices that it has changed."""
    source = save_model(tmp_path / "source", "qwen3", rms_norm_eps=1.0, **SMALL)
    result = growkit.grow(source, tmp_path / "out", hidden=24, promise="bounded", verify=QUICK)
    assert result["kept"] is False
    assert "rounding to float32 explains" in result["verification"]["reason"]
    assert not (tmp_path / "out").exists()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("rows", "tied"), [("mean", True), ("zero", False)])
def test_more_tokens(rows: str, tied: bool, make: Make, tmp_path: Path) -> None:
    source, out = make("llama", tie_word_embeddings=tied, dtype=torch.bfloat16), tmp_path / "out"
    result = growkit.grow(source, out, vocab=37, new_tokens=rows, hidden="x2", verify=QUICK)
    assert (result["promise"], result["kept"]) == ("exact", True)
    assert str(result["lost"]).startswith("8 new tokens share the softmax")
    assert "the logits of the source's 29 were compared; the new ones take 0." in str(
        result["verification"]["reason"]
    )
    assert relative_error(source, out) < 1e-12
    tensors = load_file(out / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    old, new = embedding[:29].double(), embedding[29:]
    expected = old.mean(0).bfloat16() if rows == "mean" else torch.zeros(32).bfloat16()
    torch.testing.assert_close(new, expected.expand(8, -1))
    # Without a manifest the old tokens are compared; with it, the new rows are as well.
    tensors["model.embed_tokens.weight"][-1] += 0.25
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    lost = growkit.verify(source, out, prompts=1, length=12)
    assert lost.sections.weights.first_lost_tensor == "model.embed_tokens.weight"
    (out / "growkit.json").unlink()
    assert growkit.verify(source, out, prompts=1, length=12)["kept"]
    tensors["model.embed_tokens.weight"][:29] *= 1.5
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    assert "the logits differ by" in growkit.verify(source, out, prompts=1, length=12)["reason"]


def saved_in(source: Path, dtype: torch.dtype, folder: Path) -> Path:
    """What transformers makes of a model in a dtype: the reference, which growkit did not round."""
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.mark.sampled(1)
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
    assert proof.sections.weights.recovered
    assert f"the source after rounding to {name}" in proof["reason"]
    assert any(f"rounded to {name}" in each for each in result["warnings"])
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
    assert growkit.verify(source, tmp_path / "out", QUICK)["kept"]


def test_another_rounding_is_found(make: Make, tmp_path: Path) -> None:
    """One number that was rounded the other way, and the weights are not those that were asked."""
    source = make("llama")
    growkit.grow(source, tmp_path / "out", ffn="x2", dtype="bfloat16", verify=False)
    with edit_weights(tmp_path / "out") as tensors:
        name = "model.embed_tokens.weight"
        tensors[name][0, 0] = torch.nextafter(tensors[name][0, 0], torch.tensor(9.0).bfloat16())
    result = growkit.verify(source, tmp_path / "out", QUICK)
    assert not result["kept"]
    assert result.sections.weights.first_lost_tensor == name


def test_what_is_stored_wider_or_is_no_float_stays(make: Make, tmp_path: Path) -> None:
    source = make("llama", dtype=torch.float32)
    with edit_weights(source) as tensors:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].double()
    growkit.grow(source, tmp_path / "out", ffn="x2", dtype="bfloat16", verify=False)
    found = load_file(tmp_path / "out" / "model.safetensors")
    dtypes = {name: tensor.dtype for name, tensor in found.items()}
    assert dtypes.pop("model.norm.weight") == torch.float64
    assert set(dtypes.values()) == {torch.bfloat16}


def test_numbers_that_are_too_large_are_refused(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    with edit_weights(source) as tensors:
        tensors["model.norm.weight"][0] = 1e6
    with pytest.raises(InputError, match=r"model\.norm\.weight.*too large for float16"):
        growkit.grow(source, tmp_path / "out", ffn="x2", dtype="float16")
    assert [each.name for each in tmp_path.iterdir()] == [source.name]
    growkit.grow(source, tmp_path / "out", ffn="x2", dtype="bfloat16", verify=False)
