"""Adapters of PEFT, grown with their models, and judged by PEFT and transformers together."""

import importlib.util
import json
import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

import growkit
from growkit.base.errors import InputError
from growkit.engine.strict import strict_float64
from growkit.extras.adapters.checks.adapter import AdaptedWeights
from growkit.training import param_groups
from tests.architectures import config_of
from tests.commands import cli
from tests.families import FAMILIES, SIZES, Case, save
from tests.files import edit_json, edit_weights, listed
from tests.fuzz.odd import change, odd_safetensors
from tests.models import distance, load_strict, save_model, save_random, seeded
from tests.quantised import quantise

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # of PEFT
    pytest.mark.filterwarnings("ignore::peft.utils.warning.PeftWarning"),
]

TOKENS = 12
ADAPTER = "adapter_model.safetensors"
PROOF = growkit.Settings(prompts=1, length=TOKENS)
ALL = {"target_modules": "all-linear"}
FEW = {"target_modules": ["q_proj", "o_proj", "down_proj"]}
EXPERTS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}


def save_adapter(
    model: Path, folder: Path, seed: int = 0, kind: str = "Lora", **config: Any
) -> Path:
    """A random adapter, saved by PEFT."""
    torch.manual_seed(seed)
    config = {"task_type": "CAUSAL_LM", **({} if kind == "IA3" else {"r": 3}), **config}
    adapted = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), getattr(peft, f"{kind}Config")(**config)
    )
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += (
                0.2 * torch.randn(parameter.shape) * parameter.std(correction=0).clamp(0.5)
            )
    adapted.save_pretrained(folder)
    return folder


def with_adapter(model: Path, adapter: Path, **options: Any) -> Any:
    """A model with its adapter, in float64, as PEFT loads it."""
    return peft.PeftModel.from_pretrained(load_strict(model), adapter, **options)


def logits(model: Any, vocabulary: int = SIZES["vocab_size"]) -> Tensor:
    ids = torch.randint(vocabulary, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    with strict_float64(), torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits[0, :, :vocabulary]


def grown_error(source: Path, adapter: Path, out: Path, **way: Any) -> float:
    """Grow both; how far their logits are apart, while the adapter does something."""
    growkit.grow(source, out, adapter=adapter, verify=False, **way)
    expected, plain = logits(with_adapter(source, adapter)), logits(load_strict(source))
    assert distance(plain, expected) > 1e-3
    return distance(expected, logits(with_adapter(out, out / "adapter")))


def save_kind(folder: Path, kind: str) -> Path:
    """A tiny model of which everything can be adapted."""
    tied = kind in ("tied", "gpt2", "gemma2")
    return save_model(folder, "llama" if kind == "tied" else kind, tie_word_embeddings=tied)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = listed("adapters", "computed")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", CASES)
def test_adapter_computes_the_same(case: str, tmp_path: Path) -> None:
    kind, config, way = CASES[case]
    source = save_kind(tmp_path / "source", kind)
    adapter = save_adapter(source, tmp_path / "adapter", **config)
    assert grown_error(source, adapter, tmp_path / "out", **way) < 1e-12
    written = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(tmp_path / "out")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", sorted(FAMILIES.keys() - {"mamba", "falcon_h1"}))
def test_adapters_of_every_family(kind: str, seed: int, tmp_path: Path) -> None:
    """All their matrices and experts; PEFT does not adapt Mamba."""
    case = Case(FAMILIES[kind], seeded(seed))
    source = save(tmp_path / "source", case, seed)
    model = AutoModelForCausalLM.from_pretrained(source)
    linear = [n for n, each in model.named_modules() if isinstance(each, nn.Linear | Conv1D)]
    experts = [n for n, each in model.named_parameters() if each.dim() == 3]
    config = {"target_modules": linear, "target_parameters": experts or None}
    adapter = save_adapter(source, tmp_path / "adapter", seed, **config)
    way = {"symmetry": case.symmetry, **case.sizes}
    assert grown_error(source, adapter, tmp_path / "out", **way) < 1e-12


def test_adapter_of_single_experts(tmp_path: Path) -> None:
    """As earlier versions of transformers had them; PEFT puts them together while it loads."""
    source, adapter = save_kind(tmp_path / "source", "mixtral"), tmp_path / "adapter"
    save_adapter(source, adapter, target_modules=["q_proj"])
    with edit_json(adapter / "adapter_config.json") as config:
        config["target_modules"] = ["q_proj", "w1", "w2", "w3"]
    with edit_weights(adapter, ADAPTER) as tensors:
        for name, weight in load_file(source / "model.safetensors").items():
            if ".experts." in name:
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                tensors[f"{stem}.lora_A.weight"] = torch.randn(3, weight.shape[1])
                tensors[f"{stem}.lora_B.weight"] = torch.randn(weight.shape[0], 3)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", adapter=adapter, verify=PROOF)
    assert result.kept
    out = tmp_path / "out"
    expected, found = with_adapter(source, adapter), with_adapter(out, out / "adapter")
    assert distance(logits(expected), logits(found)) < 1e-12


def test_adapter_in_float8(tmp_path: Path) -> None:
    source = save_kind(tmp_path / "source", "llama")
    adapter = save_adapter(source, tmp_path / "adapter", use_dora=True, **FEW)
    with edit_weights(adapter, ADAPTER) as tensors:
        tensors |= {name: each.to(torch.float8_e4m3fn) for name, each in tensors.items()}
    assert grown_error(source, adapter, tmp_path / "out", hidden="x2") < 1e-12


MERGES: list[dict[str, Any]] = [
    FEW,
    {**ALL, "use_dora": True},
    {**ALL, "use_rslora": True, "modules_to_save": ["norm"]},
    {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    {
        "kind": "IA3",
        "target_modules": ["k_proj", "down_proj"],
        "feedforward_modules": ["down_proj"],
    },
    {**EXPERTS, "target_modules": ["q_proj"]},
]


def merge(model: Path, adapter: Path, folder: Path, dtype: str) -> Path:
    """As PEFT merges an adapter in a dtype."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    peft.PeftModel.from_pretrained(loaded, adapter).merge_and_unload().save_pretrained(folder)
    return folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("case", range(len(MERGES)))
def test_a_merged_adapter_is_proved(case: int, dtype: str, tmp_path: Path) -> None:
    source = save_kind(
        tmp_path / "first", "mixtral" if "target_parameters" in MERGES[case] else "llama"
    )
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(source := tmp_path / "source")
    adapter = save_adapter(source, tmp_path / "adapter", **MERGES[case])
    out = merge(source, adapter, tmp_path / "out", dtype)
    result = growkit.verify(source, out, prompts=1, length=TOKENS, adapter=adapter)
    assert result.verdict == "preserved"
    assert f"weights, but for the rounding of {dtype}" in result.reason
    assert not growkit.verify(source, out, prompts=1, length=TOKENS).kept


WRONG_MERGES = {
    "other": ({}, {}, "has another update than that of the adapter"),
    "scale": ({}, {"lora_alpha": 16}, "has 0.5 times the update of the adapter"),
    "layer": ({"layers_to_transform": [0]}, {}, "of layer 1 is not merged with the adapter"),
    "none": (None, {}, "is the source's plus a matrix of rank 3 or less, as after a merged LoRA"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fault", WRONG_MERGES)
def test_a_wrong_merge_is_named(fault: str, dtype: str, tmp_path: Path) -> None:
    merged, stated, told = WRONG_MERGES[fault]
    source, adapter = save_kind(tmp_path / "first", "llama"), tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    model.save_pretrained(source := tmp_path / "source")
    save_adapter(source, adapter, **FEW, seed=int(fault == "other"))
    config = adapter / "adapter_config.json"
    with edit_json(config) as settings:
        settings |= merged or {}
    out = merge(source, adapter, tmp_path / "out", dtype)
    shutil.rmtree(adapter)
    save_adapter(source, adapter, **FEW)
    with edit_json(config) as settings:
        settings |= stated
    given = None if merged is None else adapter
    result = growkit.verify(source, out, prompts=1, length=TOKENS, adapter=given)
    assert not result.kept
    assert told in result.reason


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its adapter, and both grown with a proof."""
    place = tmp_path_factory.mktemp("grown")
    source = save_model(place / "source", "llama")
    config = {**ALL, "use_dora": True, "modules_to_save": ["norm"]}
    adapter = save_adapter(source, place / "adapter", **config)
    result = growkit.grow(source, place / "out", hidden="x2", adapter=adapter, verify=PROOF)
    assert result.kept
    assert result.adapter.parameters > result.adapter.source_parameters
    return place


def verify(place: Path, out: Path) -> growkit.VerifyResult:
    adapter = place / "adapter"
    return growkit.verify(place / "source", out, prompts=1, length=TOKENS, adapter=adapter)


def test_proof_looks_at_the_adapter(grown: Path) -> None:
    result = verify(grown, grown / "out")
    (finding,) = (each for each in result.findings if each["name"] == "adapter")
    assert result.kept
    assert 0 < finding["measured"] < 1e-12
    silent = growkit.verify(grown / "source", grown / "out", prompts=1, length=TOKENS)
    assert silent.kept
    assert any("its adapter was not tried" in note for note in silent.notes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("lora_B.weight", (3, 1)),
        ("lora_A.weight", (1, 4)),
        ("lora_magnitude_vector", (2,)),
        ("norm.weight", (0,)),
    ],
)
def test_one_wrong_element_is_found(
    kind: str, place: tuple[int, ...], grown: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(grown / "out", tmp_path / "out")
    with edit_weights(out / "adapter", ADAPTER) as tensors:
        name = next(name for name in tensors if name.endswith(kind))
        tensors[name][place] *= 1 + 2e-6
    result = verify(grown, out)
    assert not result.kept
    assert result.verdict.startswith(("not preserved", "preserved, but not with its adapter"))
    assert f"adapter/{ADAPTER}" in result.reason or name in result.reason
    with edit_json(out / "growkit.json") as manifest:
        manifest["files"] = {}  # nobody knows its hash any more
    assert not verify(grown, out).kept


def test_fault_in_the_function_is_found(grown: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensors cannot tell: one is spoiled for the models that are run with their adapters."""
    read = AdaptedWeights.read

    def spoiled(self: Any, name: str, *where: slice | None) -> Tensor:
        found = read(self, name, *where)
        wrong = name == "model.layers.1.mlp.up_proj.lora_B.default.weight" and len(found) > 24
        return found * (1 + 1e-6) if wrong else found

    monkeypatch.setattr(AdaptedWeights, "read", spoiled)
    assert verify(grown, grown / "out").verdict == "preserved, but not with its adapter"


def test_other_settings_are_found(grown: Path, tmp_path: Path) -> None:
    out = shutil.copytree(grown / "out", tmp_path / "out")
    with edit_json(out / "adapter" / "adapter_config.json") as config:
        config["lora_alpha"] = 9
    with edit_json(out / "growkit.json") as manifest:
        del manifest["files"]["adapter/adapter_config.json"]
    result = verify(grown, out)
    assert not result.kept
    assert "adapter_config.json" in result.reason


def losses(model: Path, adapter: Path, law: Path | None) -> list[float]:
    """Of some steps of AdamW, with weight decay on everything."""
    adapted = with_adapter(model, adapter, is_trainable=True)
    settings: Any = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6, "decays": lambda *_: True}
    optimizer = torch.optim.AdamW(param_groups(adapted, law, **settings), betas=(0.9, 0.95))
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(4):
        ids = torch.randint(29, (2, TOKENS), generator=generator)
        with strict_float64():
            loss = adapted(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", ["lora", "dora", "saved", "tokens", "biases", "experts", "ends"])
def test_adapter_trains_as_its_source(case: str, tmp_path: Path) -> None:
    """With the factors next to the adapter; not without, and not if parts are unequal."""
    kind, config, way = CASES[case]
    source, out = save_kind(tmp_path / "source", kind), tmp_path / "out"
    adapter = save_adapter(source, tmp_path / "adapter", **config)
    way = {"hidden": way["hidden"], "symmetry": "keep", "verify": False}
    result = growkit.grow(source, out, adapter=adapter, **way)
    assert result.adapter.updates.exact
    expected = losses(source, adapter, None)
    found = losses(out, out / "adapter", out / "adapter")
    assert found == pytest.approx(expected, rel=1e-12)
    assert losses(out, out / "adapter", None) != pytest.approx(expected, rel=1e-4)
    again = tmp_path / "again"
    growkit.grow(out, again, adapter=out / "adapter", **way)
    assert losses(again, again / "adapter", again / "adapter") == pytest.approx(expected, rel=1e-11)


def test_layers_keep_their_targets_by_name(tmp_path: Path) -> None:
    """What a config names by its ends needs no list of modules; single layers do."""
    source = save_model(tmp_path / "source", "llama")
    for name, config in (("ends", FEW), ("chosen", {**FEW, "layers_to_transform": 0})):
        adapter, out = save_adapter(source, tmp_path / name, **config), tmp_path / f"out-{name}"
        growkit.grow(source, out, method="depth", layers="x2", adapter=adapter, verify=False)
        written = json.loads((out / "adapter" / "adapter_config.json").read_text())
        assert len(written["target_modules"]) == (3 if name == "ends" else 6)
        assert written["layers_to_transform"] is None


@pytest.mark.sampled(0)
def test_replaced_activations_have_buffers(tmp_path: Path) -> None:
    """PEFT saves all that a module has in files: xIELU's beta and eps are buffers."""
    source = save_random(tmp_path / "source", config_of("apertus"))
    config = {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]}
    adapter = save_adapter(source, tmp_path / "adapter", **config)
    assert grown_error(source, adapter, tmp_path / "out", hidden="x2") < 1e-12


@pytest.mark.sampled(0)
def test_peft_cannot_adapt_a_module_that_returns_several(tmp_path: Path) -> None:
    source = save_random(tmp_path / "source", config_of("llama4_text"))
    adapter = save_adapter(source, tmp_path / "adapter", target_modules=["router"])
    with pytest.raises(InputError, match=r"with the adapter in .* one layer at a time .*'tuple'"):
        growkit.grow(source, tmp_path / "out", hidden="x2", adapter=adapter, verify=PROOF)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = listed("adapters", "refused")


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_grow_is_named(case: str, tmp_path: Path) -> None:
    kind, config, way, sentence = REFUSED[case]
    source, out = save_kind(tmp_path / "source", kind), tmp_path / "out"
    adapter = save_adapter(source, tmp_path / "adapter", **config)
    with pytest.raises(InputError, match=sentence):
        growkit.grow(source, out, adapter=adapter, **(way or {"hidden": "x2"}))
    assert not out.exists()


@pytest.mark.parametrize(
    "what", ["of another model", "with NaN", "of no module", "without A", "magnitudes alone"]
)
def test_bad_adapters_are_refused(what: str, tmp_path: Path) -> None:
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    adapter = save_adapter(source, tmp_path / "adapter", use_dora="alone" in what, **FEW)
    with edit_weights(adapter, ADAPTER) as tensors:
        first = min(tensors)
        if what == "of another model":
            tensors[first] = tensors[first][:, :-1]
        elif what == "with NaN":
            tensors[first][0, 0] = torch.nan
        elif what == "of no module":
            tensors[first.replace("layers.0", "layers.7")] = tensors.pop(first)
        else:
            del tensors[first]
        if what == "magnitudes alone":
            del tensors[first.replace("lora_A", "lora_B")]
    said = "but not its factors" if what == "magnitudes alone" else str(adapter / ADAPTER)
    with pytest.raises(InputError, match=said):
        growkit.grow(source, out, hidden="x2", adapter=adapter, verify=False)
    assert not out.exists()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(400))
def test_spoiled_adapters_end_in_a_sentence(seed: int, tmp_path: Path) -> None:
    kind = ["llama", "mixtral"][seed % 2]
    config = {"use_dora": True, **FEW} if kind == "llama" else {**FEW, **EXPERTS}
    source = save_kind(tmp_path / "source", kind)
    adapter = save_adapter(source, tmp_path / "adapter", modules_to_save=["norm"], **config)
    choose = seeded(seed)
    if choose.random() < 0.4:
        file = adapter / "adapter_config.json"
        content = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps(change(choose, content, [*content])))
    else:
        file = adapter / "adapter_model.safetensors"
        file.write_bytes(odd_safetensors(choose, file.read_bytes()))
    with suppress(InputError):  # harmless changes are none's fault
        growkit.grow(source, tmp_path / "out", hidden="x2", adapter=adapter, verify=False)


def test_adapter_of_a_quantised_model(tmp_path: Path) -> None:
    source, plain = quantise(save_kind(tmp_path / "source", "llama")), tmp_path / "plain"
    growkit.convert(source, plain, "dense-weights", verify=False)
    adapter, out = save_adapter(plain, tmp_path / "adapter", **FEW), tmp_path / "out"
    assert growkit.grow(source, out, hidden="x2", adapter=adapter, verify=PROOF).kept
    expected, found = with_adapter(plain, adapter), with_adapter(out, out / "adapter")
    assert distance(logits(expected), logits(found)) < 1e-12


def test_peft_is_for_the_proof_alone(
    grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(importlib.import_module("sys").modules, "peft", None)
    source, adapter = grown / "source", grown / "adapter"
    growkit.grow(source, tmp_path / "out", hidden="x2", adapter=adapter, verify=False)
    assert (tmp_path / "out" / "adapter" / "adapter_model.safetensors").exists()
    for dry_run in (True, False):
        with pytest.raises(InputError, match=r"install growkit\[adapters\]"):
            growkit.grow(source, tmp_path / "proved", hidden="x2", adapter=adapter, dry_run=dry_run)
    assert not (tmp_path / "proved").exists()


def test_command_line(grown: Path, tmp_path: Path) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    source, adapter = grown / "source", grown / "adapter"
    quick = ("--prompts", 1, "--length", TOKENS)
    done = cli("grow", source, out, "--hidden", "x2", "--adapter", adapter, *quick)
    assert done.exit_code == 0, done.output
    assert "LORA" in done.output
    checked = cli("verify", source, out, "--adapter", adapter, *quick)
    assert checked.exit_code == 0
    assert "with the adapter" in " ".join(checked.output.split())
    manifest = json.loads((out / "growkit.json").read_text())
    assert manifest["recipe"]["adapter"] == manifest["adapter"]["path"] == "adapter"
    assert "adapter/adapter_model.safetensors" in manifest["files"]
    words = ("--source", source, "--adapter", adapter, "--output", again, "--proof-only")
    assert cli("run", out / "growkit.json", *words).exit_code == 0
    assert sorted(each.name for each in (again / "adapter").iterdir()) == sorted(
        each.name for each in (out / "adapter").iterdir()
    )
    assert not (again / "model.safetensors").exists()
    file = "adapter/adapter_model.safetensors"
    assert (again / file).read_bytes() == (out / file).read_bytes()


RESIZED: dict[str, dict[str, Any]] = listed("adapters", "resized")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", RESIZED)
def test_embeddings_that_were_resized_before_training(how: str, tmp_path: Path) -> None:
    """PEFT compares the vocabulary with the base model's, and saves some tensors thrice."""
    base = save_kind(tmp_path / "base", "tied" if "tied" in how else "llama")
    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.resize_token_embeddings(32)
    model.save_pretrained(source)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, **(FEW | RESIZED[how])))
    for parameter in adapted.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter) * parameter.requires_grad
    adapted.save_pretrained(tmp_path / "adapter")
    names = {*load_file(tmp_path / "adapter" / "adapter_model.safetensors")}
    assert any("lm_head" in name or "embed_tokens" in name for name in names)
    assert sum("modules_to_save" in name for name in names) == len(
        RESIZED[how].get("modules_to_save", ())
    )
    assert grown_error(source, tmp_path / "adapter", tmp_path / "out", hidden="x2") < 1e-12
    assert growkit.verify(
        source, tmp_path / "out", adapter=tmp_path / "adapter", prompts=1, length=8
    ).kept


@pytest.mark.parametrize("version", ["0.18.1", None, "0.19.0"])
def test_factors_of_experts_from_an_older_peft(version: str | None, tmp_path: Path) -> None:
    source = save_kind(tmp_path / "source", "mixtral")
    adapter = save_adapter(source, tmp_path / "adapter", **EXPERTS)
    with edit_json(adapter / "adapter_config.json") as config:
        config["peft_version"] = version
    new = version == "0.19.0"
    exchanged = "which exchanges inputs and outputs of target_parameters"
    with nullcontext() if new else pytest.raises(InputError, match=exchanged):
        growkit.grow(source, tmp_path / "out", hidden="x2", adapter=adapter, dry_run=True)


@pytest.mark.parametrize(("key", "value", "said"), listed("adapters", "unusable patterns"))
def test_patterns_that_peft_cannot_use(
    key: str, value: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("growkit.extras.adapters.adapter_folder.MAX_SECONDS", 0.3)
    source = save_kind(tmp_path / "source", "llama")
    adapter = save_adapter(source, tmp_path / "adapter", **FEW)
    with edit_json(adapter / "adapter_config.json") as config:
        config[key] = value
    with pytest.raises(InputError, match=f"{key} in .* has the pattern .*{said}"):
        growkit.grow(source, tmp_path / "out", hidden="x2", adapter=adapter, dry_run=True)
