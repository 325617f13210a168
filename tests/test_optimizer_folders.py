"""Parts and lists that do not fit each other, and pickles that would change what they name."""

from __future__ import annotations

import importlib
import io
import pickle
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

import growkit
from growkit.base.errors import InputError
from growkit.checkpoint.distributed_file import MADE_OF
from growkit.checkpoint.reading import Checkpoint
from growkit.optimizer.optimizer import open_state
from growkit.optimizer.parameters import parameters_of
from tests.conftest import save_model
from tests.optimizer_state import (
    grown,
    save_distributed,
    save_torch,
    trained,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
NAME = "model.embed_tokens.weight"
ENTRY = f"optimizer.state.{NAME}.exp_avg"
HERE = "growkit_was_here"
"""An attribute that nothing has."""

Made = tuple[Path, Any, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model, and its optimizer after a step."""
    source = save_model(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=1)
    return source, *trained(source, 1)


def moment(made: Made) -> torch.Tensor:
    """That of the entry, as it was saved."""
    _, model, optimizer = made
    found: torch.Tensor = optimizer.state[model.get_input_embeddings().weight]["exp_avg"]
    return found


Pieces = dict[tuple[int, ...], tuple[tuple[int, ...], torch.Tensor]]
"""Sizes as they are listed and what is stored, by the offsets of every part."""


def in_parts(folder: Path, pieces: Pieces) -> None:
    """Give the entry these parts."""
    listed: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = listed.storage_data
    info = type(next(iter(stored.values())))
    for index in [each for each in stored if each.fqn == ENTRY]:
        del stored[index]
    chunks, content = [], b""
    for offsets, (sizes, tensor) in pieces.items():
        buffer = io.BytesIO()
        torch.save(tensor.clone(), buffer)
        place = info("parts.distcp", len(content), len(buffer.getvalue()))
        stored[MetadataIndex(ENTRY, torch.Size(offsets))] = place
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        content += buffer.getvalue()
    listed.state_dict_metadata[ENTRY].chunks = chunks
    (folder / "parts.distcp").write_bytes(content)
    (folder / ".metadata").write_bytes(pickle.dumps(listed))


def quarters(whole: torch.Tensor) -> Pieces:
    rows, columns = (size // 3 for size in whole.shape)
    cuts = [
        (slice(a, b), slice(c, d))
        for a, b in ((0, rows), (rows, whole.shape[0]))
        for c, d in ((0, columns), (columns, whole.shape[1]))
    ]
    return {
        (r.start, c.start): ((r.stop - r.start, c.stop - c.start), whole[r, c]) for r, c in cuts
    }


def overlapping(whole: torch.Tensor) -> Pieces:
    """As many numbers as there should be, but the last row is nowhere."""
    rows, columns = whole.shape
    return {(0, 0): ((rows - 1, columns), whole[1:]), (1, 0): ((1, columns), whole[:1])}


def reaching_beyond(whole: torch.Tensor) -> Pieces:
    rows, columns = whole.shape
    return {(0, 0): ((1, columns), whole[:1]), (2, 0): ((rows - 1, columns), whole[1:])}


def one(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], Pieces]:
    return lambda whole: {(0, 0): (tuple(whole.shape), change(whole))}


UNFIT: dict[str, tuple[Callable[[torch.Tensor], Pieces], str]] = {
    "parts overlap": (overlapping, "do not make it up"),
    "a part reaches beyond": (reaching_beyond, "reach beyond"),
    "another dtype": (one(lambda w: w.half()), r"holds F16 \[29, 16\] where .* F64 \[29, 16\]"),
    "complex": (one(lambda w: w + 0j), "complex"),
    "a larger one": (one(lambda w: w.repeat(2, 1)), r"holds F64 \[58, 16\]"),
    "the other way": (one(lambda w: w.t().contiguous()), r"holds F64 \[16, 29\]"),
}


@pytest.mark.parametrize("fault", UNFIT)
def test_parts_that_do_not_make_up_what_is_listed(fault: str, made: Made, tmp_path: Path) -> None:
    folder = save_distributed(*made[1:], tmp_path / "state")
    parts, said = UNFIT[fault]
    in_parts(folder, parts(moment(made)))
    with pytest.raises(InputError, match=said):
        grown(made[0], folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parts_of_a_mesh(made: Made, tmp_path: Path) -> None:
    """What grows from them is what grows from a whole tensor."""
    found = []
    for parted in (False, True):
        folder = save_distributed(*made[1:], tmp_path / f"state-{parted}")
        if parted:
            in_parts(folder, quarters(moment(made)))
        grown(made[0], folder, tmp_path / f"out-{parted}")
        state = {ENTRY: torch.zeros(29, 32, dtype=torch.float64)}
        dcp.load(state, checkpoint_id=tmp_path / f"out-{parted}" / "optimizer", no_dist=True)
        found.append(state[ENTRY])
    assert found[0].any()
    assert found[0].equal(found[1])


def poisoned(module: str, name: str) -> bytes:
    """What sets an attribute of a class, or of whatever else has this name, and forgets it."""
    key = b"X" + len(HERE).to_bytes(4, "little") + HERE.encode()
    return f"c{module}\n{name}\n".encode() + b"(N}" + key + b"K\x01stb0"


def before(pickled: bytes, poison: bytes) -> bytes:
    """Another pickle with this at its begin."""
    assert pickled[:1] == b"\x80"
    return pickled[:2] + poison + pickled[2:]


@pytest.fixture
def untouched() -> Iterator[list[Any]]:
    """Things of this process that are to have no new attribute."""
    things: list[Any] = []
    yield things
    touched = [each for each in things if hasattr(each, HERE)]
    for each in touched:
        delattr(each, HERE)
    assert touched == []


ROOMS = sorted((module, name) for module, names in MADE_OF.items() for name in names)


def test_lists_change_nothing(made: Made, untouched: list[Any], tmp_path: Path) -> None:
    """Whatever they may name; without that they are read."""
    folder = save_distributed(*made[1:], tmp_path / "state")
    file = folder / ".metadata"
    parameters = parameters_of(Checkpoint(made[0]))
    whole = pickle.dumps(pickle.loads(file.read_bytes()), protocol=2)
    for module, name in ROOMS:
        try:
            untouched.append(getattr(importlib.import_module(module), name))
        except (ImportError, AttributeError):  # of another version of Python
            continue
        file.write_bytes(before(whole, poisoned(module, name)))
        with pytest.raises(InputError, match="metadata cannot be read"):
            open_state(folder, parameters)
    file.write_bytes(whole)
    assert grown(made[0], folder, tmp_path / "out").optimizer


GLOBALS = [
    ("collections", "OrderedDict"),
    ("torch", "FloatStorage"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.nn.parameter", "Parameter"),
]


def spoiled(file: Path, poison: bytes) -> None:
    """Put this before what torch has saved."""
    with zipfile.ZipFile(file) as archive:
        records = {each.filename: archive.read(each) for each in archive.infolist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in records.items():
            pickled = name.endswith("data.pkl")
            archive.writestr(name, before(content, poison) if pickled else content)


@pytest.mark.parametrize("kind", ["optimizer", "weights"])
def test_what_torch_saves_changes_nothing(
    kind: str, made: Made, untouched: list[Any], tmp_path: Path
) -> None:
    source, model, optimizer = made
    if kind == "optimizer":
        file = state = save_torch(model, optimizer, tmp_path / "state")
    else:
        source, state = tmp_path / "source", None
        source.mkdir()
        shutil.copy(made[0] / "config.json", source)
        file = source / "pytorch_model.bin"
        torch.save(model.state_dict(), file)
    whole = file.read_bytes()
    for module, name in GLOBALS:
        untouched.append(getattr(importlib.import_module(module), name))
        file.write_bytes(whole)
        spoiled(file, poisoned(module, name))
        with pytest.raises(InputError, match="cannot be"):
            growkit.grow(source, tmp_path / "out", optimizer=state, verify=False, hidden="x2")
    file.write_bytes(whole)
    spoiled(file, b"")
    assert growkit.grow(source, tmp_path / "out", optimizer=state, verify=False, hidden="x2")
