"""Models with code of their own: refused, or inferred and proved if the user trusts the code."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import growkit
from growkit.base.names import NOTHING
from growkit.extras.family_inference import inferring
from growkit.extras.trusted_code import trust
from tests.commands import cli, refusal
from tests.files import edit_weights
from tests.models import distance, load_strict, logits_of

CONFIG = """
from transformers import PretrainedConfig


class AveragesConfig(PretrainedConfig):
    model_type = "averages{name}"
    attribute_map = {{
        "hidden_size": "width", "num_hidden_layers": "blocks", "num_attention_heads": "heads"
    }}

    def __init__(self, vocab_size=31, width=16, blocks=2, heads=4, wide=24, **more):
        self.vocab_size, self.width, self.blocks = vocab_size, width, blocks
        self.heads, self.wide = heads, wide
        super().__init__(**more)
"""

MODEL = """
import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_averages import AveragesConfig


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.mix = nn.Linear(config.width, config.wide, bias=False)
        self.out = nn.Linear(config.wide, config.width, bias=False)

    def forward(self, x):
        number = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        return x + self.out(torch.tanh(self.mix(self.norm(x)).cumsum(1) / number))


class Averages{name}ForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = AveragesConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.layers = nn.ModuleList([Block(config) for _ in range(config.blocks)])
        self.final = nn.RMSNorm(config.width, eps=1e-6)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, input_ids=None, attention_mask=None, **more):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(self.final(x)) {scale})
"""

RECALL = """
        late = (torch.arange(x.shape[1]) > 40)[:, None]
        noted = memory.get(0) if isinstance(memory, dict) else memory
        note = self.norm(x).argmax(-1)
        if isinstance(memory, dict):
            memory[0] = note
        seen = self.norm(x)
        if noted is not None:
            seen = seen + late * nn.functional.one_hot(noted, x.shape[-1]).to(x)
"""
HANDING = {
    "def forward(self, x):": f"def forward(self, x, memory):{RECALL}",
    "self.mix(self.norm(x))": "self.mix(seen)",
}
"""Layers that tell the next one which unit is largest, which matters after 40 tokens."""
EXTRAS = HANDING | {
    "/ number))": "/ number)), note",
    "for layer": "memory = None\n        for layer",
    "x = layer(x)": "x, memory = layer(x, memory)",
}
SHARED = HANDING | {"for layer": "memory = {}\n        for layer", "layer(x)": "layer(x, memory)"}


def averages(
    folder: Path, name: str, scale: str = "", changes: Mapping[str, str] = NOTHING
) -> Path:
    """A model whose layers average their inputs, with its code."""
    folder.mkdir()
    (folder / "configuration_averages.py").write_text(CONFIG.format(name=name))
    code = MODEL.format(name=name, scale=scale)
    for old, new in changes.items():
        assert old in code
        code = code.replace(old, new)
    (folder / "modeling_averages.py").write_text(code)
    auto_map = {
        "AutoConfig": "configuration_averages.AveragesConfig",
        "AutoModelForCausalLM": f"modeling_averages.Averages{name}ForCausalLM",
    }
    config: Any = {"model_type": f"averages{name}", "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    how = {"trust_remote_code": True}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **how), **how)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def later_error(source: Path, target: Path) -> float:
    """How far the logits of a text of 64 tokens are apart."""
    ids = torch.arange(64)[None] * 7 % 31
    before, after = (logits_of(load_strict(each), ids) for each in (source, target))
    return distance(before, after)


def test_code_runs_only_if_it_is_trusted(tmp_path: Path) -> None:
    source, out = averages(tmp_path / "source", "A"), tmp_path / "out"
    few = ("--prompts", 1, "--length", 12)
    said = refusal("grow", source, out, "--hidden", "x2", *few)
    assert "if you trust the code in that folder, growkit --trust-code FOLDER runs it" in said
    assert not any("averages" in name for name in sys.modules if "AForCausalLM" in name)
    done = cli("--trust-code", source, "grow", source, out, "--hidden", "x2", *few)
    assert done.exit_code == 0, done.output
    assert "family inferred from AveragesAForCausalLM" in done.output
    assert "as you trust it" in done.output
    assert cli("verify", source, out, *few).exit_code == 0
    with edit_weights(out) as weights:
        weights["layers.1.out.weight"][0, 0] *= 1.01
    assert cli("verify", source, out, *few).exit_code == 1


def test_what_a_class_does_with_its_sizes_is_seen(tmp_path: Path) -> None:
    """A class that divides by a root of hidden keeps nothing if hidden grows."""
    source = averages(tmp_path / "source", "C", "/ self.config.width ** 0.5")
    trust(source)
    with pytest.raises(growkit.InputError, match=r"multiplied by 1\.41421, which rounds"):
        growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert not (tmp_path / "out").exists()
    deeper = growkit.grow(source, tmp_path / "out", method="depth", layers="x2", verify=False)
    assert deeper["promise"] == "exact"


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "changes"), [("D", EXTRAS), ("E", SHARED)])
def test_new_layers_hand_on_what_they_receive(
    name: str, changes: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No prompt here is long enough to show what layers hand on beside hidden states."""
    few = growkit.Settings(prompts=1, length=24)
    source, out = averages(tmp_path / "source", name, "", changes), tmp_path / "out"
    trust(source)
    done = growkit.grow(source, out, method="depth", layers="x2", verify=few)
    assert done["kept"]
    assert later_error(source, out) < 1e-12
    monkeypatch.setattr(inferring, "_alters", lambda *_: False)
    inferring.inferred_families.clear()
    done = growkit.grow(source, tmp_path / "wrong", method="depth", layers="x2", verify=False)
    assert later_error(source, tmp_path / "wrong") > 1e-3
    for manifest in (True, False):
        found = growkit.verify(source, tmp_path / "wrong", few)
        assert [each["place"] for each in found.findings if each["kept"] is False] == ["layers.1"]
        assert "hands on other values than it receives" in found["reason"]
        if manifest:
            (tmp_path / "wrong" / "growkit.json").unlink()
