"""Models that are grown while they load, in one process and in several."""

import json
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import growkit
from growkit.base.errors import InputError
from growkit.distributed import GrownStorageReader
from growkit.extras.loading.grown_target import Grown, StateEntry
from tests.files import edit_weights, flip_bit
from tests.fsdp import on_ranks
from tests.models import load_strict, same_bits, save_model
from tests.test_optimizer_state import FLAT, load_distributed, save_distributed, trained

RANKS = 4
SIZES = {"vocab_size": 30}  # of which four processes have unequal parts
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 24}
SIZES |= {"num_hidden_layers": 1}
BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16, **SIZES}
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "hypercloning": ("llama", BFLOAT16, [{"grow": "hypercloning", "hidden": "x2"}]),
    "group-diff": (
        "diffllama",
        BFLOAT16 | {"tie_word_embeddings": True},
        [{"grow": "group-diff", "hidden": "x2", "signal_heads": "x4"}],
    ),
    "depth": ("llama", BFLOAT16, [{"grow": "depth", "layers": 2}]),
    "upcycling": ("mistral", BFLOAT16, [{"grow": "upcycle", "experts": 4, "top_k": 2}]),
    "grow-convert": (
        "llama",
        SIZES,
        [{"grow": "hypercloning", "hidden": "x2", "ffn": "x2"}, {"convert": "diff-v2"}],
    ),
}
"""Models, what their sources are, and what is done to these."""


def make(name: str, folder: Path, **more: Any) -> growkit.Recipe:
    """Save the source of a case, and write what is made of it."""
    kind, sizes, steps = CASES[name]
    source = save_model(folder / name / "source", kind, **sizes)
    content = {"source": str(source), "output": str(folder / name / "out"), "steps": steps}
    file = folder / name / "recipe.yaml"
    file.write_text(json.dumps({**content, "seed": 3, "verify": False, **more}))
    recipe = growkit.load_recipe(file)
    growkit.run(recipe)
    return recipe


# Models that are spread over processes.

PARALLEL = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), ColwiseParallel),
    **dict.fromkeys(("o_proj", "down_proj"), RowwiseParallel),
}


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the matrices of all layers."""
    names = [name for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    plan = {n: PARALLEL[end]() for n in names if (end := n.rpartition(".")[2]) in PARALLEL}
    parallelize_module(model, mesh, plan)


def by_columns(parameter: nn.Parameter) -> Shard:
    """Shard the second dimension where there is one."""
    return Shard(1 if parameter.dim() > 1 else 0)


def data_parallel(model: Any, mesh: DeviceMesh, **options: Any) -> None:
    """FSDP2, a layer at a time."""
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def on_rows(model: Any) -> None:
    data_parallel(model, init_device_mesh("cpu", (RANKS,)))


def on_columns(model: Any) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    data_parallel(model, mesh, shard_placement_fn=by_columns)


def on_matrices(model: Any) -> None:
    tensor_parallel(model, init_device_mesh("cpu", (RANKS,)))


def on_both(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("dp", "tp"))
    tensor_parallel(model, mesh["tp"])
    data_parallel(model, mesh["dp"])


WAYS: dict[str, Callable[[Any], None]] = {
    "FSDP2, Shard(0)": on_rows,
    "FSDP2, Shard(1)": on_columns,
    "tensor parallel": on_matrices,
    "FSDP2 and tensor parallel": on_both,
}
CONFIGS = {
    "fsdp_size=4": {"fsdp_size": 4},
    "tp_size=4": {"tp_size": 4},
    "fsdp_size=2, tp_size=2": {"fsdp_size": 2, "tp_size": 2},
}


def spread(
    config: Any, spreading: Callable[[Any], None], dtype: torch.dtype, like: Any = None
) -> Any:
    """A model without weights, spread; what no file holds is as in another one, if it is given."""
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
    spreading(model)
    model.to_empty(device="cpu")
    for name, buffer in like.named_buffers() if like is not None else ():
        module, _, last = name.rpartition(".")
        setattr(model.get_submodule(module), last, buffer.clone())  # also in its dtype
    return model


def whole(tensor: Any) -> Tensor:
    """Of all shards."""
    found: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach()


def differing(state: Mapping[str, Any], expected: Mapping[str, Tensor]) -> list[str]:
    """The names of what differs; collective, where tensors are spread."""
    found = {name: whole(tensor) for name, tensor in state.items()}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return [name for name in found if not same_bits(found[name], expected[name])]


def spread_tensors(state: Mapping[str, Any]) -> int:
    """How many are."""
    each = [t for t in state.values() if isinstance(t, DTensor)]
    return sum(any(not p.is_replicate() for p in tensor.placements) for tensor in each)


def look(name: str, folder: Path, found: dict[str, Any], ways: Collection[str]) -> None:
    """Load a model in some ways, each over all processes."""
    recipe = growkit.load_recipe(folder / name / "recipe.yaml")
    out = Path(recipe.output)
    expected = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=False).state_dict()
    config = AutoConfig.from_pretrained(out, trust_remote_code=False)
    dtype = next(iter(expected.values())).dtype
    reader = GrownStorageReader(recipe)
    for way, spreading in WAYS.items():
        if way not in ways:
            continue
        model = spread(config, spreading, dtype)
        state = model.state_dict()
        dcp.load(state, storage_reader=reader)
        found[f"{name}: {way}"] = spread_tensors(state), differing(state, expected)
    for way, sizes in CONFIGS.items():
        if way not in ways:
            continue
        if "tp" in way and not getattr(config, "base_model_tp_plan", None):
            continue  # growkit's own class has none
        model = growkit.load(recipe, distributed_config=DistributedConfig(**sizes))
        state = model.state_dict()
        found[f"{name}: {way}"] = spread_tensors(state), differing(state, expected)


# Optimizers.


def make_trained(folder: Path) -> None:
    """A source that has been trained in float64, grown with the state of its optimizer."""
    source = save_model(folder / "trained" / "source", "llama", **SIZES)
    model, optimizer = trained(source, 2)
    state = save_distributed(model, optimizer, folder / "trained" / "state")
    steps = [{"grow": "hypercloning", "hidden": "x2", "symmetry": "keep"}]
    content = {"source": str(source), "output": str(folder / "trained" / "out"), "steps": steps}
    file = folder / "trained" / "recipe.yaml"
    file.write_text(json.dumps({**content, "verify": False, "optimizer": str(state)}))
    growkit.run(file)


def look_at_optimizer(folder: Path, found: dict[str, Any], ways: Collection[str]) -> None:
    """Load the state on all processes and on one, and take a step on both."""
    reader = GrownStorageReader(folder / "trained" / "recipe.yaml")
    out = folder / "trained" / "out"
    alone = load_strict(out)
    optimizer = torch.optim.AdamW(reader.param_groups(alone))
    load_distributed(alone, optimizer, out)
    kept = get_optimizer_state_dict(alone, optimizer, options=FLAT)
    for way in ways:
        model = spread(alone.config, WAYS[way], torch.float64, alone)
        weights = model.state_dict()
        dcp.load(weights, storage_reader=reader)
        spread_optimizer = torch.optim.AdamW(reader.param_groups(model))
        state = get_optimizer_state_dict(model, spread_optimizer, options=FLAT)
        dcp.load({"optimizer": state}, storage_reader=reader)
        tensors, expected = (
            {name: value for name, value in each.items() if isinstance(value, Tensor)}
            for each in (state, kept)
        )
        wrong = differing(tensors, expected)
        wrong += [name for name in kept.keys() - expected.keys() if state[name] != kept[name]]
        found[f"optimizer: {way}"] = spread_tensors(tensors), wrong


# The control: a shard that begins one row too early.


def look_at_fault(folder: Path, found: dict[str, Any]) -> None:
    recipe = growkit.load_recipe(folder / "hypercloning" / "recipe.yaml")
    expected = AutoModelForCausalLM.from_pretrained(recipe.output).state_dict()
    fill = StateEntry.fill

    def misplaced(entry: StateEntry, into: Tensor, where: Any) -> None:
        rows, *others = where
        if entry.name == "model.layers.0.mlp.up_proj.weight" and rows.start:
            where = [slice(rows.start - 1, rows.stop - 1), *others]
        fill(entry, into, where)

    model = spread(AutoConfig.from_pretrained(recipe.output), on_rows, torch.bfloat16)
    state = model.state_dict()
    with mock.patch.object(StateEntry, "fill", misplaced):
        dcp.load(state, storage_reader=GrownStorageReader(recipe))
    found["fault"] = spread_tensors(state), differing(state, expected)


def load_pieces(folder: str) -> str:
    """Experts of which each process has rows of gate and of up, in one matrix."""
    recipe = growkit.load_recipe(Path(folder) / "upcycling" / "recipe.yaml")
    expected = AutoModelForCausalLM.from_pretrained(recipe.output).state_dict()
    model = growkit.load(recipe, distributed_config=DistributedConfig(tp_size=2))
    state = model.state_dict()
    assert not differing(state, expected)  # transformers knows the pieces
    try:
        dcp.load(state, storage_reader=GrownStorageReader(recipe))
    except dcp.CheckpointException as error:
        (why,) = {str(exception) for exception, _ in error.failures.values()}
        return why
    return "loaded"


def look_at_all(folder: str, ways: Mapping[str, Collection[str]]) -> dict[str, Any]:
    """Everything that is asked for, an optimizer, and a control."""
    found: dict[str, Any] = {}
    for name in ways:
        look(name, Path(folder), found, ways[name])
    look_at_optimizer(Path(folder), found, list(WAYS)[: len(ways)][:2])
    look_at_fault(Path(folder), found)
    return found


def recipe_of(folder: Path, source: Path, *steps: growkit.GrowStep | growkit.ConvertStep) -> Any:
    return growkit.Recipe(str(source), steps, str(folder / "out"), verify=None)


QUICK = growkit.Settings(prompts=1, length=8)
WIDER = growkit.GrowStep("hypercloning", {"hidden": "x2"})


def test_four_processes_load_what_one_has_written(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """Through both libraries, with an optimizer; a misplaced shard is noticed."""
    ways: dict[str, list[str]] = {"hypercloning": ["FSDP2 and tensor parallel", "fsdp_size=4"]}
    if pytestconfig.getoption("--all"):
        ways = {name: [*WAYS, *CONFIGS] for name in CASES}
    for name in ways:
        make(name, tmp_path)
    make_trained(tmp_path)
    asked = look_at_all, str(tmp_path), ways
    for found in on_ranks(*asked, scratch=tmp_path / "scratch", count=RANKS):
        assert len(found) > 3
        for way, (spread, wrong) in found.items():
            assert spread, way
            assert bool(wrong) == (way == "fault"), (way, wrong)


def test_shards_in_several_pieces_are_refused(tmp_path: Path) -> None:
    """torch's planner takes them for one piece, and would read rows of other processes."""
    make("upcycling", tmp_path)
    for found in on_ranks(load_pieces, str(tmp_path), scratch=tmp_path / "scratch"):
        assert "gate_up_proj has several pieces" in found


def test_a_model_loads_in_one_process(tmp_path: Path) -> None:
    """Models with code of their own, and in a wider dtype."""
    source = save_model(tmp_path / "source", "llama", dtype=torch.bfloat16)
    recipe = recipe_of(tmp_path, source, WIDER, growkit.ConvertStep("diff-v2"))
    growkit.run(recipe)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert not differing(growkit.load(recipe).state_dict(), expected)
    wide = growkit.load(recipe, dtype=torch.float32).state_dict()
    assert not differing(wide, {name: each.float() for name, each in expected.items()})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("settings", [{"eos_token_id": 7, "repetition_penalty": 2.0}, None])
def test_settings_of_generation_are_those_of_the_proof(
    settings: dict[str, Any] | None, tmp_path: Path
) -> None:
    """They are loaded with the model, so another source must have the same."""
    source = save_model(tmp_path / "source", "llama", eos_token_id=2)
    growkit.run(replace(recipe_of(tmp_path, source, WIDER), verify=QUICK), proof_only=True)
    other = shutil.copytree(source, tmp_path / "other")
    loaded = growkit.load(tmp_path / "out", source=other)  # the control
    assert loaded.generation_config.eos_token_id == 2
    file = other / "generation_config.json"
    file.unlink() if settings is None else file.write_text(json.dumps(settings))
    with pytest.raises(InputError, match=r"generation_config\.json"):
        growkit.load(tmp_path / "out", source=other)


def test_a_manifest_that_was_changed_proves_nothing(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    growkit.run(recipe_of(tmp_path, source, WIDER))
    file = tmp_path / "out" / "growkit.json"
    content = json.loads(file.read_text())
    growkit.load(file)  # the control
    for change in ({"recipe": content["recipe"] | {"seed": 1}}, {"kept": True}, {"sha256": ""}):
        file.write_text(json.dumps(content | change))
        for opened in (growkit.load, GrownStorageReader):
            with pytest.raises(InputError, match="is not as growkit wrote it"):
                opened(file)
    assert not growkit.check(tmp_path / "out")["whole"]
    file.write_text(json.dumps(content | {"kept": False}))
    with pytest.raises(InputError, match="did not keep its promise"):
        growkit.load(file)


@pytest.mark.parametrize(
    ("rank", "size"), [({"LOCAL_RANK": "1"}, "2"), ({"RANK": "5"}, "2"), ({}, "0")], ids=str
)
def test_who_loads_alone_checks_every_file(
    rank: dict[str, str], size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes may have been started, but it is not known that they check anything."""
    source = save_model(tmp_path / "source", "llama", shard_size="8KB")
    growkit.run(recipe_of(tmp_path, source, WIDER))
    shared = "LOCAL_RANK" in rank
    for name, value in {**rank, ("LOCAL_" * shared) + "WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, value)
    manifest = tmp_path / "out" / "growkit.json"
    Grown(manifest)  # the control
    together = 0
    for file in sorted(source.glob("*.safetensors")):
        whole = file.read_bytes()
        flip_bit(file)
        with pytest.raises(InputError, match=f"{file.name} is not the file"):
            Grown(manifest)
        try:
            Grown(manifest, together=True)
        except InputError:
            together += 1
        file.write_bytes(whole)
    assert together in ((1, 2) if shared else (3,))


@pytest.mark.parametrize("form", ["safetensors", "dcp"])
def test_the_proof_alone_is_kept(form: str, tmp_path: Path) -> None:
    """What is deleted is named with its hash, and what is loaded is that."""
    source = save_model(tmp_path / "source", "llama")
    quick = growkit.Settings(prompts=1, length=8)
    recipe = replace(recipe_of(tmp_path, source, WIDER), shard_size="20KB", format=form)
    growkit.run(recipe)
    whole = json.loads((tmp_path / "out" / "growkit.json").read_text())["files"]
    shutil.move(tmp_path / "out", tmp_path / "whole")
    assert growkit.run(replace(recipe, verify=quick), proof_only=True)["kept"]
    out = tmp_path / "out"
    manifest = json.loads((out / "growkit.json").read_text())
    kept = {"README.md", "config.json", "generation_config.json"}
    assert {file.name for file in out.iterdir()} == kept | {"growkit.json"}
    assert manifest["not_kept"] == {n: whole[n] for n in whole.keys() - kept}
    assert growkit.check(out)["whole"]
    assert 'growkit.load("growkit.json", source="SRC")' in (out / "README.md").read_text()
    if form == "safetensors":
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
        assert not differing(growkit.load(out).state_dict(), expected)
    assert GrownStorageReader(out).grown.recipe.format == form
    with pytest.raises(InputError, match="a proof whose weights were not kept"):
        growkit.inspect(out)
    flip_bit(source / "model.safetensors")
    for opened in (growkit.load, GrownStorageReader):
        with pytest.raises(InputError, match="its proof does not cover it"):
            opened(out)


def test_what_depends_on_the_machine_is_refused(tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "diffllama", num_hidden_layers=4, head_dim=8)
    step = growkit.ConvertStep("shared-diff", {"rank": 2})
    with pytest.raises(InputError, match="singular vectors"):
        growkit.load(recipe_of(tmp_path, source, step))


@pytest.mark.parametrize("fault", ["tied tensors differ", "NaN"])
def test_weights_that_are_not_written_are_not_loaded(fault: str, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama", tie_word_embeddings=True)
    with edit_weights(source) as weights:
        if fault == "NaN":
            weights["model.layers.0.mlp.up_proj.weight"][3, 3] = torch.nan
        else:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    recipe = recipe_of(tmp_path, source, WIDER)
    for refused in (growkit.run, growkit.load):
        with pytest.raises(InputError, match=r"differs from the embedding|holds NaN"):
            refused(recipe)
