"""Folders of torch.distributed.checkpoint: read by slices, and nothing in them is run.

torch writes them here and reads them for comparison.
"""

import itertools
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from transformers import AutoModelForCausalLM

import growkit
from growkit.base.errors import InputError
from growkit.model.checkpoint.reading import Checkpoint
from tests.commands import refusal
from tests.files import Called, folder_bytes
from tests.models import save_model, seeded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
UP = "model.layers.1.mlp.up_proj.weight"


class InParts(DefaultSavePlanner):
    """Every tensor in parts, cut at random in every dimension, as meshes leave them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._choose = seeded(seed)

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        parts = (self._parts(each) if each.tensor_data else [each] for each in plan.items)
        self.plan = replace(plan, items=[*itertools.chain(*parts)])
        return self.plan

    def _parts(self, item: WriteItem) -> Iterator[WriteItem]:
        whole = item.tensor_data
        cuts = [
            [0, *sorted(self._choose.randrange(size + 1) for _ in range(2)), size]
            for size in whole.size
        ]
        for box in itertools.product(*map(itertools.pairwise, cuts)):
            sizes = torch.Size(end - begin for begin, end in box)
            if all(sizes):
                chunk = ChunkStorageMetadata(torch.Size(begin for begin, _ in box), sizes)
                index = MetadataIndex(item.index.fqn, chunk.offsets)
                data = TensorWriteData(chunk, whole.properties, whole.size)
                yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, item: WriteItem) -> Any:
        if item.tensor_data is None:
            return super().resolve_data(item)
        chunk = item.tensor_data.chunk
        pairs = zip(chunk.offsets, chunk.sizes, strict=True)
        return self.lookup_object(MetadataIndex(item.index.fqn))[
            tuple(slice(begin, begin + size) for begin, size in pairs)
        ].detach()

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.state_dict[index.fqn]


def saved(source: Path, folder: Path, under: str = "", seed: int | None = None) -> Path:
    """The model of a folder, saved by torch."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    folder.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, folder)
    state: Any = model.state_dict()
    content = {under: state} if under else state
    if under:  # beside the model there is an optimizer, and what no tensor is
        moments = {f"state.{name}.exp_avg": tensor + 1 for name, tensor in state.items()}
        content |= {"optimizer": moments, "train_state": {"name": "x"}}
    planner = None if seed is None else InParts(seed)
    writer = FileSystemWriter(folder, thread_count=3, sync_files=False)
    dcp.save(content, storage_writer=writer, planner=planner)
    return folder


@pytest.mark.parametrize(
    ("under", "seed", "options"),
    [
        ("", None, {}),
        ("model", 1, {"tie_word_embeddings": True}),
        ("", 2, {"dtype": torch.bfloat16}),
    ],
)
def test_what_is_read_is_what_torch_reads(
    under: str, seed: int | None, options: Any, tmp_path: Path
) -> None:
    """Bit for bit, every slice; and so grows what grows from the model as transformers saves it."""
    source = save_model(tmp_path / "source", "llama", **options)
    folder = saved(source, tmp_path / "folder", under, seed)
    checkpoint, local = Checkpoint(folder), Checkpoint(source)
    assert not checkpoint.stands_alone
    read: Any = {name: torch.empty_like(local.read(name)) for name in local.tensors}
    dcp.load({under: read} if under else read, checkpoint_id=folder)
    choose = seeded(3)
    for name, whole in read.items():
        assert checkpoint.read(name).equal(whole), name
        where = [sorted(choose.randrange(size + 1) for _ in range(2)) for size in whole.shape]
        slices = [slice(*each) for each in where]
        assert checkpoint.read(name, *slices).equal(whole[tuple(slices)]), name
    growkit.grow(folder, tmp_path / "out", hidden="x2", verify=False)
    growkit.grow(source, tmp_path / "expected", hidden="x2", verify=False)
    name = "model.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()
    manifest = json.loads((tmp_path / "out" / "growkit.json").read_text())
    assert {".metadata", "config.json"} < manifest["source_files"].keys()


def flat(model: Any, moments: Any) -> Any:
    states = {f"state.{name}.exp_avg": tensor for name, tensor in moments.items()}
    others = {"rate": torch.tensor(0.1), "phases": torch.zeros(2, dtype=torch.complex64)}
    return {"model": model, "opt": states, "schedule": others}


def below_another(model: Any, moments: Any) -> Any:
    """As the tutorial of torch has it."""
    numbered = {n: {"exp_avg": tensor} for n, tensor in enumerate(moments.values())}
    return {"app": {"model": model, "optim": {"state": numbered}}, "rng": torch.get_rng_state()}


def averaged(model: Any, moments: Any) -> Any:
    """The control: nobody knows which of the two is meant."""
    return {"model": model, "ema": model}


@pytest.mark.parametrize("states", [flat, below_another, averaged])
def test_of_all_states_the_model_is_read(states: Any, tmp_path: Path) -> None:
    source = save_model(tmp_path / "source", "llama")
    model: Any = AutoModelForCausalLM.from_pretrained(source).state_dict()
    moments = {name: tensor + 1 for name, tensor in model.items()}
    dcp.save(states(model, moments), checkpoint_id=tmp_path / "folder")
    shutil.copy(source / "config.json", tmp_path / "folder")
    if states is averaged:
        with pytest.raises(InputError, match=r"several states \(model, ema\)"):
            Checkpoint(tmp_path / "folder")
        return
    checkpoint = Checkpoint(tmp_path / "folder")
    assert checkpoint.tensors.keys() == model.keys()
    assert all(checkpoint.read(name).equal(model[name]) for name in model)


@pytest.mark.usage
def test_what_grows_from_it_is_proved(tmp_path: Path) -> None:
    """In every way of use; and noticed is one bit of the source that is another one later."""
    source = save_model(tmp_path / "source", "llama")
    folder = saved(source, tmp_path / "folder")
    quick = growkit.Settings(prompts=2, length=12)
    assert growkit.grow(folder, tmp_path / "out", hidden="x2", verify=quick)["kept"]
    state = Checkpoint(folder).read("model.norm.weight")
    number = state[-1:].view(torch.uint8).numpy().tobytes()
    (file,) = (each for each in folder.glob("*.distcp") if number in each.read_bytes())
    content = file.read_bytes()
    file.write_bytes(content.replace(number, bytes([number[0] ^ 1]) + number[1:]))
    found = growkit.verify(folder, tmp_path / "out", quick)
    assert not found["kept"]
    assert found.sections.weights.first_lost_tensor == "model.norm.weight"


def listed(folder: Path) -> Metadata:
    found: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return found


def write_list(folder: Path, change: Callable[[Metadata], Any]) -> None:
    found = listed(folder)
    given = change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found if given is None else given))


def shortened(folder: Path, name: str, length: int) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:length])


def of_another(folder: Path) -> None:
    other = save_model(folder.parent / "other", "llama", hidden_size=32)
    saved(other, folder.parent / "others")
    shutil.copy(folder.parent / "others" / "__0_0.distcp", folder)


def overlap(found: Metadata) -> None:
    """Two parts of the right size in all, of which one lies on the other."""
    entry = found.state_dict_metadata[UP]
    rows, columns = entry.size
    half = torch.Size([rows // 2, columns])
    place = found.storage_data.pop(MetadataIndex(UP, [0, 0]))
    entry.chunks = [ChunkStorageMetadata(torch.Size([at, 0]), half) for at in (0, rows // 2 - 1)]
    for chunk in entry.chunks:
        found.storage_data[MetadataIndex(UP, chunk.offsets)] = place


def changed(**fields: Any) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        for name, value in fields.items():
            setattr(found.state_dict_metadata[UP], name, value)

    return change


def moved(**fields: Any) -> Callable[[Metadata], None]:
    def change(found: Metadata) -> None:
        index = MetadataIndex(UP, [0, 0])
        found.storage_data[index] = replace(found.storage_data[index], **fields)

    return change


def torchtitans(found: Metadata) -> None:
    """A name of its own, with the tensor that it is of."""
    name, other = "model.embed_tokens.weight", "tok_embeddings.weight"
    found.state_dict_metadata[other] = found.state_dict_metadata.pop(name)
    place = found.storage_data.pop(MetadataIndex(name, [0, 0]))
    found.storage_data[MetadataIndex(other, [0, 0])] = place


def two_states(found: Metadata) -> None:
    found.planner_data = {**found.planner_data, UP: ("ema", UP)}


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: (folder / "__0_0.distcp").unlink(), "__0_0.distcp does not exist"),
    "truncated": (lambda f: shortened(f, "__0_0.distcp", -8), "__0_0.distcp has been cut off"),
    "of another model": (of_another, "__0_0.distcp"),
    "no list": (lambda folder: (folder / ".metadata").unlink(), "but has no .metadata"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json does not exist; "),
    "half a list": (lambda f: shortened(f, ".metadata", 300), ".metadata cannot be read"),
}

LISTS: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "code": (lambda _: Called(open, "touched", "w"), "such a list does not need"),
    "no such list": (lambda _: {"a": 1}, "Metadata was expected"),
    "overlap": (overlap, "its parts overlap or leave gaps"),
    "beyond": (changed(size=torch.Size([1, 1])), "its parts reach beyond it"),
    "outside": (moved(relative_path="../source/config.json"), "leads out of the folder"),
    "dtype": (
        changed(properties=TensorProperties(torch.float16)),
        "they belong to two checkpoints",
    ),
    "compressed": (moved(transform_descriptors=["zstd"]), "compressed"),
    "torchtitan's": (torchtitans, "embed_tokens.weight"),
    "two states": (two_states, "tensors of several states"),
}
BAD |= {name: (partial(write_list, change=each), said) for name, (each, said) in LISTS.items()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    return saved(save_model(folder / "source", "llama"), folder / "folder")


@pytest.mark.parametrize("fault", BAD)
def test_bad_folders(fault: str, whole: Path, tmp_path: Path) -> None:
    """One sentence, and nothing written; the control is every other test here."""
    shutil.copytree(whole.parent, tmp_path / "place")
    folder = tmp_path / "place" / "folder"
    spoil, said = BAD[fault]
    spoil(folder)
    before = folder_bytes(tmp_path)
    assert said in refusal("grow", folder, tmp_path / "out", "--hidden", "x2", "--no-verify")
    assert folder_bytes(tmp_path) == before
    assert not Path("touched").exists()


def nested(depth: int) -> bytes:
    """Opcodes that leave a list on the stack, and in the memo tuples of 2, 4, 8, ... empty ones."""
    pairs = b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(depth))
    return b"\x80\x04](" + b")\x94" + pairs + b"e"


DEPTH = 24  # a hash of this takes a moment, and one of a few more for ever
BOMBS = {
    "key": nested(DEPTH) + b"}h%cNs." % DEPTH,
    "ordered": nested(DEPTH) + b"ccollections\nOrderedDict\n)Rh%cNs." % DEPTH,
    "dictionary": nested(DEPTH) + b"(h%cNd." % DEPTH,
    "set": nested(DEPTH) + b"\x8f(h%c\x90." % DEPTH,
    "claimed size": b"\x80\x05\x96" + (1 << 20).to_bytes(8, "little") + b".",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_no_list_takes_for_ever(bomb: str, whole: Path, tmp_path: Path) -> None:
    """Nothing is hashed that was nested, and no room is made for what is not there."""
    folder = shutil.copytree(whole, tmp_path / "folder")
    (folder / ".metadata").write_bytes(BOMBS[bomb])
    said = r"need opcode \d+|has no name|takes 1 positional argument"
    with pytest.raises(InputError, match=said):
        Checkpoint(folder)


def test_what_is_written_is_loaded_by_torch(tmp_path: Path) -> None:
    """Into the model of transformers, with a head that is tied as well; and it is proved."""
    tied: dict[str, Any] = {"tie_word_embeddings": True, "dtype": torch.bfloat16}
    source = save_model(tmp_path / "source", "llama", **tied)
    quick = growkit.Settings(prompts=2, length=12)
    step = growkit.GrowStep("hypercloning", hidden="x2")
    recipe = growkit.Recipe(
        str(source), (step,), str(tmp_path / "out"), quick, shard_size="8KB", format="dcp"
    )
    assert growkit.run(recipe)["kept"]
    growkit.run(replace(recipe, output=str(tmp_path / "plain"), format="safetensors"), verify=False)
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    model = AutoModelForCausalLM.from_config(expected.config, dtype=expected.dtype)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "out")
    for name, tensor in expected.state_dict().items():
        assert state[name].equal(tensor), name
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 3
    assert growkit.check(tmp_path / "out")["whole"]
    manifest = json.loads((tmp_path / "out" / "growkit.json").read_text())
    assert manifest["recipe"]["format"] == "dcp"
    assert 'dcp.load(state, checkpoint_id=".")' in (tmp_path / "out" / "README.md").read_text()
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.tensors == Checkpoint(tmp_path / "plain").tensors
    place = checkpoint.read(UP)[0, 0].view(1).view(torch.uint8).numpy().tobytes()
    for file in (tmp_path / "out").glob("*.distcp"):  # the control
        content = file.read_bytes()
        file.write_bytes(content.replace(place, bytes([place[0] ^ 1]) + place[1:]))
    assert not growkit.verify(source, tmp_path / "out", quick)["kept"]
