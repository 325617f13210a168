"""Layouts against one another: each folder judged by a decoder that reads its layout."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DiffLlamaForCausalLM
from typer.testing import CliRunner

import growkit
from growkit.base.errors import InputError
from growkit.cli.app import app
from growkit.families.family import families
from growkit.modeling import FILES, register
from growkit.modeling.configuration_diff_transformer import DiffTransformerConfig
from growkit.modeling.modeling_diff_transformer import DiffTransformerForCausalLM
from growkit.planning.layouts import solve_lambda
from growkit.recipe.files import load_recipe
from growkit.recipe.recipe import ConvertStep, GrowStep, Recipe
from tests import layouts_reference as reference
from tests.conftest import TOKENS, randomise, save_model, seeded, strict_logits

register()

LIMIT = 1e-12
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
PAIRS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
HEADS = {  # two value heads, each for two noise heads
    "microsoft": PAIRS,
    "microsoft-v2": PAIRS,
    "motif": {
        "num_attention_heads": 12,
        "num_noise_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
    },
    "diffllama": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
    "diff-transformer": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
}
MODEL_TYPES = {
    "microsoft": reference.MICROSOFT,
    "microsoft-v2": reference.MICROSOFT_V2,
    "motif": reference.MOTIF,
    "diffllama": "diffllama",
    "diff-transformer": "diff_transformer",
}
FOREIGN = ("microsoft", "microsoft-v2", "motif")
V2 = {
    "lambda_type": "projected",
    "noise_keys": "shared",
    "head_norm": "none",
    "head_output_scale": "none",
    "value_head_dim": 4,
    "lambda_init": None,
}


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def change_config(folder: Path, **changes: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config_of(folder) | changes))


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}


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
    expected, found = logits(source), logits(target)
    return float((expected - found).abs().max() / expected.square().mean().sqrt())


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
    recipe = Recipe(str(source), (ConvertStep(layout),), str(output), None, dtype=dtype, **options)
    assert growkit.run(recipe)["kept"] is None
    assert config_of(output)["model_type"] == MODEL_TYPES[layout]
    return output


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
    rope: dict[str, Any] = choose.choice(
        [
            {},
            {"rope_theta": 500.0},
            {"rope_theta": 500.0, "rope_scaling": None},
            {"rope_parameters": {"rope_theta": 300.0, "rope_type": "default"}},
            {"rope_parameters": {"rope_theta": 300.0, "rope_type": "linear", "factor": 2.0}},
            {"rope_theta": 700.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        ]
    )
    if choose.random() < 0.2:
        del config["rms_norm_eps"]
    return config | rope


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


DRAW: dict[str, Callable[[Random], dict[str, Any]]] = {
    "microsoft": draw_microsoft,
    "microsoft-v2": draw_microsoft_v2,
    "motif": draw_motif,
}


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("layout", FOREIGN)
def test_any_layout_is_read(layout: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    dtype = FLOATS[choose.choice(list(FLOATS))]
    unsaid = {"head_dim": None, "num_key_value_heads": None, "num_noise_heads": None}
    source = save(tmp_path / "source", layout, seed, dtype, **(unsaid | DRAW[layout](choose)))
    target = convert(source, "diff-transformer", shard_size=choose.choice(["5GB", "4KB"]))
    assert error(source, target) < LIMIT
    assert all((target / name).exists() for name in FILES)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layout", ["diffllama", "motif", "microsoft", "diff-transformer"])
def test_any_diff_becomes_grouped_diff(layout: str, seed: int, tmp_path: Path) -> None:
    """1:1, named in the config; and goes on to 2:1."""
    choose = seeded(seed)
    dtype = FLOATS[choose.choice(list(FLOATS))]
    unsaid = {"head_dim": None, "num_key_value_heads": None, "num_noise_heads": None}
    config = unsaid | DRAW[layout](choose) if layout in DRAW else HEADS[layout]
    if layout == "motif":
        config |= HEADS["diffllama"] | {"num_noise_heads": None}  # as Motif-2.6B
    source = save(tmp_path / "source", layout, seed, dtype, **config)
    steps = (ConvertStep("gda"), GrowStep("group-diff", {"signal_heads": "x2"}))
    for count in (1, 2):
        target = tmp_path / f"target{count}"
        result = growkit.run(Recipe(str(source), steps[:count], str(target), None))
        assert result["promise"] == "exact"
        assert error(source, target) < LIMIT
        found = config_of(target)
        noise = found["num_noise_heads"]
        assert found["num_attention_heads"] == (count + 1) * noise
    weights = tensors_of(target)
    queries = weights["model.layers.0.self_attn.q_proj.weight"]
    queries.copy_(queries.roll(len(queries) // 3, 0))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    assert error(source, target) > LIMIT  # the control: signal heads in the place of noise heads


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


@pytest.mark.sampled(40)
@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("layout", [*FOREIGN, "diffllama"])
def test_any_diff_transformer_is_written(layout: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config = expressible(choose, layout)
    source = save(tmp_path / "source", "diff-transformer", seed, **config)
    # DiffLlama has no place for factors but the columns of o_proj, which they would round.
    target = convert(source, layout, "float64" if layout == "diffllama" else None)
    assert error(source, target) < LIMIT


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("layout", ["microsoft", "motif", "diff-transformer"])
def test_any_diffllama_is_written(layout: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    kv, repeats = choose.choice([1, 2, 3]), choose.choice([1, 2, 3])
    source = save(
        tmp_path / "source",
        "diffllama",
        seed,
        hidden_size=choose.choice([12, 16]),
        num_hidden_layers=choose.choice([1, 2, 3]),
        num_attention_heads=2 * kv * repeats,
        num_key_value_heads=2 * kv,
        head_dim=choose.choice([4, 6]),
        rms_norm_eps=1e-5 if layout == "microsoft" else choose.choice([1e-5, 1e-2]),
        attention_bias=layout == "diff-transformer" and choose.random() < 0.5,
        tie_word_embeddings=choose.random() < 0.5,
        hidden_act=choose.choice(["silu", "gelu"]),
        lambda_std_dev=0.3,
    )
    target = convert(source, layout)
    assert error(source, target) < LIMIT
    if layout == "diff-transformer":
        assert type(AutoModelForCausalLM.from_pretrained(target)) is DiffTransformerForCausalLM


def test_microsofts_head_dim(tmp_path: Path) -> None:
    """Where it is not given, it is half of what a Llama with as many heads has."""
    source = save(tmp_path / "source", "microsoft", head_dim=None)
    assert config_of(convert(source, "diff-transformer"))["head_dim"] == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("layout", "via"),
    [
        ("diffllama", "microsoft"),
        ("diffllama", "motif"),
        ("diffllama", "diff-transformer"),
        ("motif", "diff-transformer"),
        ("microsoft", "diff-transformer"),
        ("microsoft", "motif"),
        ("microsoft-v2", "diff-transformer"),
    ],
)
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


def test_lambda_is_solved_where_lambda_init_differs(tmp_path: Path) -> None:
    """Motif counts layers from -1."""
    source = save(tmp_path / "source", "diffllama", lambda_std_dev=0.3)
    before, after = tensors_of(source), tensors_of(convert(source, "motif"))
    for layer in range(2):
        prefix = f"model.layers.{layer}.self_attn.lambda_"
        numbers = []
        for tensors, depth in ((before, layer), (after, layer - 1)):
            q1, k1, q2, k2 = (tensors[prefix + name].double() for name in ("q1", "k1", "q2", "k2"))
            numbers.append((q1 @ k1).exp() - (q2 @ k2).exp() + reference.lambda_init(depth))
        assert abs(float(numbers[0] - numbers[1])) < 1e-13
        assert not before[prefix + "q1"].equal(after[prefix + "q1"])


@pytest.mark.parametrize("broken", ["lambda_q1", "subln.weight"])
def test_lambda_init_matters(broken: str, tmp_path: Path) -> None:
    """Negative control: what is computed for the new λ_init must not be left out."""
    source = save(tmp_path / "source", "diffllama", lambda_std_dev=0.3)
    target = convert(source, "motif")
    tensors = tensors_of(target)
    name = f"model.layers.0.self_attn.{broken}"
    old = tensors_of(source).get(name)
    tensors[name] = torch.ones(8) if old is None else old
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert error(source, target) > 1e-3


PLAIN = {"head_norm": "plain", "head_norm_eps": 1e-5, "rms_norm_eps": 1e-5}
SOFTMAX = {"num_noise_heads": 0, "head_output_scale": "none", "lambda_init": [0.0, 0.0], **PLAIN}
PLAIN_MOTIF = {"hidden_act": "silu", "rms_norm_eps": 1e-5}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    # grouped
    ("motif", PLAIN_MOTIF, "diffllama", "signal_heads 8"),
    ("motif", PLAIN_MOTIF, "microsoft", "signal_heads 8"),
    ("motif", {"num_attention_heads": 16, **PLAIN_MOTIF}, "diffllama", "signal_heads 12"),
    ("motif", {"num_attention_heads": 24, **PLAIN_MOTIF}, "microsoft", "signal_heads 20"),
    (
        "diff-transformer",
        {"num_attention_heads": 5, "num_noise_heads": 1, "num_key_value_heads": 2, **PLAIN},
        "diffllama",
        "noise_heads|num_attention_heads",
    ),
    (
        "diff-transformer",
        {"num_attention_heads": 12, "num_noise_heads": 4} | V2,
        "microsoft-v2",
        "noise_heads 4 with signal_heads 8",
    ),
    # λ, noise keys, the integral, shared projections, the head norm
    ("microsoft-v2", {}, "motif", "lambda_type 'projected'"),
    ("microsoft-v2", {}, "motif", "noise_keys 'shared'"),
    ("microsoft-v2", {}, "motif", "norm"),
    ("microsoft-v2", {}, "microsoft", "lambda_type 'projected'"),
    ("microsoft-v2", {}, "diffllama", "lambda_type 'projected'"),
    ("microsoft", {}, "microsoft-v2", "lambda_type 'vectors'.*head norm"),
    ("motif", {"hidden_act": "silu"}, "microsoft-v2", "noise_keys 'own'"),
    *(
        ("diff-transformer", {"integral": kind, **PLAIN}, layout, f"integral '{kind}'")
        for kind in ("causal", "column_mean")
        for layout in ("microsoft", "motif", "diffllama")
    ),
    *(
        ("diff-transformer", shared | PLAIN, layout, "qk_projection 'shared'")
        for layout in ("microsoft", "motif", "diffllama")
        for shared in [{"qk_projection": "shared", "shared_rank": 2}]
    ),
    *(
        ("diff-transformer", {"head_norm": "none"}, layout, "without a norm")
        for layout in ("microsoft", "motif", "diffllama")
    ),
    ("diff-transformer", V2 | {"head_norm": "plain"}, "microsoft-v2", "a head norm"),
    # epsilons
    (
        "microsoft",
        {"rms_norm_eps": 1e-6},
        "diffllama",
        "rms_norm_eps 1e-06 and head_norm_eps 1e-05",
    ),
    ("motif", {"num_attention_heads": 8, "hidden_act": "silu"}, "diffllama", "head_norm_eps 1e-05"),
    ("diffllama", {"rms_norm_eps": 1e-6}, "microsoft", "head_norm_eps 1e-06"),
    # biases
    ("diffllama", {"attention_bias": True, "rms_norm_eps": 1e-5}, "microsoft", "attention_bias"),
    ("diffllama", {"attention_bias": True}, "motif", "attention_bias True and mlp_bias False"),
    ("diff-transformer", {"mlp_bias": True, **PLAIN}, "diffllama", "mlp_bias"),
    ("diff-transformer", V2 | {"attention_bias": True}, "microsoft-v2", "attention_bias"),
    # activations, sizes, kinds of attention
    ("motif", {"num_attention_heads": 8, "rms_norm_eps": 1e-5}, "diffllama", "act_fn"),
    ("diff-transformer", {"hidden_act": "poly_norm", **PLAIN}, "microsoft", "act_fn"),
    ("diff-transformer", {"hidden_act": "poly_norm", **V2}, "microsoft-v2", "act_fn"),
    *(
        ("diff-transformer", {"value_head_dim": 5, **PLAIN}, layout, "value_head_dim 5")
        for layout in ("microsoft", "motif", "diffllama")
    ),
    ("diff-transformer", V2 | {"value_head_dim": 8}, "microsoft-v2", "value_head_dim 8"),
    *(
        ("diff-transformer", SOFTMAX, layout, "noise_heads 0|num_noise_heads|noise_keys")
        for layout in ("microsoft", "motif", "diffllama", "microsoft-v2")
    ),
    ("motif", {"k_ratio": 2}, "diff-transformer", "k_ratio 2"),
    ("motif", {"use_sliding_window": True}, "diff-transformer", "use_sliding_window True"),
]


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


@pytest.mark.parametrize("layout", ["microsoft", "microsoft-v2", "diffllama"])
def test_an_activation_that_the_source_cannot_have_is_refused(layout: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", layout)
    change_config(source, hidden_act="poly_norm")
    with pytest.raises(InputError, match=r"hidden_act|act_fn"):
        convert(source, "diff-transformer")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("wrong", [[0.2], [0.2, 0.3, 0.4], 0.8, "x", [None, None]], ids=str)
def test_a_wrong_lambda_init_is_refused(wrong: Any, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "diff-transformer")
    change_config(source, lambda_init=wrong)
    with pytest.raises(InputError, match="lambda_init"):
        convert(source, "motif")
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    "layout", ["microsoft", "microsoft-v2", "motif", "diffllama", "diff-transformer"]
)
def test_the_layout_that_it_has_is_refused(layout: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", layout)
    with pytest.raises(InputError, match="already"):
        convert(source, layout)
    assert list(tmp_path.iterdir()) == [source]


def test_without_differential_attention_it_is_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    with pytest.raises(InputError, match=r"num_noise_heads 0 .*diff-v2"):
        convert(source, "motif")


@pytest.mark.parametrize(("dtype", "wider"), [("float32", "float64"), ("bfloat16", "float32")])
@pytest.mark.parametrize("layout", ["microsoft", "diff-transformer"])
def test_an_affine_head_norm_goes_into_the_columns(
    layout: str, dtype: str, wider: str, tmp_path: Path
) -> None:
    """Where the product needs more bits than there are, it is refused, not rounded."""
    eps = {"rms_norm_eps": 1e-5, "head_dim": 16}
    source = save(tmp_path / "source", layout, 1, FLOATS[dtype], **eps)
    with pytest.raises(InputError, match="--dtype") as refusal:
        convert(source, "diffllama")
    assert "o_proj" in str(refusal.value)
    assert list(tmp_path.iterdir()) == [source]
    target = convert(source, "diffllama", wider)
    assert error(source, target) < LIMIT
    assert {str(tensor.dtype) for tensor in tensors_of(target).values()} == {f"torch.{wider}"}


def test_narrow_vectors_that_cannot_hold_lambda_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "diffllama", dtype=torch.bfloat16, lambda_std_dev=0.3)
    with pytest.raises(InputError, match=r"λ of a layer .*--dtype"):
        convert(source, "motif")
    assert list(tmp_path.iterdir()) == [source]
    assert error(source, convert(source, "motif", "float32")) < LIMIT


def test_a_factor_without_a_norm_goes_into_the_columns(tmp_path: Path) -> None:
    multiplier = {"head_output_scale": "one_minus_lambda_init", "lambda_init": [0.3, 0.6]}
    source = save(
        tmp_path / "source",
        "diff-transformer",
        **(V2 | HEADS["microsoft"] | {"num_attention_heads": 8, **multiplier}),
    )
    with pytest.raises(InputError, match="--dtype"):
        convert(source, "microsoft-v2")
    assert error(source, convert(source, "microsoft-v2", "float64")) < LIMIT


# Growth


def draw_growth(choose: Random, layout: str) -> tuple[dict[str, Any], str, dict[str, str], bool]:
    """A random model and its growth: config, method, sizes, and whether the layout is kept."""
    kv, repeats = choose.choice([1, 2]), choose.choice([1, 2])
    noise = kv * repeats
    ratio = choose.choice([1, 2, 3]) if layout == "motif" else 1
    config: dict[str, Any] = {
        "num_hidden_layers": choose.choice([1, 2]),
        "num_attention_heads": noise,
        "num_key_value_heads": kv,
        "head_dim": choose.choice([2, 4]),
        "tie_word_embeddings": choose.random() < 0.5,
    }
    if layout == "motif":
        config["num_attention_heads"] = noise * (1 + ratio)
        config["num_key_value_heads"] = 2 * kv
        config["num_noise_heads"] = noise if ratio > 1 else None
        config["use_bias"] = choose.random() < 0.5
    hidden = choose.choice([1, 2, 3])
    if choose.random() < 0.4:
        heads, more = choose.choice([(1, 1), (2, 1), (2, 2), (3, 1), (3, 3)])
        sizes = {"hidden": hidden, "ffn": 2, "heads": heads, "kv_heads": more}
        kept, method = True, "hypercloning"
    else:
        noises, more = choose.choice([(1, 1), (2, 1), (2, 2)])
        signals = noises * choose.choice([1, 2, 3])
        sizes = {"hidden": hidden, "ffn": 2, "signal_heads": signals}
        sizes |= {"noise_heads": noises, "kv_heads": more}
        kept, method = layout == "motif" or signals == noises, "group-diff"
        if layout != "motif" and noises == 1:
            del sizes["noise_heads"]
    return config, method, {name: f"x{factor}" for name, factor in sizes.items()}, kept


@pytest.mark.parametrize("seed", range(16))
@pytest.mark.parametrize("layout", FOREIGN)
def test_any_layout_grows(layout: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config, method, sizes, kept = draw_growth(choose, layout)
    source = save(tmp_path / "source", layout, seed, **config)
    growkit.grow(
        source,
        tmp_path / "target",
        method=method,
        symmetry=choose.choice(["break", "keep"]),
        seed=seed,
        verify=False,
        **sizes,
    )
    kind = MODEL_TYPES[layout if kept else "diff-transformer"]
    assert config_of(tmp_path / "target")["model_type"] == kind
    assert error(source, tmp_path / "target") < LIMIT


@pytest.mark.parametrize("layout", ["microsoft", "microsoft-v2", "diffllama"])
def test_signal_heads_alone_need_another_layout(layout: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", layout)
    target = tmp_path / "target"
    growkit.grow(source, target, method="group-diff", hidden="x2", signal_heads="x2", verify=False)
    grown = config_of(target)
    assert grown["model_type"] == "diff_transformer"
    assert (grown["num_attention_heads"], grown["num_noise_heads"]) == (12, 4)
    assert error(source, target) < LIMIT


@pytest.mark.parametrize("layout", ["microsoft", "microsoft-v2"])
def test_sizes_of_noise_heads(layout: str, tmp_path: Path) -> None:
    """Heads that no config key counts have a size all the same."""
    source = save(tmp_path / "source", layout)
    target = tmp_path / "target"
    sizes = {"signal_heads": 8, "noise_heads": 8}
    growkit.grow(source, target, method="group-diff", verify=False, **sizes)
    assert config_of(target)["num_attention_heads"] == 8
    assert error(source, target) < LIMIT


def test_sizes_are_those_of_the_source_whatever_it_becomes(tmp_path: Path) -> None:
    """Microsoft counts pairs of key-value heads: from 2 to 4 is twice as many."""
    source = save(tmp_path / "source", "microsoft")
    sizes: dict[str, Any] = {"signal_heads": 16, "noise_heads": "x2", "kv_heads": 4}
    grown = growkit.grow(source, tmp_path / "target", method="group-diff", verify=False, **sizes)
    assert config_of(tmp_path / "target")["model_type"] == "diff_transformer"
    assert grown["copies"] == [{"signal_heads": 4, "noise_heads": 2, "kv_heads": 2}]


# λ


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_lambda_is_kept_by_other_vectors(dtype: torch.dtype) -> None:
    worst = 0.0
    for seed in range(200):
        choose = seeded(seed)
        generator = torch.Generator().manual_seed(seed)
        width, scale = choose.choice([16, 32, 64, 128]), choose.choice([0.02, 0.1, 0.2, 0.3])
        vectors = [(scale * torch.randn(width, generator=generator)).to(dtype) for _ in range(4)]
        if choose.random() < 0.3:
            vectors[choose.randrange(4)].zero_()
        old, new = choose.uniform(-0.5, 0.8), choose.uniform(-0.5, 0.8)
        if choose.random() < 0.3:  # DiffLlama's and Motif's
            depth = choose.randrange(40)
            old, new = reference.lambda_init(depth), reference.lambda_init(depth - 1)
        kept = [vector.clone() for vector in vectors]
        solved = solve_lambda(vectors, old, new)
        assert all(a.equal(b) for a, b in zip(vectors, kept, strict=True))
        assert all(vector.dtype == dtype and vector.shape == (width,) for vector in solved)
        values = []
        for (q1, k1, q2, k2), lambda_init in ((vectors, old), (solved, new)):
            first = (q1.double() * k1.double()).sum().exp()
            second = (q2.double() * k2.double()).sum().exp()
            values.append(float(first - second + lambda_init))
        worst = max(worst, abs(values[0] - values[1]))
    assert worst < 1e-13


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("old", "new"), [(0.2, -0.01), (-0.01, 0.2), (0.2, 0.2)])
def test_lambda_of_zero_vectors(old: float, new: float, dtype: torch.dtype) -> None:
    solved = solve_lambda([torch.zeros(16, dtype=dtype) for _ in range(4)], old, new)
    q1, k1, q2, k2 = (vector.double() for vector in solved)
    assert abs(float((q1 @ k1).exp() - (q2 @ k2).exp()) + new - old) < 1e-13


# Orders


def random_sizes(choose: Random) -> Mapping[str, int]:
    kv, repeats, ratio = (choose.choice([1, 2, 3, 4]) for _ in range(3))
    noise = kv * repeats
    width = choose.choice([2, 4, 6, 8])
    return {
        "kv_heads": kv,
        "noise_heads": noise,
        "signal_heads": noise * ratio,
        "head_dim": width,
        "half": 2,
    }


@pytest.mark.parametrize("name", ["microsoft", "microsoft_v2", "motif", "diffllama"])
def test_orders_are_permutations(name: str) -> None:
    orders = [tensor.order for tensor in families()[name].tensors if tensor.order]
    assert orders
    for seed in range(50):
        for order in orders:
            rows = order(random_sizes(seeded(seed)))
            assert sorted(rows) == list(range(len(rows)))


def test_orders_as_they_are_written_down() -> None:
    sizes = {"signal_heads": 8, "noise_heads": 2, "kv_heads": 2, "head_dim": 4, "half": 2}

    def stored(family: str, projection: str, sizes: Mapping[str, int]) -> list[int]:
        tensor = next(t for t in families()[family].tensors if f"{projection}.weight" in t.name)
        assert tensor.order
        return tensor.order(sizes)

    def heads(rows: list[int]) -> list[int]:
        assert all(row % 4 == place % 4 for place, row in enumerate(rows))
        return [row // 4 for row in rows[::4]]

    assert heads(stored("motif", "q_proj", sizes)) == [0, 1, 2, 3, 8, 4, 5, 6, 7, 9]
    assert heads(stored("motif", "k_proj", sizes)) == [0, 2, 1, 3]
    assert heads(stored("diffllama", "v_proj", sizes)) == [0, 2, 1, 3]
    pairs = sizes | {"signal_heads": 2}
    assert stored("microsoft", "q_proj", pairs) == [
        *(0, 2, 1, 3),  # the first signal head: RoPE turns 0 with 2 in halves, with 1 as neighbours
        *(8, 10, 9, 11),
        *(4, 6, 5, 7),
        *(12, 14, 13, 15),
    ]
    assert stored("microsoft_v2", "k_proj", pairs) == [0, 2, 1, 3, 4, 6, 5, 7]


def blocked(weight: Tensor) -> Tensor:
    """[s, n, s, n] to [s, s, n, n], heads of width 4."""
    heads = weight.view(-1, 4, weight.shape[1])
    return torch.cat([heads[0::2], heads[1::2]]).flatten(0, 1)


def halves(weight: Tensor) -> Tensor:
    """Neighbours to halves, heads of width 4."""
    return weight.view(-1, 4, weight.shape[1])[:, [0, 2, 1, 3]].flatten(0, 1)


def unpaired(weight: Tensor) -> Tensor:
    """[v v', w w'] to [v, w, v', w'], heads of width 4."""
    return weight.view(-1, 2, 4, weight.shape[1]).transpose(0, 1).flatten(0, 2)


@pytest.mark.parametrize(
    ("layout", "projection", "wrong"),
    [
        ("microsoft", "q_proj", blocked),
        ("microsoft", "k_proj", blocked),
        ("microsoft", "q_proj", halves),
        ("microsoft", "k_proj", halves),
        ("microsoft", "v_proj", unpaired),
        ("motif", "q_proj", blocked),
        ("motif", "k_proj", blocked),
        ("motif", "k_proj", halves),
        ("motif", "v_proj", unpaired),
        ("microsoft-v2", "q_proj", blocked),
        ("microsoft-v2", "q_proj", halves),
        ("microsoft-v2", "k_proj", halves),
    ],
)
def test_wrong_orders_fail(
    layout: str, projection: str, wrong: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    if layout == "microsoft-v2":
        source = convert(save(tmp_path / "source", layout), "diff-transformer")
    else:
        source = save(tmp_path / "source", "diffllama", rms_norm_eps=1e-5)
    target = convert(source, layout)
    assert error(source, target) < LIMIT
    tensors = tensors_of(target)
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.{projection}.weight"
        tensors[name] = wrong(tensors[name]).contiguous()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert error(source, target) > 1e-3


# The proof


CONVERSIONS = [
    ("diffllama", "microsoft"),
    ("diffllama", "motif"),
    ("diffllama", "diff-transformer"),
    ("microsoft", "diff-transformer"),
    ("microsoft", "motif"),
    ("microsoft-v2", "diff-transformer"),
    ("motif", "diff-transformer"),
]
QUICK = {"prompts": 2, "length": 12}


def proved(source: Path, layout: str, output: Path) -> Path:
    recipe = Recipe(str(source), (ConvertStep(layout),), str(output), growkit.Settings(**QUICK))
    result = growkit.run(recipe)
    assert result["kept"] is True, result["verification"]
    assert result["verification"]["weights_recovered"] is True
    return output


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("layout", "to"), CONVERSIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_conversions_are_proved(layout: str, to: str, dtype: str, tmp_path: Path) -> None:
    width = {"head_dim": 16} if dtype == "bfloat16" else {}
    source = save(tmp_path / "source", layout, 1, FLOATS[dtype], rms_norm_eps=1e-5, **width)
    target = proved(source, to, tmp_path / "target")
    assert growkit.verify(source, target, **QUICK)["kept"] is True


def spoil(folder: Path, name: str) -> None:
    """Change the largest number of a tensor by a thousandth."""
    tensors = tensors_of(folder)
    flat = tensors[name].view(-1)
    flat[flat.abs().argmax()] *= 1.001 if flat.dtype != torch.bfloat16 else 1.01
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "to", "tensor"),
    [
        ("diffllama", "motif", "subln.weight"),
        ("diffllama", "motif", "lambda_q1"),
        ("diffllama", "motif", "q_proj.weight"),
        ("diffllama", "microsoft", "subln.weight"),
        ("diffllama", "microsoft", "lambda_k2"),
        ("diffllama", "microsoft", "v_proj.weight"),
        ("microsoft", "diff-transformer", "head_norm.weight"),
        ("microsoft", "diff-transformer", "k_proj.weight"),
        ("microsoft-v2", "diff-transformer", "lambda_proj.weight"),
        ("microsoft-v2", "diff-transformer", "q_proj.weight"),
        ("motif", "diff-transformer", "o_proj.weight"),
        ("motif", "diff-transformer", "lambda_k1"),
    ],
)
def test_a_changed_number_is_caught(layout: str, to: str, tensor: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", layout, 1, rms_norm_eps=1e-5)
    target = proved(source, to, tmp_path / "target")
    spoil(target, f"model.layers.1.self_attn.{tensor}")
    assert growkit.verify(source, target, **QUICK)["kept"] is False


def test_a_changed_bit_is_caught(tmp_path: Path) -> None:
    """In a tensor that is only reordered, where no logit would show it."""
    source = save(tmp_path / "source", "microsoft", vocab_size=300)
    target = proved(source, "motif", tmp_path / "target")
    for name in ("model.layers.0.self_attn.k_proj.weight", "model.embed_tokens.weight"):
        tensors = tensors_of(target)
        tensors[name].view(torch.int32)[-1, -1] ^= 1
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
        verdict = growkit.verify(source, target, **QUICK)
        assert (verdict["kept"], verdict["first_lost_tensor"]) == (False, name)
        tensors[name].view(torch.int32)[-1, -1] ^= 1
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    assert growkit.verify(source, target, **QUICK)["kept"] is True


def test_another_lambda_init_is_caught(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "motif")
    target = proved(source, "diff-transformer", tmp_path / "target")
    change_config(target, lambda_init=[reference.lambda_init(layer) for layer in range(2)])
    assert growkit.verify(source, target, **QUICK)["kept"] is False


# Command line and recipes


def test_convert_on_the_command_line(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "diffllama", rms_norm_eps=1e-5)
    target = tmp_path / "target"
    arguments = ["convert", str(source), str(target), "--to", "microsoft"]
    result = CliRunner().invoke(app, [*arguments, "--prompts", "2", "--length", "12", "--json"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["kept"] is True
    assert error(source, target) < LIMIT
    unproved = ["convert", str(target), str(tmp_path / "back"), "--to", "diffllama", "--no-verify"]
    result = CliRunner().invoke(app, unproved)
    assert result.exit_code == 0, result.stderr
    assert type(AutoModelForCausalLM.from_pretrained(tmp_path / "back")) is DiffLlamaForCausalLM


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "diffllama")
    arguments = ["convert", str(source), str(tmp_path / "out"), "--to", "motif", "--dry-run"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    assert "λ solved again" in result.stdout
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize(
    ("layout", "arguments", "named"),
    [
        ("motif", ["--to", "diffllama"], "Motif|DiffLlama"),
        ("motif", ["--to", "motif"], "already"),
        ("motif", ["--to", "gpt2"], "microsoft-v2"),
        ("microsoft", ["--to", "diffllama"], "head_norm_eps"),
        ("microsoft", ["--to", "diff-transformer", "--dtype", "float8_e5m2"], "round"),
        ("llama", ["--to", "motif"], "num_noise_heads 0"),
    ],
)
def test_errors_are_one_sentence(
    layout: str, arguments: list[str], named: str, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    source = save_model(folder, layout) if layout == "llama" else save(folder, layout, 1)
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "out"), *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    with pytest.raises(InputError, match=named):
        raise InputError(lines[0])
    assert list(tmp_path.iterdir()) == [source]


def test_layouts_are_listed_in_the_help() -> None:
    text = " ".join(CliRunner().invoke(app, ["convert", "--help"]).stdout.split())
    assert all(layout.split("-")[0] in text for layout in MODEL_TYPES)


def test_a_recipe_file_converts(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "diffllama")
    file = tmp_path / "recipe.yaml"
    file.write_text(
        f"source: {source}\nsteps:\n  - convert: motif\noutput: {tmp_path / 'target'}\n"
        "verify: {prompts: 2, length: 12}\n"
    )
    assert load_recipe(file).steps == (ConvertStep("motif"),)
    assert growkit.run(file)["kept"] is True
    assert config_of(tmp_path / "target")["model_type"] == "Motif"


@pytest.mark.parametrize("step", ["convert: moti", "convert: motif\n    hidden: x2", "convert: 3"])
def test_a_wrong_step_is_refused(step: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(f"source: a\nsteps:\n  - {step}\noutput: b\n")
    with pytest.raises(InputError, match=r"motif|hidden|convert"):
        load_recipe(file)


GROWTH = GrowStep("group-diff", {"hidden": "x2", "signal_heads": "x2"})
CLONING = GrowStep("hypercloning", {"hidden": "x2", "kv_heads": "x1"})


@pytest.mark.parametrize(
    ("layout", "steps"),
    [
        ("diffllama", (GROWTH, ConvertStep("motif"))),
        ("diffllama", (ConvertStep("motif"), GROWTH)),
        ("microsoft", (CLONING, ConvertStep("motif"))),
        ("microsoft", (ConvertStep("diff-transformer"), CLONING)),
        ("microsoft-v2", (GROWTH, CLONING)),
        ("motif", (ConvertStep("diff-transformer"), ConvertStep("motif"))),
        ("motif", (GROWTH, ConvertStep("diff-transformer"))),
    ],
)
def test_one_pass_is_two_passes(
    layout: str, steps: tuple[GrowStep | ConvertStep, ...], tmp_path: Path
) -> None:
    source = save(tmp_path / "source", layout, 1)
    one, middle, two = (tmp_path / name for name in ("one", "middle", "two"))
    growkit.run(Recipe(str(source), steps, str(one), None, seed=5))
    growkit.run(Recipe(str(source), steps[:1], str(middle), None, seed=5))
    growkit.run(Recipe(str(middle), steps[1:], str(two), None, seed=5))
    first, second = tensors_of(one), tensors_of(two)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert tensor.dtype == second[name].dtype
        assert tensor.equal(second[name]), name
    assert config_of(one) == config_of(two)
    assert error(source, one) < LIMIT


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("layout", "steps", "dtype"),
    [
        ("diffllama", (GROWTH, ConvertStep("motif")), None),
        ("diffllama", (ConvertStep("motif"), ConvertStep("diffllama")), None),
        ("microsoft", (ConvertStep("motif"), ConvertStep("microsoft")), None),
        ("microsoft", (ConvertStep("diffllama"), CLONING), "float64"),
        ("microsoft-v2", (CLONING, ConvertStep("diff-transformer"), GROWTH), None),
        ("motif", (GROWTH, ConvertStep("diff-transformer"), ConvertStep("motif")), None),
    ],
)
def test_several_steps_are_proved(
    layout: str, steps: tuple[GrowStep | ConvertStep, ...], dtype: str | None, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", layout, 1, rms_norm_eps=1e-5)
    target = tmp_path / "target"
    settings = growkit.Settings(**QUICK)
    result = growkit.run(Recipe(str(source), steps, str(target), settings, dtype=dtype))
    assert result["kept"] is True
    assert error(source, target) < LIMIT
    spoil(target, "model.layers.0.self_attn.k_proj.weight")
    assert growkit.verify(source, target, **QUICK)["kept"] is False
