"""Training goes on: with FSDP2 on two CPU processes, in the examples, and with adapters."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import checkpoint
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import growkit
from growkit.cli.demo import held_out_text
from growkit.training import assert_preserved
from tests.conftest import save_model, with_tokenizer

pytest.importorskip("accelerate")
from examples import grow_on_many_ranks
from examples.continue_training import main
from tests.fsdp import FSDP, on_ranks, trained

pytestmark = pytest.mark.filterwarnings(
    "ignore:'pin_memory' argument:UserWarning", "ignore:`is_gradient_checkpointing`:FutureWarning"
)


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
    both = on_ranks(at_once_and_resumed, folder, tmp_path / "two", scratch=tmp_path / "scratch")
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
        if dist.get_rank() == 1:
            shard.detach().mul_(1.01)
        try:
            said.append(assert_preserved(wrapped, folder))
        except growkit.InputError as error:
            said.append(str(error))
        shard.detach().copy_(kept)
    return said


def test_a_wrong_shard_on_one_rank_is_noticed(folder: Path, tmp_path: Path) -> None:
    for found in on_ranks(sharded, folder, scratch=tmp_path):
        distance, ddp, still_sharded, training, by_dcp, *wrong = found
        assert max(distance, ddp, by_dcp) < 1e-6
        assert still_sharded
        assert training
        assert len(wrong) == 4
        assert all("does not compute what" in str(each) for each in wrong)


# --- The examples ---------------------------------------------------------------------------------


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    sizes = {"vocab_size": 256, "max_position_embeddings": 256, "num_hidden_layers": 1}
    source = with_tokenizer(save_model(tmp_path / "source", "llama", **sizes))
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=False)
    (tmp_path / "text").write_text(held_out_text()[:2000], encoding="utf-8")
    files = [str(tmp_path / name) for name in ("out", "text", "run")]
    return [*files, "--cpu", "--batch", "1", "--lr", "1e-2", "--save-steps", "2"]


def test_continue_training(given: list[str], tmp_path: Path) -> None:
    at_once = main([*given, "--steps", "3"])
    assert at_once[-1] != at_once[0]
    shutil.rmtree(tmp_path / "run" / "checkpoint-3")
    assert main([*given, "--steps", "3"]) == pytest.approx(at_once, abs=1e-6)
    assert (tmp_path / "run" / "trained" / "tokenizer.json").is_file()


def test_adapters_alone(given: list[str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    main([*given, "--steps", "2", "--lora", "q_proj", "v_proj"])
    assert (tmp_path / "run" / "trained" / "adapter_model.safetensors").is_file()


RECIPE = """
source: {source}
output: {out}
steps: [{{grow: hypercloning, hidden: x2, ffn: x2}}]
verify: false
"""


def grown_by_ranks(recipe: str, output: str) -> int:
    grow_on_many_ranks.grow(recipe, Path(output))
    return dist.get_rank()


def test_ranks_save_what_one_process_writes(tmp_path: Path) -> None:
    """Held against the written folder as torch reads both; and with the control, a changed bit."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16, hidden_size=24)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(source=source, out=tmp_path / "whole"), encoding="utf-8")
    growkit.run(recipe)
    given = str(recipe), str(tmp_path / "out")
    assert on_ranks(grown_by_ranks, *given, scratch=tmp_path / "scratch") == [0, 1]
    dcp_to_torch_save(tmp_path / "out", tmp_path / "all.pt")
    found = torch.load(tmp_path / "all.pt", weights_only=True)
    expected = load_file(tmp_path / "whole" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    expected["model.norm.weight"].view(torch.int16)[3] ^= 1
    assert not torch.equal(found["model.norm.weight"], expected["model.norm.weight"])
    assert len(list((tmp_path / "out").glob("*.distcp"))) == 2
    result = growkit.verify(tmp_path / "source", tmp_path / "out", prompts=1, length=8)
    assert result["kept"], result["reason"]
