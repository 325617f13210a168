"""Layouts against one another: each folder judged by a decoder that reads its layout."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import growkit
from growkit.base.errors import InputError
from growkit.engine.transformers_class import resolved
from growkit.extras.differential.diff_family import FAMILY
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.extras.differential.modeling.modeling_diff_transformer import (
    DiffTransformerForCausalLM,
)
from growkit.planning.recipe import ConvertStep, GrowStep, Recipe, Step
from tests import families
from tests import layouts_reference as reference
from tests.files import edit_weights, listed
from tests.models import TOKENS, distance, randomise, save_model, seeded, strict_logits

LIMIT = 1e-12
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = {"hidden_size": 16, "intermediate_size": 24} | {
    key: value for key, value in families.SIZES.items() if key != "pad_token_id"
}
PAIRS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
EIGHT = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
HEADS = {  # two value heads, each for two noise heads
    "microsoft": PAIRS,
    "microsoft-v2": PAIRS,
    "motif": EIGHT | {"num_attention_heads": 12, "num_noise_heads": 4},
    "diffllama": EIGHT,
    "diff-transformer": EIGHT,
}
MODEL_TYPES = {
    "microsoft": reference.MICROSOFT,
    "microsoft-v2": reference.MICROSOFT_V2,
    "motif": reference.MOTIF,
    "diffllama": "diffllama",
    "diff-transformer": "diff_transformer",
}
FOREIGN = ("microsoft", "microsoft-v2", "motif")
V2: dict[str, Any] = listed("layouts", "DIFF V2")


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def logits(folder: Path, seed: int = 0) -> Tensor:
    """By the reference of the folder's layout, or by the class that transformers or growkit has."""
    config = config_of(folder)
    if config["model_type"].lower() not in reference.ATTENTION:
        return strict_logits(folder, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(config["vocab_size"], (1, TOKENS), generator=generator)
    return reference.logits(folder, ids[0])


def error(source: Path, target: Path) -> float:
    """Largest logit difference against the root mean square of the source's logits."""
    return distance(logits(source), logits(target))


def save(
    folder: Path, layout: str, seed: int = 0, dtype: torch.dtype = torch.float32, **config: Any
) -> Path:
    """A random model of any layout."""
    if layout == "diffllama":
        return save_model(folder, layout, seed, dtype, **(HEADS[layout] | config))
    if layout in FOREIGN:
        whole = SIZES | {"model_type": MODEL_TYPES[layout]} | HEADS[layout] | config
        if seed % 2:  # null or left out: the same
            whole = {key: value for key, value in whole.items() if value is not None}
        return reference.write_folder(folder, whole, seed, dtype)
    torch.manual_seed(seed)
    whole = SIZES | HEADS[layout] | config
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**whole))
    randomise(model, seed)
    model.to(dtype).save_pretrained(folder)
    return folder


def convert(source: Path, layout: str, dtype: str | None = None, **options: Any) -> Path:
    """The source in another layout, beside it."""
    output = source.parent / f"{source.name}-{layout}"
    growkit.convert(source, output, layout, dtype=dtype, verify=False, **options)
    assert config_of(output)["model_type"] == MODEL_TYPES[layout]
    return output


ROPES: list[dict[str, Any]] = listed("layouts", "ropes")


def skeleton(choose: Random) -> dict[str, Any]:
    """What all layouts have in common; some keys are left out."""
    config: dict[str, Any] = SIZES | {
        "hidden_size": choose.choice([12, 16, 20]),
        "intermediate_size": choose.choice([7, 12, 24]),
        "num_hidden_layers": choose.choice([1, 2, 3]),
        "rms_norm_eps": choose.choice([1e-6, 1e-5, 1e-2]),
    }
    if choose.random() < 0.5:
        config["tie_word_embeddings"] = choose.random() < 0.7
    if choose.random() < 0.2:
        del config["rms_norm_eps"]
    return config | choose.choice(ROPES)


def draw_microsoft(choose: Random) -> dict[str, Any]:
    kv, repeats = choose.choice([1, 2, 3]), choose.choice([1, 2, 3])
    config = skeleton(choose) | {"num_attention_heads": kv * repeats, "num_key_value_heads": kv}
    if choose.random() < 0.7:
        config["head_dim"] = choose.choice([2, 4, 6])
    else:
        config["hidden_size"] = kv * repeats * 2 * choose.choice([2, 4])
    if repeats == 1 and choose.random() < 0.5:
        del config["num_key_value_heads"]
    return config | choose.choice([{}, {"hidden_act": "silu"}, {"hidden_act": "gelu"}])


def draw_microsoft_v2(choose: Random) -> dict[str, Any]:
    config = draw_microsoft(choose)
    config.setdefault("head_dim", 4)
    if choose.random() < 0.3:
        config["hidden_size"] = config["num_attention_heads"] * 4
        config["head_dim"] = None
    return config


def draw_motif(choose: Random) -> dict[str, Any]:
    kv, repeats = choose.choice([1, 2]), choose.choice([1, 2])
    group = choose.choice([1, 2, 3, 4, 5])
    noise = kv * repeats
    heads = noise * (group + 1)
    config = skeleton(choose) | {
        "num_attention_heads": heads,
        "num_key_value_heads": 2 * kv,
        "num_noise_heads": noise,
        "head_dim": choose.choice([2, 4, 6]),
        "use_bias": choose.random() < 0.4,
    }
    if choose.random() < 0.7:
        config["attn_rms_norm_eps"] = choose.choice([1e-6, 1e-5, 1e-2])
    if choose.random() < 0.3:
        config |= {"head_dim": None, "hidden_size": heads * 2}
    if group == 1:
        del config["num_noise_heads"]  # as in Motif-2.6B
        if repeats == 1 and choose.random() < 0.5:
            del config["num_key_value_heads"]
    harmless = {"use_sliding_window": False, "sliding_window": None, "k_ratio": 1}
    config |= choose.choice([{}, harmless])
    config["model_type"] = choose.choice(["Motif", "motif"])
    return config | choose.choice([{}, {"hidden_act": "poly_norm"}, {"hidden_act": "silu"}])


UNSAID = {"head_dim": None, "num_key_value_heads": None, "num_noise_heads": None}
DRAW: dict[str, Callable[[Random], dict[str, Any]]] = {
    "microsoft": draw_microsoft,
    "microsoft-v2": draw_microsoft_v2,
    "motif": draw_motif,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("layout", FOREIGN)
def test_any_layout_is_read(layout: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    dtype = FLOATS[choose.choice(list(FLOATS))]
    source = save(tmp_path / "source", layout, seed, dtype, **(UNSAID | DRAW[layout](choose)))
    target = convert(source, "diff-transformer", shard_size=choose.choice(["5GB", "4KB"]))
    assert error(source, target) < LIMIT
    assert all((target / name).exists() for name in FAMILY.code())


def expressible(choose: Random, layout: str) -> dict[str, Any]:
    """A random DIFF Transformer that a layout can express."""
    kv, repeats = choose.choice([1, 2]), choose.choice([1, 2, 3])
    noise = kv * repeats
    signal = noise * (choose.choice([1, 2, 3, 4, 5]) if layout == "motif" else 1)
    width = choose.choice([4, 6])
    layers = choose.choice([1, 2, 3])
    eps = choose.choice([1e-6, 1e-3])
    config: dict[str, Any] = {
        "hidden_size": choose.choice([12, 16]),
        "num_hidden_layers": layers,
        "num_attention_heads": signal + noise,
        "num_noise_heads": noise,
        "num_key_value_heads": 2 * kv,
        "head_dim": width,
        "value_head_dim": 2 * width,
        "rms_norm_eps": eps,
        "head_norm": choose.choice(["affine", "plain"]),
        "head_norm_eps": choose.choice([1e-5, 1e-2]),
        "head_output_scale": choose.choice(["one_minus_lambda_init", "none"]),
        "lambda_init": choose.choice([None, [choose.uniform(-0.5, 0.9) for _ in range(layers)]]),
        "tie_word_embeddings": choose.random() < 0.5,
        "hidden_act": choose.choice(["silu", "gelu"]),
        "rope_parameters": {"rope_theta": choose.choice([100.0, 1e4]), "rope_type": "default"},
    }
    if layout == "microsoft":
        return config | {"head_norm_eps": 1e-5}
    if layout == "diffllama":
        return config | {"head_norm_eps": eps, "attention_bias": choose.random() < 0.5}
    if layout == "motif":
        bias = choose.random() < 0.5
        act = choose.choice(["silu", "poly_norm"])
        return config | {"attention_bias": bias, "mlp_bias": bias, "hidden_act": act}
    return config | V2 | {"value_head_dim": width, "num_key_value_heads": kv}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("layout", [*FOREIGN, "diffllama"])
def test_any_diff_transformer_is_written(layout: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config = expressible(choose, layout)
    source = save(tmp_path / "source", "diff-transformer", seed, **config)
    # DiffLlama has no place for factors but the columns of o_proj, which they would round.
    target = convert(source, layout, "float64" if layout == "diffllama" else None)
    assert error(source, target) < LIMIT


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("layout", "via"), listed("layouts", "there and back"))
def test_there_and_back(layout: str, via: str, seed: int, dtype: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {"rms_norm_eps": 1e-5, "num_hidden_layers": 2 + seed}
    if dtype == "bfloat16":
        config["head_dim"] = 16  # room for λ
    source = save(tmp_path / "source", layout, seed, FLOATS[dtype], **config)
    target = convert(source, via)
    assert error(source, target) < LIMIT
    back = convert(target, layout)
    assert error(source, back) < LIMIT
    before, after = tensors_of(source), tensors_of(back)
    assert before.keys() == after.keys()
    solved = ("lambda_", "subln") if via == "motif" else ()
    for name, tensor in before.items():
        if not any(part in name for part in solved):
            assert after[name].dtype == tensor.dtype
            assert after[name].equal(tensor), name
        elif "lambda_" in name:
            assert after[name].dtype == tensor.dtype
        else:  # scaled there and back, in float64
            assert (after[name] - tensor.double()).abs().max() < 1e-14
    same = {"hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"}
    assert {k: config_of(back)[k] for k in same} == {k: config_of(source)[k] for k in same}


STEPS: list[Step] = [
    *[GrowStep("hypercloning", {size: "x2"}) for size in ("hidden", "ffn", "heads", "kv_heads")],
    GrowStep("hypercloning", {"vocab": 40, "symmetry": "keep"}),
    *[GrowStep("depth", {"layers": "x2", "place": place}) for place in ("even", "end")],
    *[GrowStep("depth", {"layers": 4, "blocks": b}) for b in ("overlap", "interpose")],
    *[GrowStep("group-diff", {f"{kind}_heads": "x2"}) for kind in ("signal", "noise", "kv")],
    GrowStep("experts", {"experts": "x2"}),
    GrowStep("upcycle", {"experts": 4}),
    *[ConvertStep("dint", {"integral": which}) for which in ("causal", "column_mean")],
    ConvertStep("dint", {"gamma": "unified", "integral_method": "series"}),
    *[ConvertStep("shared-diff", {"rank": 2, "scope": s}) for s in ("head", "layer", "all_heads")],
    *[ConvertStep(to) for to in ("diff", "diff-v2", "gda", "output-gate", "llama", *FOREIGN)],
    ConvertStep("diffllama"),
]
"""At least one of every operation that is possible for differential attention."""


def follow(source: Path, steps: tuple[Step, ...]) -> tuple[Path, str]:
    """The source after some steps, and their promise, or why they are refused."""
    output = source.parent / f"{source.name}-followed"
    try:
        return output, growkit.run(Recipe(str(source), steps, str(output), None))["promise"]
    except InputError as refusal:
        return source, str(refusal)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("drawn", range(len(STEPS) + 60))
@pytest.mark.parametrize("layout", [*FOREIGN, "diffllama"])
def test_every_layout_is_a_source_of_every_step(layout: str, drawn: int, tmp_path: Path) -> None:
    """One step, or two, make the same bits of a model in any layout.

    Each result is judged by the decoder of its own layout; a target that has kept the layout of its
    source is converted for the comparison of its bits.
    """
    steps = tuple(seeded(drawn).sample(STEPS, 2)) if drawn >= len(STEPS) else (STEPS[drawn],)
    more: dict[str, Any] = {"num_hidden_layers": 3, "rms_norm_eps": 1e-5}
    more |= {"hidden_act": "silu"} if layout == "motif" and drawn % 2 else {}
    source = save(tmp_path / "source", layout, drawn, torch.float64, **more)
    first, promise = follow(source, steps)
    second, expected = follow(convert(source, "diff-transformer"), steps)
    if first == source and "already" in promise:  # a step may end in the layout of the source
        return
    assert (first == source) == (second.name == "source-diff-transformer"), promise or expected
    if first == source:
        return
    assert promise == expected
    assert error(second, first) < LIMIT
    if config_of(first)["model_type"] != config_of(second)["model_type"]:
        assert config_of(first)["model_type"] == MODEL_TYPES[layout]
        first = convert(first, "diff-transformer")
    ignored: dict[str, Any] = {"_name_or_path": ""}
    if any(step.name == "depth" for step in steps):  # a class may derive λ_init of a new layer
        ignored["lambda_init"] = None
    configs = [config_of(folder) for folder in (first, second)]
    complete = [(resolved(config) or config) | ignored for config in configs]
    assert complete[0] == complete[1]
    assert {k: t.tolist() for k, t in tensors_of(first).items()} == {
        k: t.tolist() for k, t in tensors_of(second).items()
    }


def reordered(weight: Tensor, *axes: int) -> Tensor:
    """Pairs of heads, or halves of a head, in another order."""
    return weight.view(-1, 2, 2, 2, weight.shape[1]).transpose(*axes).reshape(weight.shape)


QKV = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
ORDERED = [
    *[("motif", broken) for broken in ("lambda_q1", "subln.weight", *QKV)],
    *[("microsoft", broken) for broken in QKV],
    ("microsoft-v2", "q_proj.weight"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("layout", "broken"), ORDERED)
@pytest.mark.parametrize("axes", [(0, 1), (2, 3)])
def test_lambda_init_and_orders_matter(
    layout: str, broken: str, axes: tuple[int, int], tmp_path: Path
) -> None:
    """Negative controls: what is computed for the new λ_init must not be left out."""
    config, kind = {"lambda_std_dev": 0.3, "rms_norm_eps": 1e-5}, "diffllama"
    if layout == "microsoft-v2":
        config, kind = V2 | PAIRS | {"num_attention_heads": 8}, "diff-transformer"
    source = save(tmp_path / "source", kind, **config)
    target = convert(source, layout)
    assert error(source, target) < LIMIT
    name = f"model.layers.0.self_attn.{broken}"
    with edit_weights(target) as tensors:
        if "proj" in broken:
            tensors[name] = reordered(tensors[name], *axes)
        else:
            tensors[name] = tensors_of(source).get(name, torch.ones(8))
    assert error(source, target) > 1e-3


REFUSED: list[tuple[str, dict[str, Any], str, str]] = listed("layouts", "refused")


@pytest.mark.parametrize(
    ("layout", "config", "target", "named"),
    REFUSED,
    ids=[f"{number}-{case[0]}-{case[2]}" for number, case in enumerate(REFUSED)],
)
def test_what_cannot_be_expressed_is_refused(
    layout: str, config: dict[str, Any], target: str, named: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", layout, **config)
    with pytest.raises(InputError, match=named) as refusal:
        convert(source, target)
    sentence = str(refusal.value)
    assert "\n" not in sentence
    assert " " in sentence
    assert list(tmp_path.iterdir()) == [source]


AFFINE = {"rms_norm_eps": 1e-5, "head_dim": 16}
FACTOR = {"head_output_scale": "one_minus_lambda_init", "lambda_init": [0.3, 0.6]}
UNNORMED = V2 | PAIRS | {"num_attention_heads": 8} | FACTOR


@pytest.mark.parametrize(
    ("layout", "config", "to", "dtype", "wider"),
    [
        ("microsoft", AFFINE, "diffllama", "float32", "float64"),
        ("diff-transformer", AFFINE, "diffllama", "bfloat16", "float32"),
        ("diff-transformer", UNNORMED, "microsoft-v2", "float32", "float64"),
    ],
)
def test_norms_and_factors_go_into_the_columns(
    layout: str, config: dict[str, Any], to: str, dtype: str, wider: str, tmp_path: Path
) -> None:
    """Where the product needs more bits than there are, it is refused, not rounded."""
    source = save(tmp_path / "source", layout, 1, FLOATS[dtype], **config)
    with pytest.raises(InputError, match=r"o_proj.*--dtype|--dtype.*o_proj"):
        convert(source, to)
    assert list(tmp_path.iterdir()) == [source]
    target = convert(source, to, wider)
    assert error(source, target) < LIMIT
    assert {str(tensor.dtype) for tensor in tensors_of(target).values()} == {f"torch.{wider}"}


def test_narrow_vectors_that_cannot_hold_lambda_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "diffllama", dtype=torch.bfloat16, lambda_std_dev=0.3)
    with pytest.raises(InputError, match=r"λ of .*layers.*--dtype"):
        convert(source, "motif")
    assert list(tmp_path.iterdir()) == [source]
    assert error(source, convert(source, "motif", "float32")) < LIMIT


@pytest.mark.parametrize("value", [30.0, 1e30])
def test_lambda_that_overflows_is_refused(value: float, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "diffllama")
    with edit_weights(source) as tensors:
        for vector in ("lambda_q1", "lambda_k1"):
            tensors[f"model.layers.1.self_attn.{vector}"].fill_(value)
    expected = r"layers\.1.* in .*safetensors.* below 700 were expected, correct"
    with pytest.raises(InputError, match=expected):
        convert(source, "motif")
    assert list(tmp_path.iterdir()) == [source]


# The proof


QUICK = {"prompts": 2, "length": 12}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("layout", "to", "tensor"), listed("layouts", "a changed number is caught")
)
def test_a_changed_number_is_caught(layout: str, to: str, tensor: str, tmp_path: Path) -> None:
    source, target = save(tmp_path / "source", layout, 1, rms_norm_eps=1e-5), tmp_path / "target"
    result = growkit.convert(source, target, to, verify=growkit.Settings(**QUICK))
    assert result["kept"] is True, result["verification"]
    assert result["verification"].sections.weights.recovered is True
    with edit_weights(target) as tensors:
        numbers = tensors[f"model.layers.1.self_attn.{tensor}"].view(-1)
        numbers[numbers.abs().argmax()] *= 1.001
    assert growkit.verify(source, target, **QUICK)["kept"] is False
