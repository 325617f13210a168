"""Conversions between variants, judged by the real classes in strict float64."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from growkit.model.checkpoint.folder import read_json
from tests.families import FAMILIES, SCALES, llama
from tests.files import edit_json, edit_weights
from tests.models import load_strict, relative_error, save_model, save_random, seeded
from tests.test_group_diff import draw_source

LIMIT = 1e-12
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def convert(source: Path, target: Path, to: str, dtype: str | None = None, **options: Any) -> Any:
    return growkit.convert(source, target, to, dtype=dtype, verify=False, **options)


def diff_source(folder: Path, seed: int, **options: Any) -> Path:
    """A random DIFF Transformer without an integral and with full projections."""
    choose = seeded(seed)
    kind, config, _ = draw_source(choose)
    while kind != "diff_transformer":
        kind, config, _ = draw_source(choose)
    config |= {"integral": "none", "qk_projection": "full"} | options
    return save_model(folder, kind, seed, choose.choice(DTYPES), **config)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("to", ["diff-v2", "diff"])
def test_softmax_becomes_differential(to: str, seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config, _ = llama(choose)
    source = save_model(tmp_path / "source", "llama", seed, choose.choice(DTYPES), **config)
    result = convert(source, tmp_path / "target", to)
    assert result["promise"] == "exact"
    assert relative_error(source, tmp_path / "target") < LIMIT


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("diff-v2", {}),
        ("diff", {}),
        ("diff", {"head_norm": "affine"}),
        ("diff", {"head_norm": "plain"}),
    ],
)
def test_everything_new_can_train(to: str, options: Any, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    convert(source, tmp_path / "target", to, **options)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "target", dtype=torch.float64)
    ids = torch.randint(29, (2, 12), generator=torch.Generator().manual_seed(0))
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(ids, labels=ids).loss.backward()
    assert all(bool(weight.grad.any()) for weight in model.parameters())
    optimizer.step()
    assert not any(weight.equal(before[name]) for name, weight in model.named_parameters())
    noise = before["model.layers.0.self_attn.q_proj.weight"].shape[0] // 2
    q = model.model.layers[0].self_attn.q_proj.weight
    assert not q[:noise].equal(q[noise:])


@pytest.mark.parametrize(("head_norm", "bias"), [("affine", True), ("plain", False)])
def test_a_head_norm_leaves_heads_their_mean_size(
    head_norm: str, bias: bool, tmp_path: Path
) -> None:
    """The output of attention is as large as before on a token that sees only itself.

    Its value is the head, and hidden states of random tokens have no direction. With another size
    (the control) it is not.
    """
    config = {"hidden_size": 256, "vocab_size": 99, "num_hidden_layers": 1, "head_dim": 32}
    source = save_model(tmp_path / "source", "llama", attention_bias=bias, **config)
    target = tmp_path / "target"
    result = convert(source, target, "diff", head_norm=head_norm)
    assert result["promise"] == "different"
    assert result["lost"] == "the sizes of heads: a head norm cannot be undone"

    def size(folder: Path, factor: float = 1.0) -> float:
        model, outputs = load_strict(folder), []
        attention = model.model.layers[0].self_attn
        if bias:
            attention.o_proj.bias.data.zero_()
        attention.o_proj.weight.data.mul_(factor)
        attention.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
        with strict_float64(), torch.no_grad():
            model(torch.arange(99)[:, None])
        return float(outputs[0].square().mean().sqrt())

    assert 0.9 < size(target) / size(source) < 1.1
    assert not 0.9 < size(target, 1.3) / size(source) < 1.1
    assert read_json(target / "config.json")["head_output_scale"] == "one_minus_lambda_init"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40))
def test_gated_dint_begins_as_diff(seed: int, tmp_path: Path) -> None:
    source = diff_source(tmp_path / "source", seed)
    integral = seeded(seed).choice(["causal", "column_mean"])
    assert convert(source, tmp_path / "dint", "dint", integral=integral)["promise"] == "exact"
    assert relative_error(source, tmp_path / "dint") < LIMIT
    back = convert(tmp_path / "dint", tmp_path / "back", "diff")
    assert back["promise"] == "exact"
    assert relative_error(source, tmp_path / "back") < LIMIT


def test_an_open_gate_is_the_unified_dint(tmp_path: Path) -> None:
    """At g = 1 the two are the same; at 0 the gate has a gradient; the way back is not exact."""
    source = diff_source(tmp_path / "source", 1)
    convert(source, tmp_path / "gated", "dint")
    unified = convert(source, tmp_path / "unified", "dint", gamma="unified")
    assert unified["promise"] == "different"
    assert "γ" in unified["lost"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "gated", dtype=torch.float64)
    ids = torch.arange(12)[None]
    model(ids, labels=ids).loss.backward()
    gates = [weight for name, weight in model.named_parameters() if "gamma_gate" in name]
    assert all(bool(gate.grad.any()) for gate in gates)
    with torch.no_grad():
        for gate in gates:
            gate.fill_(1)
    model.save_pretrained(tmp_path / "open")
    assert relative_error(tmp_path / "unified", tmp_path / "open") < LIMIT
    assert relative_error(source, tmp_path / "open") > 1e-3
    assert convert(tmp_path / "open", tmp_path / "back", "diff")["promise"] == "different"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(30))
def test_grouped_diff_becomes_diff(seed: int, tmp_path: Path) -> None:
    config = {"num_attention_heads": 10, "num_noise_heads": 2, "noise_keys": "own"}
    source = diff_source(tmp_path / "source", seed, num_key_value_heads=4, **config)
    assert convert(source, tmp_path / "target", "diff")["promise"] == "exact"
    assert relative_error(source, tmp_path / "target") < LIMIT
    assert read_json(tmp_path / "target" / "config.json")["num_noise_heads"] == 8


@pytest.mark.sampled(2)
@pytest.mark.parametrize("scope", ["head", "layer", "all_heads"])
@pytest.mark.parametrize("seed", range(12))
def test_sharing_with_enough_rank_loses_nothing(scope: str, seed: int, tmp_path: Path) -> None:
    """At r = d/2 a pair is held exactly, in float64; at r = d everything is."""
    sizes = {"num_attention_heads": 4, "num_noise_heads": 2, "num_key_value_heads": 4}
    sizes |= {"head_dim": 4, "hidden_size": 16}
    source = diff_source(tmp_path / "source", seed, noise_keys="own", **sizes)
    rank = {"head": 2, "layer": 4, "all_heads": 4}[scope]
    shared = convert(source, tmp_path / "shared", "shared-diff", "float64", scope=scope, rank=rank)
    assert shared["promise"] == "bounded"
    assert relative_error(source, tmp_path / "shared") < LIMIT
    back = convert(tmp_path / "shared", tmp_path / "back", "diff")
    assert back["promise"] == "exact"
    assert relative_error(source, tmp_path / "back") < LIMIT


@pytest.mark.sampled(1)
@pytest.mark.parametrize("differing", [0, 1])
@pytest.mark.parametrize("scope", ["head", "layer"])
def test_updates_of_heads_that_differ_in_less_than_the_rank_can_train(
    scope: str, differing: int, tmp_path: Path
) -> None:
    """Noise heads of a new DIFF model are copies; in the other model one row of a head differs."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    source = save_model(tmp_path / "source", "llama", 0, torch.float32, **sizes)
    convert(source, tmp_path / "diff", "diff")
    with edit_weights(tmp_path / "diff") as weights:
        for name in weights:
            if name.endswith("q_proj.weight"):
                weights[name][0] *= 1 + differing
    out, asked = tmp_path / "out", {"scope": scope, "rank": 4}
    settings = growkit.Settings(prompts=1, length=16, trainability=True)
    grown = growkit.convert(tmp_path / "diff", out, "shared-diff", verify=settings, **asked)
    trainability = grown["verification"].sections.trainability
    assert not trainability["silent_parameters"]
    assert relative_error(tmp_path / "diff", out) < 1e-5
    model = AutoModelForCausalLM.from_pretrained(out)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    ids = torch.arange(24)[None] % 29
    for _ in range(2):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        if name.endswith(("down.weight", "up.weight")):
            assert parameter.any(1).all(), name
            assert parameter.grad.any(1).all(), name


# --- Other softmax models, whose layers are more than Llama's -------------------------------------


KINDS, NO_WINDOW = ("qwen2", "qwen3", "granite"), {"use_sliding_window": False}


def save(kind: str, seed: int, folder: Path, **more: Any) -> Path:
    choose = seeded(seed)
    config = CONFIG_MAPPING[kind](**(FAMILIES[kind].any(choose) | NO_WINDOW | more))
    return save_random(folder, config, seed, choose.choice([torch.float32, torch.bfloat16]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", KINDS)
def test_other_softmax_models_become_differential(kind: str, tmp_path: Path) -> None:
    """As a DIFF Transformer without noise heads each comes back with all its tensors."""
    source, back = save(kind, 1, tmp_path / "source"), tmp_path / "back"
    for to in ("diff-v2", "diff", "diff-transformer"):
        assert convert(source, tmp_path / to, to)["promise"] == "exact"
        assert relative_error(source, tmp_path / to) < LIMIT
    convert(tmp_path / "diff-transformer", back, kind)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("qwen3", "qk_norm", False),
        ("qwen2", "attention_output_bias", True),
        *(("granite", key, 2 * value) for key, value in SCALES.items()),
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


def test_what_was_made_before_is_as_it_was(tmp_path: Path) -> None:
    """A config without the keys means what it meant."""
    source = save_model(tmp_path / "source", "diff_transformer", attention_bias=True)
    keys = ["qk_norm", "attention_output_bias", *SCALES]
    complete = load_strict(source).config.to_dict()
    with edit_json(source / "config.json") as config:
        for key in keys:
            del config[key]
    assert load_strict(source).config.to_dict() == complete
    assert [complete[key] for key in keys] == [False, True, 1.0, 1.0, 0.5, 1.0]
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert relative_error(source, tmp_path / "out") < LIMIT
    assert not {*keys} & read_json(tmp_path / "out" / "config.json").keys()
