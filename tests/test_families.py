"""Every family: random models of its class, grown, and judged by transformers in strict float64."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

import growkit
from growkit.base.axes import slopes
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from growkit.model.families.family import families, family_of, known_family
from tests.families import DENSE, FAMILIES, SPARSE, Case, grow_any, llama, save, with_base_names
from tests.files import edit_json, edit_weights, listed
from tests.models import distance, load_strict, relative_error, save_model, save_random, seeded
from tests.test_sizes import KINDS

LENGTH = 40
"""Tokens of a prompt: more than any window of these models."""

PROOF = growkit.Settings(prompts=1, length=LENGTH)

ODD: dict[str, tuple[Any, ...]] = listed("families", "odd")
"""Values of keys that are no switches."""
FACTORS = (1e-6, 1e-3, 1.0, 1.0, 1.0, 30.0)
"""Of some weights of a rare model."""
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

WINDOW = {"sliding_window": 5, "use_sliding_window": True}

SILENT = ("output_attentions", "output_hidden_states", "return_dict", "use_cache", "is_decoder")
"""Switches of how a model is called, and of another kind of model."""
ELSEWHERE = ("add_cross_attention", "is_encoder_decoder", "chunk_size_feed_forward")


def test_every_type_leads_to_its_family() -> None:
    """Without a look at the descriptions that do not name it."""
    every = {kind: family for family in families().values() for kind in family.model_types}
    assert len(every) >= 42
    assert all(known_family({"model_type": kind}) is family for kind, family in every.items())
    others = ("lla", "llama2", "", None, ["llama"])
    assert all(known_family({"model_type": other}) is None for other in others)


@pytest.mark.parametrize("kind", FAMILIES)
def test_missing_keys_have_the_values_of_the_class(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip("transformers has no class for it")
    cls, family = CONFIG_MAPPING[kind], family_of({"model_type": kind}, "here")
    stated = {key: value for key, value in cls().to_dict().items() if value is not None}
    config = cls(**FAMILIES[kind].any(Random(0))).to_dict() | stated
    for key in family.defaults.keys() & config.keys():
        rest = {name: value for name, value in config.items() if name != key}
        expected = cls.from_dict(dict(rest)).to_dict().get(key)
        assert expected is None or family.complete(rest)[key] == expected, key


def odd_values(kind: str, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every change of one key, with what it takes to mean something."""
    complete = CONFIG_MAPPING[kind](**config).to_dict()
    complete.setdefault("rope_parameters", None)
    for key, value in complete.items():
        if key in SILENT or key in ELSEWHERE:
            continue
        values = ODD.get(key, (not value,) if isinstance(value, bool) else ())
        window = WINDOW if key in ("layer_types", "use_sliding_window", "max_window_layers") else {}
        for each in values:
            if each != value:
                yield {n: on for n, on in window.items() if n in complete} | {key: deepcopy(each)}


def operations(kind: str, config: PreTrainedConfig) -> dict[str, dict[str, Any]]:
    """What is done to a model: options of ``growkit.grow``."""
    first = KINDS[kind].hidden[0]
    wider = {"hidden": f"x{first}"}
    if KINDS[kind].by_hidden:
        wider["ffn"] = wider["hidden"]
    found: dict[str, dict[str, Any]] = {"wider": wider}
    if KINDS[kind].ffn and not KINDS[kind].by_hidden:
        found["ffn"] = {"ffn": "x2"}
    found["deeper"] = {"method": "depth", "layers": "x2"}
    if kind in SPARSE:
        found["experts"] = {"method": "experts", "experts": "x2"}
    if kind in DENSE:
        found["upcycled"] = {"method": "upcycle", "experts": 4, "top_k": 2}
    return found


def numbers(folder: Path) -> tuple[torch.Tensor, list[int]]:
    """Logits of a prompt in strict float64, and what the model writes behind half of it."""
    model = load_strict(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (1, LENGTH), generator=generator)
    with strict_float64(), torch.no_grad():
        logits = model(ids).logits[0]
        written = model.generate(
            ids[:, : LENGTH // 2], do_sample=False, max_new_tokens=6, use_cache=False
        )
    return logits, written[0].tolist()


def check(source: Path, out: Path, expected: tuple[torch.Tensor, list[int]], **options: Any) -> str:
    """``exact``, ``refused: …``; or what is wrong, with an exclamation mark."""
    try:
        result = growkit.grow(source, out, verify=PROOF, **options)
    except InputError as error:
        return f"refused: {error}"
    if not result["kept"]:
        reason = result["verification"] and result["verification"]["reason"]
        return f"! not kept: {reason}"
    if result["promise"] != "exact":
        return str(result["promise"])
    logits, written = numbers(out)
    error = distance(expected[0], logits)
    if error >= 1e-12:
        return f"! logits differ by {error:.2g}"
    return "exact" if written == expected[1] else "! it writes another text"


def outcome(kind: str, number: int, folder: Path) -> str:
    """What becomes of one odd config of a type, in one of the ways to grow it."""
    choose = seeded(number)
    base = KINDS[kind].any(choose)
    changes = list(odd_values(kind, base))
    change, source = changes[number % len(changes)], folder / "source"
    try:
        config = CONFIG_MAPPING[kind](**(base | change))
        save_random(source, config, number, choose.choice(DTYPES))
        part, scale = choose.choice(["", "lm_head", "embed", "norm"]), choose.choice(FACTORS)
        with edit_weights(source) as tensors:
            for name in tensors:
                tensors[name] *= scale if part in name else 1
        expected = numbers(source)
        load_strict(source).save_pretrained(folder / "again")
        if not torch.equal(numbers(folder / "again")[0], expected[0]):
            return "illegal: the class changes the weights that it loads"
    except Exception as error:  # whatever the class raises: it has no such models
        return f"illegal: {error}"
    if not expected[0].isfinite().all():
        return "illegal: no numbers"
    name, options = choose.choice([*operations(kind, config).items()])
    return f"{check(source, folder / 'out', expected, **options)} ({change}, {name})"


QUICK = growkit.Settings(prompts=1, length=16)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(100, 121))
@pytest.mark.parametrize("kind", FAMILIES)
def test_any_growth(kind: str, seed: int, tmp_path: Path) -> None:
    assert grow_any(kind, seed, tmp_path) < 1e-12


@pytest.mark.sampled(5)
@pytest.mark.parametrize("seed", range(210))
def test_any_llama(seed: int, tmp_path: Path) -> None:
    choose = seeded(seed)
    config, sizes = llama(choose)
    dtype = choose.choice(DTYPES)
    shard_size = choose.choice(["5GB", "6KB"])
    source = save_model(tmp_path / "source", "llama", seed, dtype, shard_size=shard_size, **config)
    options: dict[str, Any] = {"symmetry": choose.choice(["break", "keep"]), "seed": seed, **sizes}
    options |= {"snr_db": choose.choice([5.0, 10.0]), "shard_size": choose.choice(["5GB", "9KB"])}
    growkit.grow(source, tmp_path / "target", verify=None, **options)
    assert relative_error(source, tmp_path / "target") < 1e-12


def test_steps_of_a_recipe_are_one_pass(tmp_path: Path) -> None:
    """Growing twice in one recipe writes the very files that two growths write."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16)
    growkit.grow(source, tmp_path / "one", hidden="x2", verify=None)
    growkit.grow(tmp_path / "one", tmp_path / "two", ffn="x3", symmetry="keep", verify=None)
    wide = growkit.GrowStep("hypercloning", {"hidden": "x2"})
    steps = (wide, growkit.GrowStep("hypercloning", ffn="x3", symmetry="keep"))
    growkit.run(growkit.Recipe(str(source), steps, str(tmp_path / "both"), verify=None))
    apart = load_file(tmp_path / "two" / "model.safetensors")
    together = load_file(tmp_path / "both" / "model.safetensors")
    assert apart.keys() == together.keys()
    assert all(apart[name].equal(together[name]) for name in apart)
    assert relative_error(source, tmp_path / "both") < 1e-12


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(60))
@pytest.mark.parametrize("kind", KINDS)
def test_a_legal_but_rare_config(kind: str, number: int, tmp_path: Path) -> None:
    found = outcome(kind, number, tmp_path)
    assert not found.startswith("!"), found


@pytest.mark.parametrize(("kind", "number"), [("phi", 29), ("mistral", 29), ("opt", 7)])
def test_tiny_logits_are_no_fault(kind: str, number: int, tmp_path: Path) -> None:
    """Only the sums of the head round, or float16 has few numbers as small as the logits."""
    assert outcome(kind, number, tmp_path).startswith("exact")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", FAMILIES)
def test_its_proof_holds(kind: str, tmp_path: Path) -> None:
    """And a changed weight is another model: the control of the test above."""
    case = Case(FAMILIES[kind], seeded(sorted(FAMILIES).index(kind)))
    source, out = save(tmp_path / "source", case, 3), tmp_path / "out"
    grown = growkit.grow(source, out, verify=QUICK, **{case.first: f"x{case.least}"})
    assert grown["kept"], grown["verification"]
    with edit_weights(out) as tensors:
        for name in tensors:
            if "embed" in name or "wte" in name:
                tensors[name].view(-1)[::2] *= 1.5
    assert relative_error(source, out) > 1e-3


def test_slopes_are_those_of_the_class() -> None:
    """And every one is found again among those of any larger number of heads."""
    for heads in range(1, 41):
        theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float64)[:, 0, 1]  # one token on
        ours = torch.tensor([0.5 ** float(each) for each in slopes(heads)], dtype=torch.float64)
        assert (ours / theirs - 1).abs().max() < 1e-5
        assert all(set(slopes(heads)) <= set(slopes(more)) for more in range(heads, 4 * heads))


def test_files_without_the_prefix_of_the_class(tmp_path: Path) -> None:
    """As those of GPT-2 on hubs, with the masks that old versions saved."""
    source, out = save(tmp_path / "source", Case(FAMILIES["gpt2"], seeded(0)), 0), tmp_path / "out"
    with_base_names(source)
    with edit_weights(source) as tensors:
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
    assert growkit.grow(source, out, hidden="x2", verify=QUICK)["kept"]
    assert relative_error(source, out) < 1e-12
    assert "wte.weight" in load_file(out / "model.safetensors")
    with edit_weights(source) as tensors:
        del tensors["wte.weight"]
    with pytest.raises(InputError, match=r"tensor wte\.weight is missing"):
        growkit.grow(source, tmp_path / "none", hidden="x2", verify=False)


def test_what_the_class_derives_is_not_written(tmp_path: Path) -> None:
    source = save(tmp_path / "source", Case(FAMILIES["gpt2"], seeded(0)), 0)
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert "head_dim" not in (tmp_path / "out" / "config.json").read_text()
    with pytest.raises(InputError, match=r"cannot have head_dim \d"):
        growkit.grow(source, tmp_path / "other", hidden="x2", heads="x1")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("width", "ragged"), [(8, False), (12, True)])
@pytest.mark.parametrize(("kind", "key"), [("qwen3_moe", "moe_"), ("gpt_oss", "")])
def test_experts_that_transformers_would_refuse(
    kind: str, key: str, width: int, ragged: bool, tmp_path: Path
) -> None:
    """In bfloat16 it multiplies with rows of 16 bytes, or one expert at a time.

    gpt-oss stores matrices transposed, so that no row of theirs is as wide as the MLP.
    """
    case = Case(FAMILIES[kind], seeded(2))
    case.config |= {f"{key}intermediate_size": 4, "decoder_sparse_step": 1, "mlp_only_layers": []}
    case.dtype = torch.bfloat16
    source, out = save(tmp_path / "source", case, 2), tmp_path / "out"
    ffn = f"x{width // 4}"
    result = growkit.grow(source, out, ffn=ffn, verify=growkit.Settings(prompts=1, length=12))
    assert result["kept"]
    assert [str(width * 2) in each for each in result["warnings"]] == [True] * ragged
    model = AutoModelForCausalLM.from_pretrained(out)
    with pytest.raises(RuntimeError, match="16 bytes") if ragged else nullcontext():
        model(torch.arange(8)[None])
    card = (out / "README.md").read_text()
    assert ("not multiples of 16" in card) == ragged
    assert ('experts_implementation="' in card) == ragged


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
    for name in ("num_experts", "num_local_experts"):
        with edit_json(source / "config.json") as config:
            config[name] = config.pop("num_local_experts", None) or config.pop("num_experts")
        growkit.grow(source, tmp_path / name, verify=False, ffn="x2")
        found = json.loads((tmp_path / name / "config.json").read_text())
        assert [each for each in found if each.endswith("_experts")] == [name]


def test_every_family_of_one_file_has_its_tests() -> None:
    """But for those that have noise heads, and those that other files are about."""
    softmax = [
        each
        for each in families().values()
        if not (each.form and each.form.switches.get("num_noise_heads") != 0)
    ]
    shown = {kind for family in softmax for kind in family.model_types}
    elsewhere = {"llama", "mistral", "motif3"}
    elsewhere |= {kind for family in softmax if family.auto_map for kind in family.model_types}
    assert shown - elsewhere == set(FAMILIES)


@pytest.mark.parametrize("name", families())
def test_a_grown_model_names_the_class_that_loads_it(name: str) -> None:
    """Other engines than transformers look for it."""
    family = families()[name]
    for kind in set(family.model_types) & MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys():
        wanted = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        assert family.named({"model_type": kind})["architectures"] == [wanted]
