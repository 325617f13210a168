"""Code in every place of a folder from which some library could run it: no command runs any."""

import io
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import growkit
from tests.commands import cli
from tests.files import Called, edit_config, listed, with_tokenizer
from tests.models import save_model

MODULES = (
    *("modeling_canary", "configuration_canary", "tokenization_canary", "processing_canary"),
    *("sitecustomize", "usercustomize", "conftest", "setup", "torch", "yaml", "hubconf", "handler"),
    *("transformers", "safetensors", "growkit", "canary"),
)


def canary(song: Path) -> Called:
    """It sings when it is unpickled."""
    return Called(os.system, f"touch {song}.unpickled")


def plant(folder: Path, song: Path) -> None:
    """Code that writes a file beside ``song``, in every place that is known."""

    def sing(name: str) -> str:
        return f"open({f'{song}.{name}'!r}, 'w').close()\n"

    for name in MODULES:
        classes = "Model", "Config", "Tokenizer", "Processor", "LlamaForCausalLM"
        text = sing(name) + "".join(f"class {each}: pass\n" for each in classes)
        (folder / f"{name}.py").write_text(text)
    (folder / "canary.pth").write_text(f"import os; {sing('pth')}")
    (folder / "custom_generate").mkdir()
    generate = sing("generate") + "def generate(*a, **k): pass\n"
    (folder / "custom_generate" / "generate.py").write_text(generate)
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "adapter_model.bin"):
        torch.save(canary(song), folder / name)
    (folder / "rng_state.pth").write_bytes(pickle.dumps(canary(song)))
    (folder / "canary.yaml").write_text(f"!!python/object/apply:os.system ['touch {song}.yaml']\n")


AUTO_MAP: dict[str, Any] = listed("canaries", "auto_map")


Place = Callable[[Path, Path], Any]


def auto_map_everywhere(folder: Path, song: Path) -> None:
    for name in ("config", "tokenizer_config", "generation_config", "processor_config"):
        edit_config(folder, f"{name}.json", auto_map=AUTO_MAP)
    edit_config(folder, "preprocessor_config.json", auto_map=AUTO_MAP)


def templates(folder: Path, song: Path) -> None:
    song_of = f"__import__('os').system('touch {song}.template')"
    escape = "{{ cycler.__init__.__globals__.os.system('touch " + f"{song}.template')" + " }}"
    endless = "{% for i in range(10**12) %}x{% endfor %}{{ " + song_of + " }}"
    (folder / "chat_template.jinja").write_text(escape + endless)
    edit_config(folder, "tokenizer_config.json", chat_template=escape)


def pickled(dump: Callable[[Any], bytes]) -> Place:
    """Weights that sing, instead of those that are there."""

    def place(folder: Path, song: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(dump({"model.norm.weight": canary(song)}))

    return place


def torch_dumps(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def setting(file: str = "config.json", **values: Any) -> Place:
    return lambda folder, song: edit_config(folder, file, **values)


BELOW = {"model_type": "llama", "_attn_implementation": "canary/kernel"}
PLACES: dict[str, Place] = {
    "nothing names it": lambda folder, song: None,
    "auto_map": setting(auto_map=AUTO_MAP),
    "auto_map everywhere": auto_map_everywhere,
    "unknown type": setting(auto_map=AUTO_MAP, model_type="canary"),
    "tokenizer": setting("tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Tokenizer"),
    "templates": templates,
    "kernels": setting(attn_implementation="canary/kernel"),
    "kernels below": setting(text_config=BELOW, use_kernels=True),
    "generation": setting(
        "generation_config.json", custom_generate="custom_generate", max_new_tokens=3
    ),
    "pickle": pickled(torch_dumps),
    "legacy pickle": pickled(pickle.dumps),
    "adapter": setting(
        "adapter_config.json", peft_type="LORA", auto_mapping={"base_model_class": "canary.Model"}
    ),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "llama"
    return with_tokenizer(save_model(folder, "llama", vocab_size=1024))


@pytest.fixture
def source(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(model, tmp_path / "source")
    plant(folder, tmp_path / "song")
    monkeypatch.chdir(folder)
    return folder


def songs(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("song*"))


COMMANDS: dict[str, str] = listed("canaries", "commands")
SOME = ("inspect", "convert", "verify", "verify-other", "run")
"""Commands that meet a few of the places; growth meets all."""


def run(line: str, source: Path, tmp_path: Path) -> int:
    text = tmp_path / "text.txt"
    text.write_text("def f(x): return x\n" * 20)
    words = line.replace("QUICK", f"--prompts 1 --length 12 --text {text}")
    for name in ("SOURCE", "CLEAN", "OUT"):
        words = words.replace(name, str(tmp_path / name.lower()))
    result = cli(*words.split())
    assert result.exit_code in (0, 1, 2), (line, result.output)
    return result.exit_code


WHOLE = [pytest.param(each, "grow", marks=pytest.mark.usage) for each in ("generation", "adapter")]


@pytest.mark.sampled(4, "generation-grow")
@pytest.mark.parametrize(
    ("place", "command"),
    [(place, "grow") for place in PLACES if place not in ("generation", "adapter")]
    + [("auto_map everywhere", name) for name in SOME]
    + WHOLE,
)
def test_no_command_runs_it(place: str, command: str, source: Path, tmp_path: Path) -> None:
    """Nor do whole models, which are saved, loaded and generate."""
    if "CLEAN" in COMMANDS[command]:
        shutil.copytree(source, tmp_path / "clean")
    PLACES[place](source, tmp_path / "song")
    code = run(COMMANDS[command], source, tmp_path)
    assert code == 0 or place != "generation"
    assert songs(tmp_path) == []
    assert "canary" not in sys.modules


def test_a_process_that_starts_in_the_folder(source: Path, tmp_path: Path) -> None:
    """The command itself, where names of modules in the folder could come first."""
    auto_map_everywhere(source, tmp_path / "song")
    command = Path(sys.executable).with_name("growkit")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    asked = [str(command), "inspect", "."]
    subprocess.run(asked, cwd=source, env=environment, check=True, capture_output=True)
    assert songs(tmp_path) == []


@pytest.mark.parametrize("place", ["auto_map", "templates"])
def test_the_canaries_sing(place: str, source: Path, tmp_path: Path) -> None:
    """The control: whoever trusts the folder runs what lies there."""
    PLACES[place](source, tmp_path / "song")
    if place == "auto_map":
        with pytest.raises(AttributeError):  # it is no config
            AutoConfig.from_pretrained(source, trust_remote_code=True)
    else:
        pickle.loads((source / "rng_state.pth").read_bytes())
    assert songs(tmp_path) != []


def test_the_code_of_a_source_is_named(source: Path, tmp_path: Path) -> None:
    PLACES["auto_map"](source, tmp_path / "song")
    settings = growkit.Settings(prompts=1, length=12)
    result = growkit.grow(source, tmp_path / "out", hidden="x2", verify=settings)
    assert result["kept"]
    first = result["verification"]["reason"]
    assert "modeling_canary.py" in first
    assert "the proof is about LlamaForCausalLM of transformers" in first
