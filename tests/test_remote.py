"""Weights read by ranges: from a server that has them, drops connections, or cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from typer.testing import CliRunner

import growkit
from growkit.checkpoint import remote
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.remote import RemoteWeights
from growkit.checkpoint.writing import shards_of, write_shards
from growkit.cli import app
from growkit.distributed import GrownStorageReader
from growkit.errors import InputError
from growkit.planner import plan
from growkit.recipe.steps import GrowStep
from tests.conftest import save_model
from tests.loading import differing
from tests.serving import served

pytest.importorskip("aiohttp")


@dataclass
class Server:
    """What a server does, and was asked for.

    Attributes:
        drops: how many answers of files of weights break off in their middle, from now on.
        ranges: whether it has them.
        sizes: whether it says how large files are.
        shift: by how many bytes a range is off that does not begin a file.
        status: of the answer with a range; 200 claims that it is the whole file.
        asked: path and range of every request.
    """

    address: str = ""
    drops: int = 0
    ranges: bool = True
    sizes: bool = True
    shift: int = 0
    status: int = 206
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    save_model(tmp_path / "root" / "one", "llama", seed=1, dtype=torch.bfloat16)
    save_model(tmp_path / "root" / "many", "llama", seed=1, shard_size="8KB")
    return tmp_path / "root"


@pytest.fixture
def server(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server()
    monkeypatch.setattr(remote, "PAUSE", 0.0)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            file = root / self.path.lstrip("/")
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            if not file.is_file():
                self.send_error(404)
                return
            content = file.read_bytes()
            etag = f'"{hash(content)}"'
            if wanted and state.ranges:
                first, last = wanted.removeprefix("bytes=").split("-")
                off = state.shift * (int(first) > 0)
                first, last = str(int(first) - off), str(int(last) - off)
                content = content[int(first) : int(last) + 1]
                self.send_response(state.status)
                where = f"bytes {first}-{last}/{file.stat().st_size}"
                self.send_header("Content-Range", where)
            else:
                self.send_response(200)
            if state.ranges:
                self.send_header("Accept-Ranges", "bytes")
            if state.sizes:
                self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", etag)
            self.end_headers()
            if self.command == "GET":
                if state.drops and file.suffix == ".safetensors":
                    state.drops -= 1
                    content = content[: len(content) // 2]
                self.wfile.write(content)

    with served(Handler) as state.address:
        yield state


@pytest.mark.parametrize("model", ["one", "many"])
@pytest.mark.parametrize("drops", [0, 3])
def test_tensors_are_those_of_the_files(model: str, drops: int, server: Server, root: Path) -> None:
    """Whole, some rows, some columns, and after connections were dropped."""
    source = RemoteWeights(f"{server.address}/{model}")
    local = Checkpoint(root / model)
    assert source.config == local.config
    assert source.tensors == local.tensors
    server.drops = drops
    for name in list(local.tensors)[::5]:
        info = local.tensors[name]
        assert source.read(name).equal(local.read(name))
        rows = slice(1, max(info.shape[0] - 2, 1))
        assert source.read(name, rows).equal(local.read(name, rows))
        if len(info.shape) == 2:
            columns = slice(2, 5)
            assert source.read(name, rows, columns).equal(local.read(name, rows, columns))
    assert server.drops == 0


def test_what_grows_from_it_is_what_grows_from_the_folder(
    server: Server, root: Path, tmp_path: Path
) -> None:
    step = GrowStep("hypercloning", {"hidden": "x2"})
    recipe = growkit.Recipe(str(root / "many"), (step,), str(tmp_path / "expected"))
    growkit.run(recipe, verify=False)
    source = RemoteWeights(f"{server.address}/many")
    (tmp_path / "found").mkdir()
    server.drops = 3
    target = plan(recipe, source).lineage.target
    shards = shards_of(target.tensors, 10**9)
    write_shards(target, tmp_path / "found", shards, lambda count: None)
    name = "model.safetensors"
    assert (tmp_path / "found" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_loaded_from_it_is_what_is_loaded_from_the_folder(
    server: Server, root: Path, tmp_path: Path
) -> None:
    """Through dropped connections; and held against a proof of the folder, which another is not."""
    step = GrowStep("hypercloning", {"hidden": "x2"})
    quick = growkit.Settings(prompts=1, length=8)
    recipe = growkit.Recipe(str(root / "many"), (step,), str(tmp_path / "out"), quick)
    growkit.run(recipe, proof_only=True)
    expected = growkit.load(recipe).state_dict()
    server.drops = 3
    model = growkit.load(tmp_path / "out", source=f"{server.address}/many")
    assert server.drops == 0
    assert not differing(model.state_dict(), expected)
    assert model.generation_config.to_dict() == growkit.load(recipe).generation_config.to_dict()
    reader = GrownStorageReader(tmp_path / "out", source=f"{server.address}/many")
    state = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    dcp.load(state, storage_reader=reader)
    assert not differing(state, expected)
    with pytest.raises(InputError, match=r"one/config\.json is not the file that"):
        growkit.load(tmp_path / "out", source=f"{server.address}/one")
    content = bytearray((root / "many" / "model-00001-of-00003.safetensors").read_bytes())
    content[-1] ^= 1
    (root / "many" / "model-00001-of-00003.safetensors").write_bytes(content)
    with pytest.raises(InputError, match=r"many/model-00001-of-00003\.safetensors is not the file"):
        growkit.load(tmp_path / "out", source=f"{server.address}/many")


def test_only_what_is_asked_for_is_read(server: Server, root: Path) -> None:
    """A few rows of a large tensor are a few bytes."""
    source = RemoteWeights(f"{server.address}/one")
    server.asked.clear()
    source.read("model.embed_tokens.weight", slice(3, 5))
    (ranged,) = (wanted for _, wanted in server.asked if wanted)
    first, last = map(int, ranged.removeprefix("bytes=").split("-"))
    assert last + 1 - first == 2 * 16 * 2


def refused(server: Server, model: str = "one") -> str:
    with pytest.raises(InputError) as error:
        RemoteWeights(f"{server.address}/{model}").read("model.embed_tokens.weight")
    return str(error.value)


def test_what_cannot_be_read_is_told(server: Server, root: Path) -> None:
    assert "config.json does not exist" in refused(server, "none")
    server.drops = 10**6
    assert "asked 4 times" in refused(server)
    server.drops, server.ranges = 0, False
    assert "no range requests" in refused(server)
    server.ranges, server.sizes = True, False
    assert "has no size" in refused(server)
    server.sizes = True
    (root / "many" / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing" in refused(server, "many")
    file = root / "one" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    assert "is not a whole safetensors file" in refused(server)
    for address in (
        "nothing://here/at/all",
        "zip://here",  # a way to read what lies elsewhere, as the next two
        "reference://here",
        "dir://here",
        "ftp://127.0.0.1:1/model",
    ):
        with pytest.raises(InputError, match="is no address that can be read"):
            RemoteWeights(address)
    with pytest.raises(InputError, match=r"Cannot connect.*asked 4 times"):
        RemoteWeights("http://127.0.0.1:1/model")


@pytest.mark.parametrize(("shift", "status"), [(2, 206), (0, 200), (2, 200)])
def test_other_bytes_than_were_asked_for_are_no_weights(
    shift: int, status: int, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.shift, server.status = shift, status
    assert "where bytes=" in refused(server)
    monkeypatch.setattr(remote, "_checked_ranges", dict)  # the control: taken without a word
    RemoteWeights(f"{server.address}/one").read("model.embed_tokens.weight")


def test_an_address_of_a_file_has_three_slashes(root: Path) -> None:
    """Also where a path has lost two of them."""
    local = Checkpoint(root / "one")
    for address in (f"file://{root}/one", f"file:{root}/one"):
        source = RemoteWeights(address)
        assert source.tensors == local.tensors
        assert source.where() == f"file://{root}/one"


@pytest.mark.parametrize(
    "output", ["s3://bucket/model", "https:/host/model", "hf://org/model", "S3://b/m"]
)
def test_nothing_is_written_to_an_address(
    output: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    words = ["grow", str(root / "one"), output, "--hidden", "x2", "--no-verify"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "is an address, and models are written to folders" in done.stderr
    assert not list(Path().iterdir())
    Path(Path(output).parts[0]).mkdir()  # the control: it is a folder here
    assert CliRunner().invoke(app, words).exit_code == 0


def test_weights_that_change_meanwhile_are_refused(server: Server, root: Path) -> None:
    source = RemoteWeights(f"{server.address}/one")
    other = save_model(root / "other", "llama", seed=2, dtype=torch.bfloat16)
    shutil.copy(other / "model.safetensors", root / "one")
    with pytest.raises(InputError, match="has changed while it was read"):
        source.read("model.norm.weight")


def test_a_plan_needs_headers_alone(server: Server, root: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"source: {server.address}/one\nsteps:\n  - grow: hypercloning\n    ffn: x2\noutput: out\n"
    )
    done = CliRunner().invoke(app, ["plan", str(recipe), "--json"])
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["source"] == f"{server.address}/one"
    weights = load_file(root / "one" / "model.safetensors")
    assert found["source_parameters"] == sum(each.numel() for each in weights.values())


def test_commands_that_write_say_that_they_need_a_folder(server: Server, tmp_path: Path) -> None:
    words = ["grow", f"{server.address}/one", str(tmp_path / "out"), "--hidden", "x2"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "download the model, and give that folder" in done.stderr
    assert "growkit plan" in done.stderr
