"""Every stored parameter is used by the forward of its own module, which is what libraries replace.

Quantisation, adapters and offloading all work on modules: they swap or wrap a module's forward, and
a weight that another module reads is not theirs to know of.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from torch import nn

import growkit
from growkit.modeling.configuration_diff_transformer import DiffTransformerConfig
from growkit.modeling.modeling_diff_transformer import SharedProjection
from tests.conftest import relative_error, save_model
from tests.test_modeling import CACHED, build, tokens

VARIANTS: dict[str, dict[str, Any]] = {
    **CACHED,
    "column mean": {"integral": "column_mean", "gamma": "gated"},
    "plain norm": {"head_norm": "plain", "attention_bias": True, "qk_norm": True},
    "shared by layer": {
        "qk_projection": "shared",
        "shared_rank": [1, 3],
        "shared_scope": "layer",
        "attention_bias": True,
    },
    "shared by all heads": {
        "qk_projection": "shared",
        "shared_rank": 2,
        "shared_scope": "all_heads",
        "hidden_act": "poly_norm",
    },
}


def never_called(model: nn.Module) -> set[str]:
    """The modules with parameters of their own whose forward a pass of the model leaves out."""
    waiting = {name for name, module in model.named_modules() if module._parameters}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: waiting.discard(name))
    model(tokens((2, 7)), use_cache=False)
    return waiting


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_module_with_parameters_is_called(variant: str) -> None:
    assert never_called(build(**VARIANTS[variant])) == set()


def test_a_module_whose_weight_its_parent_reads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: SharedProjection, hidden_states: torch.Tensor) -> torch.Tensor:
        return type(self.up).forward(self.up, self.down(hidden_states), self.base(hidden_states))

    model = build(**VARIANTS["shared diff"])
    monkeypatch.setattr(type(model.model.layers[0].self_attn.q_proj.up), "forward", sum_of_weights)
    monkeypatch.setattr(SharedProjection, "forward", forward)
    assert never_called(model) == {
        f"model.layers.{layer}.self_attn.{name}_proj.up" for layer in range(2) for name in "qk"
    }


def sum_of_weights(self: nn.Module, low: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    rows = self.weight.sum(1)
    return rows.expand(*base.shape[:-1], len(rows))


@pytest.mark.parametrize("variant", VARIANTS)
def test_offloaded_models_compute_the_same(variant: str) -> None:
    """Between calls, weights are nowhere: each is brought in for the forward of its module."""
    model = build(**VARIANTS[variant])
    ids = tokens((2, 7))
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        offloaded = cpu_offload(copy.deepcopy(model), execution_device=torch.device("cpu"))
        assert all(each.is_meta for each in offloaded.parameters())
        assert torch.equal(offloaded(ids, use_cache=False).logits, expected)


# --- The key that was called output_multiplier ----------------------------------------------------


def test_configs_have_no_key_that_trainers_read_as_a_scale_of_logits() -> None:
    """TRL takes these for numbers that logits are multiplied with."""
    config = DiffTransformerConfig(output_multiplier="none")
    assert config.head_output_scale == "none"
    assert config.to_dict() == DiffTransformerConfig(head_output_scale="none").to_dict()
    for key in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        assert not hasattr(config, key)
    assert config.logits_scaling == 1  # which TRL divides logits by, and so does the class


def with_former_key(source: Path) -> dict[str, Any]:
    """Write the config of a DIFF Transformer as it was written once; returns it."""
    config = json.loads((source / "config.json").read_text())
    config["output_multiplier"] = config.pop("head_output_scale")
    (source / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize("step", ["hypercloning", "dint"])
def test_folders_with_the_former_key(step: str, tmp_path: Path) -> None:
    """They are read, grown, converted and verified; what is written has today's key."""
    source = save_model(tmp_path / "old", "diff_transformer", head_output_scale="none")
    with_former_key(source)
    target = tmp_path / "new"
    if step == "dint":
        result = growkit.convert(source, target, step)
    else:
        result = growkit.grow(source, target, method=step, hidden="x2")
    assert result["kept"]
    written = json.loads((target / "config.json").read_text())
    assert "output_multiplier" not in written
    assert written["head_output_scale"] == "none"
    assert relative_error(source, target) < 1e-12
