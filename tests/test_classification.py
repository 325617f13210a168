"""Classification: the model's classes with other heads, as transformers' auto classes load them."""

import importlib.metadata
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import modeling_outputs
from transformers.cache_utils import DynamicLayer
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import ModelOutput, generic

import growkit
from growkit.extras.differential.diff_family import FAMILY
from growkit.extras.differential.modeling import (
    configuration_diff_transformer,
    differential_attention,
)
from tests.models import save_model
from tests.test_modeling import VARIANTS

PADDING = 0


def batch() -> tuple[Tensor, Tensor]:
    """Two texts, one of them padded on the right."""
    ids = torch.randint(1, 29, (2, 9), generator=torch.Generator().manual_seed(3))
    ids[1, 6:] = PADDING
    return ids, (ids != PADDING).long()


@pytest.mark.parametrize("variant", ["gated dint", "v2"])
@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_heads_read_the_last_hidden_state(variant: str, kind: str, tmp_path: Path) -> None:
    folder = save_model(
        tmp_path, "diff_transformer", **{**VARIANTS[variant], "pad_token_id": PADDING}
    )
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    model = auto.from_pretrained(folder, num_labels=3).eval()
    base = transformers.AutoModel.from_pretrained(folder).eval()
    ids, mask = batch()
    found = model(ids, attention_mask=mask, labels=ids[:, 0] % 3 if kind == "Sequence" else ids % 3)
    with torch.no_grad():
        hidden = base(ids, attention_mask=mask).last_hidden_state
        expected = model.score(hidden)
    if kind == "Sequence":
        expected = expected[torch.arange(2), mask.sum(1) - 1]
    assert torch.equal(found.logits, expected)
    found.loss.backward()
    assert all(each.grad is not None for each in model.parameters())


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_the_code_beside_the_weights_classifies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without growkit; and it lies beside what is saved of that."""
    folder = save_model(tmp_path / "model", "diff_transformer")
    auto = f"AutoModelFor{kind}Classification"
    monkeypatch.setitem(sys.modules, "growkit", None)  # any import of it fails
    cls = get_class_from_dynamic_module(FAMILY.auto_map[auto], folder)
    config = get_class_from_dynamic_module(FAMILY.auto_map["AutoConfig"], folder)
    assert not cls.__module__.startswith("growkit")
    model = cls.from_pretrained(folder, config=config.from_pretrained(folder, num_labels=3))
    assert model(torch.arange(8)[None]).logits.shape[-1] == 3
    model.save_pretrained(tmp_path / "saved")
    assert FAMILY.code().keys() <= {file.name for file in (tmp_path / "saved").iterdir()}
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["auto_map"][auto] == FAMILY.auto_map[auto]


def test_a_grown_model_names_every_class_of_its_code(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diff_transformer")
    named = json.loads((source / "config.json").read_text())["auto_map"]
    assert named.items() < FAMILY.auto_map.items()  # transformers names the class that was saved
    growkit.grow(source, tmp_path / "out", ffn="x2", verify=False)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["auto_map"] == FAMILY.auto_map


@pytest.mark.parametrize(("version", "fits"), [("4.56.2", False), ("4.57.0", True)])
def test_an_older_transformers_is_refused_in_a_sentence(
    version: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda package: version)
    assert (
        f"transformers {configuration_diff_transformer.OLDEST_TRANSFORMERS} or" in FAMILY.loads_with
    )
    file = Path(differential_attention.__file__).with_name("configuration_diff_transformer.py")
    spec = importlib.util.spec_from_file_location("copied", file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied", module)
    if fits:
        spec.loader.exec_module(module)
        return
    with pytest.raises(
        ImportError, match=r"transformers>=4.57 is required .* found transformers==4.56.2"
    ):
        spec.loader.exec_module(module)


def test_names_of_older_transformers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in 4.57: it runs there by hand, and here the copied code meets its names."""

    @dataclass
    class Output(ModelOutput):
        last_hidden_state: Any = None
        past_key_values: Any = None

    def update(self: Any, key: Any, value: Any, cache_kwargs: Any = None) -> Any:
        return cache_kwargs["cache_position"].tolist()

    monkeypatch.setattr(modeling_outputs, "BaseModelOutputWithPast", Output)
    monkeypatch.setattr(DynamicLayer, "update", update)
    monkeypatch.setattr(generic, "check_model_inputs", lambda: lambda forward: forward)
    for name in ("transformers.initialization", "transformers.utils.output_capturing"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(transformers, "initialization", raising=False)
    file = Path(differential_attention.__file__).with_name("transformers_versions.py")
    spec = importlib.util.spec_from_file_location("older", file)
    older = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(older)
    assert older.init is torch.nn.init
    assert older.CACHE == "past_key_values"
    assert older.takes_cache(lambda cache: cache)(past_key_values=1, cache_position=2) == 1
    cache = SimpleNamespace(
        get_seq_length=lambda layer: 5,
        update=lambda key, value, layer, kwargs: update(None, key, value, kwargs),
    )
    assert older.update(cache, torch.zeros(1, 1, 2, 4), None, 0) == [5, 6]
