"""The rules of the house: a new family or method is one new file; small things have one place."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import growkit
from growkit import families, proof
from growkit.checkpoint import formats as stored_formats
from growkit.extras.differential import own_classes
from growkit.extras.formats import quantised
from growkit.extras.optimizer import formats
from growkit.families.family import families as all_families
from growkit.families.family import family_of
from growkit.operations import conversions, growth
from growkit.planning.operation import operations
from tests.conftest import cli, edit_config, edit_weights, relative_error, save_model

METHOD = """
from growkit.operations.growth.copying import CopyMethod
from growkit.planning.operation import SizeOption

OPERATION = CopyMethod(
    name="wide-mlp",
    paper="https://example.org",
    sizes=(SizeOption("inner", "MLP size", axes=("ffn",)),),
)
"""
CONVERSION = """
from growkit.extras.differential.conversions.storing import OnDiffTransformer
from growkit.planning.rewriting import rewrite
from growkit.extras.differential.diff_family import FAMILY
from growkit.base.options import Option
from growkit.planning.operation import Change


class Unscaled(OnDiffTransformer):
    name, paper = "unscaled", "-"
    options = (Option("why", "reason", form="TEXT", example="test"),)

    def plan(self, source, options, seed):
        config = FAMILY.complete(source.config) | {"head_output_scale": "none"}
        plan = rewrite(source, FAMILY, config)
        return Change([plan], "different", "the factor 1 - λ_init")


OPERATION = Unscaled()
"""
TO_A_CLASS = """
from growkit.families.family import known_family
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite


class ToMistral(Operation):
    name, paper = "mistral-for-this-test", "-"

    def plan(self, source, options, seed):
        config = {**source.config, "model_type": "mistral", "sliding_window": None}
        return Change([rewrite(source, known_family("mistral"), config)])


OPERATION = ToMistral()
"""
OWN_CLASS = """
from dataclasses import replace

from transformers import AutoConfig, AutoModelForCausalLM

from growkit.families.family import described
from growkit.planning.own_class import OwnClass

CODE = '''
from transformers import LlamaConfig, LlamaForCausalLM


class TwinConfig(LlamaConfig):
    model_type = "twin"


class TwinForCausalLM(LlamaForCausalLM):
    config_class = TwinConfig

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2 * output.logits
        return output
'''
exec(CODE)
FAMILY = replace(
    described({"family": "Twin", "model_type": "twin", "extends": "llama"}, "Twin"),
    architecture="TwinForCausalLM",
    auto_map={"AutoConfig": "twin.TwinConfig", "AutoModelForCausalLM": "twin.TwinForCausalLM"},
    code=lambda: {"twin.py": CODE.encode()},
)


def register():
    AutoConfig.register("twin", TwinConfig, exist_ok=True)
    AutoModelForCausalLM.register(TwinConfig, TwinForCausalLM, exist_ok=True)


OWN_CLASS = OwnClass(FAMILY, register, lambda family: False, lambda config, where: config, None)
"""
STATES = """
from dataclasses import replace

from growkit.extras.optimizer.formats import trainer
from growkit.extras.optimizer.state import StateFormat


def holds(path):
    return (path / "moments.pt").exists()


def open_state(path, parameters):
    return replace(trainer._open_file(path / "moments.pt", parameters), format=FORMAT, write=write)


def write(target, folder, save):
    (folder / "grown.state").write_text(f"{len(target.tensors)} tensors")


FORMAT = StateFormat("states of this test", ("grown.state",), holds, open_state)
"""
FORMAT = """
from growkit.checkpoint.dequantising import Scheme


class Mirrored(Scheme):
    method, title, suffixes, exact = "mirrored", "mirrors", (".mirrored",), True

    def header(self, parts, settings, dtype):
        return parts.stored.tensors[parts.first]

    def rows(self, parts, settings, info, rows):
        return -parts.read(".mirrored", rows)


FORMAT = Mirrored()
"""
STORED = """
from growkit.families.axes import ORDERS
from growkit.checkpoint.format import Format
from growkit.checkpoint.layout import Held
from growkit.checkpoint.weight_file import open_weights

LAYER, HEADS = "model.layers.{layer}.", ("heads.head_dim", "kv_heads.head_dim", "kv_heads.head_dim")
FUSED = [f"{LAYER}self_attn.{each}_proj.weight" for each in "qkv"]
GATED = [f"{LAYER}mlp.{each}_proj.weight" for each in ("gate", "up")]
ALIKE = ["input_layernorm", "post_attention_layernorm", "self_attn.o_proj", "mlp.down_proj"]
ORDER = ORDERS["with_keys_and_values"]("heads", "kv_heads", "head_dim")


class Fused(Format):
    title = "fused, for this test"

    def files(self, folder):
        return {"fused.safetensors": ()} if folder.has("fused.safetensors") else {}

    def open(self, folder, names):
        return [open_weights(folder, name) for name in names]

    def layout(self, config):
        outer = ("model.embed_tokens", "model.norm", "lm_head")
        same = [f"{name}.weight" for name in (*outer, *(LAYER + name for name in ALIKE))]
        return [
            *(Held(f"one.{name}", (name,)) for name in same),
            Held("qkv.{layer}", tuple(FUSED), HEADS, ORDER),
            Held("gate_up.{layer}", tuple(GATED), transposed=True),
        ]


FORMAT = Fused()
"""
CHECK = """
from growkit.proof.check import Check
from growkit.results.proof_result import Finding, Section


class Vocabulary(Section):
    tokens: int


def check_vocabulary(pair, function):
    tokens = pair.after.config["vocab_size"]
    finding = Finding(name="vocabulary", kept=tokens < 64, sentence=f"it has {tokens} tokens")
    finding.limit, finding.measured, finding.advice = 63, tokens, "leave tokens out"
    finding.verdict = "preserved, but with many tokens"
    return Vocabulary(findings=[finding], notes=["tokens were only counted"], tokens=tokens)


CHECK = Check(check_vocabulary)
"""
FAMILY = """
family: Other
model_type: other
extends: llama
"""


def test_a_method_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wide_mlp_for_this_test.py").write_text(METHOD)
    monkeypatch.setattr(growth, "__path__", [*growth.__path__, str(tmp_path)])
    assert "wide-mlp" in operations("grow")
    source = save_model(tmp_path / "source", "llama")
    growkit.grow(source, tmp_path / "out", method="wide-mlp", inner="x3", verify=None)
    assert relative_error(source, tmp_path / "out") < 1e-12


def test_a_conversion_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says what is lost; that the function differs is then no broken promise."""
    (tmp_path / "unscaled_for_this_test.py").write_text(CONVERSION)
    monkeypatch.setattr(conversions, "__path__", [*conversions.__path__, str(tmp_path)])
    source = save_model(tmp_path / "source", "diffllama")
    quick = growkit.Settings(prompts=2, length=12)
    result = growkit.convert(source, tmp_path / "out", to="unscaled", why="test", verify=quick)
    shown = [each["command"] for each in growkit.inspect(source)["possible"]]
    assert "growkit convert SRC OUT --to unscaled --why test" in shown
    assert result["kept"]
    assert result["verification"]["promise"] == "different"
    assert "the factor 1 - λ_init" in result["verification"]["reason"]
    assert relative_error(source, tmp_path / "out") > 1e-3


def test_a_conversion_to_another_class_is_one_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "to_mistral_for_this_test.py").write_text(TO_A_CLASS)
    monkeypatch.setattr(conversions, "__path__", [*conversions.__path__, str(tmp_path)])
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    assert growkit.convert(source, out, to="mistral-for-this-test")["kept"]
    assert type(AutoModelForCausalLM.from_pretrained(out)).__name__ == "MistralForCausalLM"
    assert relative_error(source, out) < 1e-12


def test_a_class_of_ones_own_is_one_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The written folder has its code, and loads without growkit's registration."""
    (tmp_path / "twin.py").write_text(OWN_CLASS)
    monkeypatch.setattr(own_classes, "__path__", [*own_classes.__path__, str(tmp_path)])
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    edit_config(source, model_type="twin", architectures=["TwinForCausalLM"])
    assert growkit.grow(source, out, hidden="x2", verify=growkit.Settings(prompts=1))["kept"]
    assert "class TwinForCausalLM" in (out / "twin.py").read_text()
    assert json.loads((out / "config.json").read_text())["auto_map"]["AutoConfig"]
    with edit_weights(out) as tensors:
        tensors["model.norm.weight"] *= 2
    assert not growkit.verify(source, out, prompts=1)["kept"]


def test_a_format_of_optimizer_states_is_one_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "states_for_this_test.py").write_text(STATES)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    source = save_model(tmp_path / "source", "llama")
    model = AutoModelForCausalLM.from_pretrained(source)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    optimizer.step()
    (tmp_path / "run").mkdir()
    torch.save(optimizer.state_dict(), tmp_path / "run" / "moments.pt")
    state = {"optimizer": tmp_path / "run", "verify": False}
    result = growkit.grow(source, tmp_path / "out", hidden="x2", **state)
    assert result["optimizer"]["format"] == "states of this test"
    assert (tmp_path / "out" / "grown.state").read_text().endswith("tensors")


def test_a_family_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_for_this_test.yaml").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    assert family_of({"model_type": "other"}, "here").name == "Other"


def test_a_format_of_weights_is_one_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mirrored_for_this_test.py").write_text(FORMAT)
    monkeypatch.setattr(quantised, "__path__", [*quantised.__path__, str(tmp_path)])
    source = save_model(tmp_path / "source", "llama")
    stored = shutil.copytree(source, tmp_path / "stored")
    with edit_weights(stored) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name.replace(".weight", ".mirrored")] = -tensors.pop(name)
    edit_config(stored, quantization_config={"quant_method": "mirrored"})
    assert growkit.grow(stored, tmp_path / "out", hidden="x2")["kept"]
    assert relative_error(source, tmp_path / "out") < 1e-12


def test_a_format_of_files_is_one_new_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are stored group by group, the MLP transposed; a wrong row is found and named."""
    (tmp_path / "fused_for_this_test.py").write_text(STORED)
    monkeypatch.setattr(stored_formats, "__path__", [*stored_formats.__path__, str(tmp_path)])
    source = save_model(tmp_path / "source", "llama")
    fused = shutil.copytree(source, tmp_path / "fused")
    of_layer, stored = {}, {}
    for name, tensor in load_file(fused / "model.safetensors").items():
        *_, layer, _, kind, _ = ["", "", "", *name.split(".")]
        joined = kind in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        of_layer[layer, kind] = tensor
        stored |= {} if joined else {f"one.{name}": tensor}
    config = json.loads((source / "config.json").read_text())
    groups = config["num_key_value_heads"]
    for layer in map(str, range(config["num_hidden_layers"])):
        heads = (of_layer[layer, f"{kind}_proj"].chunk(groups) for kind in "qkv")
        stored[f"qkv.{layer}"] = torch.cat(
            [part for group in zip(*heads, strict=True) for part in group]
        )
        both = of_layer[layer, "gate_proj"], of_layer[layer, "up_proj"]
        stored[f"gate_up.{layer}"] = torch.cat(both).T.contiguous()
    (fused / "model.safetensors").unlink()
    save_file(stored, fused / "fused.safetensors")
    quick = growkit.Settings(prompts=1, length=12)
    result = growkit.verify(source, fused, quick)
    assert result["verdict"] == "preserved"
    assert result["sections"]["weights"]["recovered"]
    assert growkit.grow(fused, tmp_path / "out", hidden="x2", verify=quick)["kept"]
    assert relative_error(source, tmp_path / "out") < 1e-12
    stored["gate_up.1"][:, 0] *= 2
    save_file(stored, fused / "fused.safetensors")
    fault = growkit.verify(source, fused, quick)["fault"]
    assert fault["tensor"] == "model.layers.1.mlp.gate_proj.weight"
    assert fault["cause"].startswith("1 of ")


def test_a_check_of_the_proof_is_one_new_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON, page, terminal and card show its section, and its finding decides."""
    (tmp_path / "vocabulary_for_this_test.py").write_text(CHECK)
    monkeypatch.setattr(proof, "__path__", [*proof.__path__, str(tmp_path)])
    source, quick = save_model(tmp_path / "source", "llama"), ["--prompts", "1", "--length", "12"]
    result = growkit.grow(
        source, tmp_path / "few", hidden="x2", verify=growkit.Settings(prompts=1, length=12)
    )
    assert result["kept"]
    assert "tokens were only counted" in result["verification"]["reason"]
    assert "it has 29 tokens" in (tmp_path / "few" / "README.md").read_text()
    many = save_model(tmp_path / "many", "llama", vocab_size=64)
    shown = cli("grow", many, tmp_path / "out", "--hidden", "x2", *quick)
    assert shown.exit_code == 1
    for told in ("preserved, but with many tokens: it has 64 tokens", "next: leave tokens out"):
        assert told in " ".join(shown.stdout.split())
    again = growkit.verify(many, tmp_path / "out.rejected", prompts=1, length=12)
    assert json.loads(json.dumps(again))["sections"]["vocabulary_for_this_test"]["tokens"] == 64
    growkit.save_report(again, tmp_path / "page.html")
    assert "<h2>Vocabulary for this test</h2>" in (tmp_path / "page.html").read_text()


def test_options_of_methods_are_options_of_the_command() -> None:
    shown = cli("grow", "--help").stdout
    for method in operations("grow").values():
        for option in method.options:
            assert "--" + option.name.replace("_", "-") in shown


def test_no_family_is_named_outside_its_file() -> None:
    """There is no ``if model_type ==`` in the house; a format lists the models that it has."""
    package = Path(growkit.__file__).parent
    names = {kind for family in all_families().values() for kind in family.model_types}
    for file in package.rglob("*.py"):
        if (
            file.parent.name in ("families", "modeling", "formats", "weight_formats")
            or file.name == "diff_family.py"
        ):
            continue
        text = file.read_text()
        assert not any(f'"{name}"' in text or f"'{name}'" in text for name in names), file
