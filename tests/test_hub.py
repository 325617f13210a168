"""Sources on the Hub, against a stand-in for it: right weights at a commit, or one sentence."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

import growkit
from growkit.base.errors import InputError
from growkit.extras.hub.addresses import address_of
from growkit.sources import find
from tests.commands import cli
from tests.files import folder_bytes, listed
from tests.hub import StandIn, stand_in
from tests.models import save_model

QUICK = growkit.Settings(prompts=1, length=8)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_model(folder / "one", "llama", seed=1)
    save_model(folder / "two", "llama", seed=2, shard_size="8KB")
    (folder / "two" / "LICENSE").write_text("free")
    for unread in ("model.gguf", "pytorch_model.bin", "onnx/model.json", "tf_model.h5"):
        (folder / "two" / unread).parent.mkdir(exist_ok=True)
        (folder / "two" / unread).write_text("never fetched")
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    with stand_in(monkeypatch, tmp_path / "cache") as hub:
        yield hub


def refused(source: str) -> str:
    with pytest.raises(InputError) as error:
        find(source)
    return str(error.value)


@pytest.mark.parametrize(("source", "address"), listed("hub", "what is an address"))
def test_what_is_an_address(
    source: str, address: list[str | None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here").mkdir()
    assert address_of(source) == (tuple(address) if address else None)
    for wrong in ("hf://", "hf://a b", "hf://a/b/c", "hf://o/n@../x", "hf://o/n@"):
        assert f"{wrong} is not an address of a model on the Hub" in refused(wrong)


def test_a_model_is_grown_from_its_commit(hub: StandIn, models: Path, tmp_path: Path) -> None:
    """The manifest names the commit, and as a recipe it makes the same again once the Hub moved."""
    old = f"hf://org/small@{hub.add('org/small', models / 'two')}"
    result = growkit.grow("org/small", tmp_path / "out", hidden="x2", verify=QUICK)
    assert (result["source"], result["warnings"]) == (old, [])
    read = {name.rpartition("/")[2] for name in hub.asked if "/resolve/" in name}
    assert read == {file.name for file in (models / "two").glob("*.safetensors")} | {
        *("config.json", "generation_config.json", "model.safetensors.index.json", "LICENSE")
    }
    assert (tmp_path / "out" / "LICENSE").read_text() == "free"
    manifest = json.loads((tmp_path / "out" / "growkit.json").read_text())
    assert (manifest["recipe"]["source"], manifest["recipe"]["base_model"]) == (old, "org/small")
    assert manifest["verification"]["source"] == old
    assert str(tmp_path) not in json.dumps(manifest)

    hub.add("org/small", models / "one")
    growkit.grow("hf://org/small", tmp_path / "moved", hidden="x2", verify=False)
    recipe = growkit.load_recipe(tmp_path / "out" / "growkit.json", output=str(tmp_path / "again"))
    growkit.run(recipe, verify=False)
    growkit.grow(models / "two", tmp_path / "local", hidden="x2", verify=False)
    first, again, local, moved = (
        (tmp_path / name / "model.safetensors").read_bytes()
        for name in ("out", "again", "local", "moved")
    )
    assert first == again == local != moved


def test_commands_take_names(hub: StandIn, models: Path, tmp_path: Path) -> None:
    commit = hub.add("org/small", models / "one")
    before = folder_bytes(models / "one")

    def ask(*words: str) -> str:
        done = cli(*words)
        assert done.exit_code == 0, done.stderr
        return done.stdout

    out = str(tmp_path / "out")
    assert json.loads(ask("inspect", "hf://org/small", "--json"))["folder"].endswith(commit)
    ask("grow", "hf://org/small@main", out, "--hidden", "x2", "--no-verify")
    proof = ask("verify", "org/small", out, "--prompts", "1", "--length", "8", "--json")
    assert json.loads(proof)["kept"]
    assert json.loads(proof)["source"] == f"hf://org/small@{commit}"
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"source: hf://org/small\nsteps:\n  - grow: hypercloning\n    ffn: x2\noutput: {out}2\n"
    )
    ask("run", str(recipe), "--dry-run")
    assert folder_bytes(models / "one") == before


def test_only_the_cache(
    hub: StandIn, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With HF_HUB_OFFLINE, with a Hub that is down, and without any: what is there is taken."""
    commit = hub.add("org/small", models / "two")
    fetched = find("org/small")
    assert folder_bytes(fetched.folder)["config.json"]
    hub.broken = True
    for source in ("org/small", f"hf://org/small@{commit}", "hf://org/small@main"):
        found = find(source)
        assert (found.folder, found.name) == (fetched.folder, fetched.name)
        assert "was read from the cache" in found.warning
        assert "500" in found.warning
    hub.broken = False
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = find("org/small")
    assert found.folder == fetched.folder
    assert "HF_HUB_OFFLINE" in found.warning
    told = refused("org/other")
    assert "HF_HUB_OFFLINE" in told
    assert "hf download org/other --local-dir other" in told
    assert hub.asked == []
    result = growkit.grow("org/small", tmp_path / "out", hidden="x2", verify=False)
    assert result["warnings"] == [found.warning]

    (fetched.folder / "model-00002-of-00003.safetensors").unlink()
    told = refused("org/small")
    assert "is incomplete in the cache" in told
    assert "model-00002-of-00003.safetensors" in told


def test_what_cannot_be_had(hub: StandIn, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("org/small", models / "one")
    hub.add("org/secret", models / "one")
    hub.gated.add("org/secret")
    assert "has no revision 'nope' on the Hub" in refused("hf://org/small@nope")
    assert "has no revision" in refused("hf://org/small@" + 40 * "0")
    assert "the Hub has no model org/none for you" in refused("org/none")
    assert "org/secret is gated on the Hub; accept its terms" in refused("org/secret")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")  # nobody listens there
    told = refused("org/other")
    assert "ConnectError" in told
    assert "hf download org/other" in told


def test_what_transformers_would_add_is_refused_unfetched(
    hub: StandIn, models: Path, tmp_path: Path
) -> None:
    shutil.copytree(models / "one", tmp_path / "tuned")
    (tmp_path / "tuned" / "adapter_config.json").write_text("{}")
    hub.add("org/tuned", tmp_path / "tuned")
    assert "adapter_config.json" in refused("org/tuned")
    assert not any("/resolve/" in asked for asked in hub.asked)
