"""Trainer with FSDP2 on two CPU processes: the same training, and a wrong shard is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import growkit
from growkit.training import assert_preserved
from tests.conftest import save_model

pytest.importorskip("accelerate")
from tests.fsdp import FSDP, on_two, trained

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("grown")
    source = save_model(place / "source", "llama", num_hidden_layers=1)
    settings = growkit.Settings(prompts=2, length=12)
    growkit.grow(source, place / "out", hidden="x2", verify=settings)
    return place / "out"


def at_once_and_resumed(folder: Path, output: Path) -> list[list[float]]:
    options = {"fsdp": True, "fsdp_config": dict(FSDP)}
    return [trained(folder, output, 3, 2, resume, **options) for resume in (False, True)]


def test_two_processes_train_as_one_does(folder: Path, tmp_path: Path) -> None:
    """Losses are logged with the digits of their float32."""
    one = trained(folder, tmp_path / "one", 3, 4)
    both = on_two(at_once_and_resumed, folder, tmp_path / "two", scratch=tmp_path / "scratch")
    for at_once, resumed in both:
        assert at_once == pytest.approx(one, abs=2e-4)
        assert resumed == pytest.approx(at_once, abs=1e-6)
    assert len(set(one)) == 3  # it learns


def sharded(folder: Path) -> list[object]:
    """What the check says of models, of their state, and of those that are wrong on one rank."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    empty = AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
    mesh = init_device_mesh("cpu", (2,))
    for each in (model, empty):
        for layer in each.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(each, mesh=mesh)
    held = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(folder))
    said: list[object] = [assert_preserved(model.train(), folder), assert_preserved(held, folder)]
    said.append(all(isinstance(each, DTensor) for each in model.parameters()))
    said.append(all(module.training for module in model.modules()))
    checkpoint.load(empty.state_dict(), storage_reader=HuggingFaceStorageReader(str(folder)))
    said.append(assert_preserved(empty, folder))
    spoiled: list[tuple[Module, Tensor]] = [(held, next(held.parameters()))]
    for name in ("model.embed_tokens", "model.layers.0.mlp.down_proj", "lm_head"):
        spoiled.append((model, model.get_submodule(name).weight.to_local()))
    for wrapped, shard in spoiled:
        kept = shard.detach().clone()
        if torch.distributed.get_rank() == 1:
            shard.detach().mul_(1.01)
        try:
            said.append(assert_preserved(wrapped, folder))
        except growkit.InputError as error:
            said.append(str(error))
        shard.detach().copy_(kept)
    return said


def test_a_wrong_shard_on_one_rank_is_noticed(folder: Path, tmp_path: Path) -> None:
    for found in on_two(sharded, folder, scratch=tmp_path):
        distance, ddp, still_sharded, training, by_dcp, *wrong = found
        assert max(distance, ddp, by_dcp) < 1e-6
        assert still_sharded
        assert training
        assert len(wrong) == 4
        assert all("does not compute what" in str(each) for each in wrong)
