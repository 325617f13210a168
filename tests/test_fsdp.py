"""Training goes on: with FSDP2 on two CPU processes, in the examples, and with adapters."""

import shutil
from itertools import chain
from pathlib import Path
from typing import Any

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
from growkit.training import AssertPreserved, assert_preserved
from tests.files import with_tokenizer
from tests.models import save_model

pytest.importorskip("accelerate")
from examples import continue_training, grow_on_many_ranks
from examples.continue_training import main
from tests.fsdp import on_ranks, shard_on_cpu

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


def words(place: Path, batch: int, steps: int, name: str = "out", run: str = "run") -> list[str]:
    """The command line of the example."""
    files = [str(place / each) for each in (name, "text", run)]
    rest = ["--cpu", "--lr", "1e-2", "--save-steps", "2"]
    return [*files, *rest, "--batch", str(batch), "--steps", str(steps)]


def deeper(place: Path, kind: str = "llama", **config: Any) -> Path:
    """A model whose parameter groups are Trainer's, and a text."""
    sizes = {"vocab_size": 256, "max_position_embeddings": 256, "num_hidden_layers": 1}
    source = with_tokenizer(save_model(place / "source", kind, **sizes, **config))
    growkit.grow(source, place / "out", method="depth", layers="x2", verify=False)
    (place / "text").write_text(held_out_text()[:2000], encoding="utf-8")
    return place


def test_continue_training(tmp_path: Path) -> None:
    place = deeper(tmp_path)
    at_once = main(words(place, 1, 3))
    assert at_once[-1] != at_once[0]
    shutil.rmtree(place / "run" / "checkpoint-3")
    assert main(words(place, 1, 3)) == pytest.approx(at_once, abs=1e-6)
    assert (place / "run" / "trained" / "tokenizer.json").is_file()


def sharded_training(*runs: list[str]) -> list[list[float]]:
    """The losses of runs of the example, whose parameters are all sharded."""
    shard_on_cpu()

    class Sharded(AssertPreserved):
        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            assert all(isinstance(each, DTensor) for each in kwargs["model"].parameters())
            super().on_train_begin(*args, **kwargs)

    continue_training.AssertPreserved = Sharded  # type: ignore[misc]
    losses = []
    for each in runs:
        dist.barrier()
        if dist.get_rank() == 0:  # then the run before is interrupted, and this one resumes it
            shutil.rmtree(Path(each[2], f"checkpoint-{each[-1]}"), ignore_errors=True)
        dist.barrier()
        losses.append(main(each))
    return losses


MODELS = {"llama": {"tie_word_embeddings": True}, "diff_transformer": {}}


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.sampled(0)
def test_two_sharded_processes_train_as_one_does(kind: str, tmp_path: Path) -> None:
    """Also from their own optimizer's state, grown; losses have the digits of float32."""
    place, scratch = deeper(tmp_path, kind, **MODELS[kind]), tmp_path / "scratch"
    one = main(words(place, 2, 3, run="one"))
    two = words(place, 1, 3)
    for losses in chain(*on_ranks(sharded_training, two, two, scratch=scratch)):
        assert losses == pytest.approx(one, abs=1e-4)
    assert len(set(one)) == 3  # it learns
    saved, expected = (
        AutoModelForCausalLM.from_pretrained(place / run / "trained").state_dict()
        for run in ("run", "one")
    )
    assert all(torch.allclose(saved[name], expected[name], atol=1e-4) for name in expected)
    for run in ("run", "one"):
        state, source = place / run / "checkpoint-3", place / run / "trained"
        wider = {"hidden": "x2", "symmetry": "keep", "optimizer": state, "verify": False}
        growkit.grow(source, place / f"wider-{run}", **wider)
    longer = main(words(place, 2, 5, run="one"))[3:]
    assert main(words(place, 2, 5, "wider-one", "wider"))[3:] == pytest.approx(longer, abs=1e-4)
    runs = words(place, 1, 5, "out", "run"), words(place, 1, 5, "wider-run", "more")
    for losses in chain(*on_ranks(sharded_training, *runs, scratch=scratch)):
        assert losses[3:] == pytest.approx(longer, abs=1e-4)


def test_adapters_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    main([*words(deeper(tmp_path), 1, 2), "--lora", "q_proj", "v_proj"])
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
