"""What transformers would read is asked of transformers; what it would follow is refused."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.engine.loader import loading
from growkit.model.checkpoint import writing
from growkit.model.checkpoint.reading import Checkpoint
from tests.files import edit_config, edit_weights
from tests.models import Make

QUICK: dict[str, Any] = {"prompts": 1, "length": 10}


def a_tensor_twice(folder: Path) -> None:
    with edit_weights(folder) as tensors:
        tensors["norm.weight"] = 2 * tensors["model.norm.weight"]


KERNEL = "nobody/kernel@main:fast"
FOLLOWED: dict[str, Callable[[Path], Any]] = {
    "quantised": partial(edit_config, quantization_config={"quant_method": "fp8"}),
    "norm.weight": a_tensor_twice,
    "attn_implementation": partial(edit_config, attn_implementation=KERNEL),
    "_attn_implementation": partial(edit_config, text_config={"_attn_implementation": KERNEL}),
    "experts_implementation": partial(edit_config, experts_implementation={"": KERNEL}),
    "vocab": lambda folder: (folder / "tokenizer_config.json").write_text('{"vocab": "/dev/zero"}'),
    "additional_chat_templates": lambda folder: (folder / "additional_chat_templates").symlink_to(
        folder.parent
    ),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_a_loader_would_follow_is_refused(
    name: str, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: as a target, as a source, and before anything is grown from it."""
    source = make("llama")
    copy = shutil.copytree(source, tmp_path / "copy")
    assert loading(Checkpoint(copy)).own_class  # the control
    kernels: list[Any] = []
    monkeypatch.setattr(
        "transformers.modeling_utils.lazy_import_flash_attention", lambda *a, **k: kernels.append(a)
    )
    FOLLOWED[name](copy)
    monkeypatch.setattr(writing, "_write_tensor", lambda *arguments: pytest.fail("too late"))
    for pair in ((source, copy), (copy, source)):
        with pytest.raises(InputError, match=name):
            growkit.verify(*pair, **QUICK)
    with pytest.raises(InputError, match=name):
        growkit.grow(copy, tmp_path / "out", hidden="x2", verify=growkit.Settings(**QUICK))
    assert kernels == []
    assert not (tmp_path / "out").exists()


def test_tensors_that_the_class_passes_over_are_named(make: Make, tmp_path: Path) -> None:
    source = make("llama")
    copy = shutil.copytree(source, tmp_path / "copy")
    with edit_weights(copy) as tensors:
        tensors["model.layers.0.mlp.extra"] = torch.ones(3)
    assert loading(Checkpoint(copy)).unread == ("model.layers.0.mlp.extra",)
    result = growkit.verify(source, copy, **QUICK)
    assert "does not read model.layers.0.mlp.extra" in result["reason"]


def test_what_is_no_exception_becomes_a_sentence(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torch's ``CheckpointException``, and panics of libraries in Rust."""

    class OddError(BaseException):
        pass

    checkpoint = Checkpoint(make("llama"))
    load = Mock(side_effect=[OddError("odd"), KeyboardInterrupt()])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    with pytest.raises(InputError, match="OddError: odd"):
        loading(checkpoint)
    with pytest.raises(KeyboardInterrupt):
        loading(checkpoint)
