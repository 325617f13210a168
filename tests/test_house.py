"""The rules of the house: a new family or method is one new file; small things have one place."""

import ast
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import growkit
from growkit import extras, proof
from growkit.extras.formats import quantised
from growkit.extras.optimizer import formats
from growkit.model import families
from growkit.model.checkpoint import formats as stored_formats
from growkit.model.families.family import families as all_families
from growkit.model.families.family import family_of
from growkit.operations import conversions, growth
from growkit.planning.operation import operations
from tests.commands import cli
from tests.files import edit_config, edit_weights
from tests.models import relative_error, save_model

METHOD = """
from growkit.operations.growth.copying import CopyMethod
from growkit.planning.operation import SizeOption

OPERATION = CopyMethod(
    name="wide-mlp",
    paper="https://example.org",
    sizes=(SizeOption("inner", "MLP size", axes=("ffn",)),),
)
"""
TO_A_CLASS = """
from growkit.model.families.family import known_family
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite


class ToMistral(Operation):
    name, paper = "mistral-for-this-test", "-"

    def plan(self, source, options, seed):
        config = {**source.config, "model_type": "mistral", "sliding_window": None}
        return Change([rewrite(source, known_family({"model_type": "mistral"}), config)])


OPERATION = ToMistral()
"""
OWN_CLASS = '''
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

DESCRIPTION = """
family: Twin
model_type: twin
extends: qwen3
constants: {one: 1}
upgrades:
  hybrid: {qwen3: {}}
tensors:
  model.gain: {pattern: one, start: 0.0}
"""


class TwinConfig(Qwen3Config):
    model_type = "twin"


class TwinModel(Qwen3Model):
    config_class = TwinConfig

    def __init__(self, config):
        super().__init__(config)
        self.gain = torch.nn.Parameter(torch.zeros(1))

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.last_hidden_state = (1 + self.gain) * output.last_hidden_state
        return output


class TwinForCausalLM(Qwen3ForCausalLM):
    config_class = TwinConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = TwinModel(config)
'''
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
from growkit.extras.formats.dequantising import Scheme


class Mirrored(Scheme):
    method, title, suffixes, exact = "mirrored", "mirrors", (".mirrored",), True

    def header(self, parts, settings, dtype):
        return parts.stored.tensors[parts.first]

    def rows(self, parts, settings, info, rows):
        return -parts.read(".mirrored", rows)


FORMAT = Mirrored()
"""
STORED = """
from growkit.extras.formats.layout import Held, LaidOut
from growkit.model.checkpoint.weight_file import open_weights

LAYER = "model.layers.{layer}."
GATED = [f"{LAYER}mlp.{each}_proj.weight" for each in ("gate", "up")]
ALIKE = ["input_layernorm", "post_attention_layernorm", "mlp.down_proj"]
ALIKE += [f"self_attn.{each}_proj" for each in "qkvo"]


class Fused(LaidOut):
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


@pytest.fixture
def add_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any, str, str], None]:
    """Puts one file into a package."""

    def add(package: Any, name: str, text: str) -> None:
        (tmp_path / "added").mkdir()
        (tmp_path / "added" / name).write_text(text)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path / "added")])

    return add


def test_a_method_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    add_file(growth, "wide_mlp_for_this_test.py", METHOD)
    assert "wide-mlp" in operations("grow")
    source = save_model(tmp_path / "source", "llama")
    growkit.grow(source, tmp_path / "out", method="wide-mlp", inner="x3", verify=None)
    assert relative_error(source, tmp_path / "out") < 1e-12


def test_a_conversion_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    """It says what is lost; that the function differs is then no broken promise."""
    page = (Path(growkit.__file__).parents[1] / "CONTRIBUTING.md").read_text("utf-8")
    conversion = page.partition("```python\n")[2].partition("```")[0]
    add_file(conversions, "unscaled_for_this_test.py", conversion)
    source = save_model(tmp_path / "source", "diffllama")
    quick = growkit.Settings(prompts=2, length=12)
    result = growkit.convert(source, tmp_path / "out", to="unscaled", verify=quick)
    shown = [each["command"] for each in growkit.inspect(source)["possible"]]
    assert "growkit convert SRC OUT --to unscaled" in shown
    assert result["kept"]
    assert result["verification"]["promise"] == "different"
    assert "the factor 1 - λ_init" in result["verification"]["reason"]
    assert relative_error(source, tmp_path / "out") > 1e-3


def test_a_conversion_to_another_class_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    add_file(conversions, "to_mistral_for_this_test.py", TO_A_CLASS)
    source, out = save_model(tmp_path / "source", "llama"), tmp_path / "out"
    assert growkit.convert(source, out, to="mistral-for-this-test")["kept"]
    assert type(AutoModelForCausalLM.from_pretrained(out)).__name__ == "MistralForCausalLM"
    assert relative_error(source, out) < 1e-12


def test_a_class_of_ones_own_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    """Models are converted to it, and folders with its code load without growkit."""
    add_file(extras, "modeling_twin.py", OWN_CLASS)
    quick = growkit.Settings(prompts=1, length=12)
    source = save_model(tmp_path / "source", "qwen3")
    twin, out = tmp_path / "twin", tmp_path / "out"
    assert growkit.convert(source, twin, to="hybrid", verify=quick)["kept"]
    with edit_weights(twin) as tensors:
        tensors["model.gain"] += 0.5
    assert relative_error(source, twin) > 1e-3
    assert growkit.grow(twin, out, hidden="x2", verify=quick)["kept"]
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "trained")
    for folder in (out, tmp_path / "trained"):
        copied = get_class_from_dynamic_module("modeling_twin.TwinForCausalLM", folder)
        assert not copied.__module__.startswith("growkit")
        assert copied.from_pretrained(folder).model.gain == 0.5
    with edit_weights(out) as tensors:
        tensors["model.gain"] *= 2
    assert not growkit.verify(twin, out, quick)["kept"]


def test_a_format_of_optimizer_states_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    add_file(formats, "states_for_this_test.py", STATES)
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


def test_a_family_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    add_file(families, "other_for_this_test.yaml", FAMILY)
    assert family_of({"model_type": "other"}, "here").name == "Other"


def test_a_format_of_weights_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    add_file(quantised, "mirrored_for_this_test.py", FORMAT)
    source = save_model(tmp_path / "source", "llama")
    stored = shutil.copytree(source, tmp_path / "stored")
    with edit_weights(stored) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name.replace(".weight", ".mirrored")] = -tensors.pop(name)
    edit_config(stored, quantization_config={"quant_method": "mirrored"})
    assert growkit.grow(stored, tmp_path / "out", hidden="x2")["kept"]
    assert relative_error(source, tmp_path / "out") < 1e-12


def test_a_format_of_files_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    """The MLP is stored joined and transposed; a wrong column of it is found and named."""
    add_file(stored_formats, "fused_for_this_test.py", STORED)
    source = save_model(tmp_path / "source", "llama")
    fused = shutil.copytree(source, tmp_path / "fused")
    joined, tensors = {}, load_file(fused / "model.safetensors")
    for layer in (0, 1):
        both = [
            tensors.pop(f"model.layers.{layer}.mlp.{part}_proj.weight") for part in ("gate", "up")
        ]
        joined[f"gate_up.{layer}"] = torch.cat(both).T.contiguous()
    stored = {f"one.{name}": tensor for name, tensor in tensors.items()} | joined
    (fused / "model.safetensors").unlink()
    save_file(stored, fused / "fused.safetensors")
    quick = growkit.Settings(prompts=1, length=12)
    result = growkit.verify(source, fused, quick)
    assert result["verdict"] == "preserved"
    assert result["sections"]["weights"]["recovered"]
    growkit.grow(fused, tmp_path / "out", hidden="x2", verify=False)
    assert relative_error(source, tmp_path / "out") < 1e-12
    stored["gate_up.1"][:, 0] *= 2
    save_file(stored, fused / "fused.safetensors")
    fault = growkit.verify(source, fused, quick)["fault"]
    assert fault["tensor"] == "model.layers.1.mlp.gate_proj.weight"
    assert fault["cause"].startswith("1 of ")


def test_a_check_of_the_proof_is_one_new_file(tmp_path: Path, add_file: Any) -> None:
    """JSON, page, terminal and card show its section, and its finding decides."""
    add_file(proof, "vocabulary_for_this_test.py", CHECK)
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


def test_no_family_is_named_outside_its_file() -> None:
    """There is no ``if model_type ==`` in the house; a format lists the models that it has."""
    package = Path(growkit.__file__).parent
    names = {kind for family in all_families().values() for kind in family.model_types}
    for file in package.rglob("*.py"):
        if (
            file.parent.name in ("families", "formats", "own_classes", "weight_formats")
            or file.name.startswith(("modeling_", "configuration_"))
            or file.name == "diff_family.py"
        ):
            continue
        text = file.read_text()
        assert not any(f'"{name}"' in text or f"'{name}'" in text for name in names), file


def test_files_and_public_names_are_unique() -> None:
    files = [path for path in Path(growkit.__path__[0]).rglob("*.py") if path.name != "__init__.py"]
    top = [node for path in files for node in ast.parse(path.read_text("utf-8")).body]
    named = [node.name for node in top if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    public = Counter(name for name in named if not name.startswith("_"))
    assert [name for name, count in public.items() if count > 1] == []
    assert [name for name, count in Counter(path.name for path in files).items() if count > 1] == []
