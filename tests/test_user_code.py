"""Models with code of their own: refused, or inferred and proved if the user trusts the code."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import growkit
from growkit.engine.user_code import trust
from tests.conftest import cli, edit_weights, refusal

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


def averages(folder: Path, name: str, scale: str = "") -> Path:
    """A model whose layers average their inputs, with its code."""
    folder.mkdir()
    (folder / "configuration_averages.py").write_text(CONFIG.format(name=name))
    (folder / "modeling_averages.py").write_text(MODEL.format(name=name, scale=scale))
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


def test_other_code_is_named(tmp_path: Path) -> None:
    source, out = averages(tmp_path / "source", "B"), tmp_path / "out"
    trust(source)
    growkit.grow(source, out, hidden="x2", verify=False)
    file = out / "modeling_averages.py"
    file.write_text(file.read_text() + "\nprint('changed')\n")
    verdict = growkit.verify(source, out, settings=growkit.Settings(prompts=1, length=12))
    assert not verdict["kept"]
    assert "modeling_averages.py" in verdict["reason"]


def test_what_a_class_does_with_its_sizes_is_seen(tmp_path: Path) -> None:
    """A class that divides by a root of hidden keeps nothing if hidden grows."""
    source = averages(tmp_path / "source", "C", "/ self.config.width ** 0.5")
    trust(source)
    with pytest.raises(growkit.InputError, match=r"multiplied by 1\.41421, which rounds"):
        growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    assert not (tmp_path / "out").exists()
    deeper = growkit.grow(source, tmp_path / "out", method="depth", layers="x2", verify=False)
    assert deeper["promise"] == "exact"
