"""The loss that a class returns, with the terms that its config adds: judged by transformers."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import growkit
from growkit.engine.strict import strict_float64
from tests.architectures import save
from tests.files import edit_json
from tests.models import load_strict, save_model

QUICK = growkit.Settings(prompts=1, length=16)
MORE: dict[str, Any] = {"method": "experts", "experts": "x2"}
KEYS = "router_aux_loss_coef", "aux_loss_coef"


def losses(folder: Path) -> tuple[float, float]:
    """The loss of a class, and the part of it that is no cross-entropy of its logits."""
    model, ids = load_strict(folder), torch.arange(2, 26)[None] * 5 % 29
    with strict_float64(), torch.no_grad():
        output = model(input_ids=ids, labels=ids, use_cache=False)
        entropy = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    return float(output.loss), float(output.loss - entropy)


def balanced(folder: Path, **changes: Any) -> Path:
    """The model, with a loss that balances its experts."""
    with edit_json(folder / "config.json") as config:
        config |= {"output_router_logits": True, **changes}
    return folder


@pytest.mark.sampled(1, "mixtral-False")
@pytest.mark.parametrize("stated", [True, False])
@pytest.mark.parametrize(
    "kind",
    ["mixtral", "qwen2_moe", "gpt_oss", "olmoe", "granitemoe", "jetmoe", "qwen3_next", "minimax"],
)
def test_copies_of_experts_are_balanced_as_these_are(
    kind: str, stated: bool, tmp_path: Path
) -> None:
    """Transformers multiplies by all experts, of which as many more are chosen."""
    source = balanced(save(kind, tmp_path / "source"))
    with edit_json(source / "config.json") as config:
        for key in config.keys() & {*KEYS}:
            config[key] = 0.7
            if not stated:
                del config[key]
    copies = 2 if kind == "qwen2_moe" else 3
    growth = {**MORE, "experts": f"x{copies}", "symmetry": "keep"}
    growkit.grow(source, tmp_path / "out", verify=False, **growth)
    (expected, more), (found, _) = map(losses, (source, tmp_path / "out"))
    assert more > 1e-3
    assert abs(found - expected) < 1e-13


@pytest.mark.usage
def test_a_proof_compares_the_loss_of_the_class(tmp_path: Path) -> None:
    """Also in training, and without a manifest."""
    source = balanced(save_model(tmp_path / "source", "mixtral"), router_aux_loss_coef=0.1)
    out = tmp_path / "out"
    settings = growkit.Settings(prompts=1, length=16, steps=1)
    grown = growkit.grow(source, out, verify=settings, symmetry="keep", **MORE)
    assert grown["kept"]
    proof = grown["verification"]
    assert proof.sections.training.losses_source[0] > proof.sections.logits.loss_source + 0.1
    (out / "growkit.json").unlink()
    assert growkit.verify(source, out, QUICK)["kept"]
    balanced(out, router_aux_loss_coef=0.1)
    found = growkit.verify(source, out, QUICK)
    assert found["verdict"] == "preserved, but its class returns another loss"
    assert "loss: " in found["reason"]


@pytest.mark.sampled(1)
@pytest.mark.usage
@pytest.mark.parametrize(
    ("kind", "growth"),
    [
        ("mixtral", {"method": "depth", "layers": "x2"}),
        ("llama", {"method": "upcycle", "experts": 4}),
    ],
)
def test_another_loss_is_planned(kind: str, growth: dict[str, Any], tmp_path: Path) -> None:
    """New routers have a part in the means, whatever the coefficient."""
    source, out = balanced(save_model(tmp_path / "source", kind)), tmp_path / "out"
    why = "its class returns another loss than the source's"
    assert why in growkit.grow(source, out, dry_run=True, **growth)["warnings"][-1]
    grown = growkit.grow(source, out, verify=QUICK, **growth)
    assert grown["kept"]
    assert why in grown["updates"]["why"][0]
    assert why in grown["verification"]["reason"]
    (out / "growkit.json").unlink()
    found = growkit.verify(source, out, QUICK)
    assert found["kept"]
    assert why in found["reason"]
    for number, off in enumerate(({"output_router_logits": False}, {"router_aux_loss_coef": 0.0})):
        plain = balanced(shutil.copytree(source, tmp_path / f"{number}"), **off)
        assert not growkit.grow(plain, tmp_path / "more", dry_run=True, **growth)["warnings"]


@pytest.mark.usage
def test_a_class_without_such_a_loss_returns_the_same(tmp_path: Path) -> None:
    source = balanced(save("deepseek_v3", tmp_path / "source"))
    grown = growkit.grow(source, tmp_path / "out", verify=QUICK, method="depth", layers="x2")
    modes = {mode["name"]: mode["kept"] for mode in grown["verification"].sections.modes.modes}
    assert (grown["warnings"], modes["loss"]) == ([], True)
