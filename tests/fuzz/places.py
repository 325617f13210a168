"""Inputs, and the folders that they are put into: tiny models of every layout.

A place is a folder that a command runs in. Its sound files are kept in memory, so that one file can
be made odd, and sound again, thousands of times in a second.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, PreTrainedTokenizerFast

import growkit
from growkit.base.settings import Settings
from tests.converted import FILES
from tests.families import FAMILIES
from tests.fuzz.odd import SEEDS
from tests.models import save_random

SECRET = b"what lies outside of a model folder is none of its business\n" * 8
TEXT = b"one two three four five six seven eight nine ten <|endoftext|> two two three ten one\n"
RECIPE = (
    b"source: source\noutput: out\nsteps:\n  - grow: hypercloning\n    hidden: x2\nverify: false\n"
)
ENDS = {"bos_token_id": None, "eos_token_id": None}
MODELS: dict[str, tuple[str, dict[str, Any]]] = SEEDS["models"]
SIZES = MODELS["llama"][1]
OTHERS = {
    kind: each.any(Random(kind)) | ENDS | {"vocab_size": 16}
    for kind, each in FAMILIES.items()
    if kind not in MODELS
}
"""Random configs of all other families, by the ``model_type``."""
STORED = {"motif": ("diffllama", "motif"), "microsoft": ("diffllama", "microsoft")}
STORED |= {"microsoft-v2": ("v2", "microsoft-v2")}
KINDS = [*MODELS, *STORED, *OTHERS]
"""Places that hold one kind of model each."""

QUICK = Settings(prompts=1, length=8)

State = dict[str, tuple[int, ...]]
CORPUS = Path(__file__).with_name("corpus")


@dataclass
class Place:
    """A folder to run commands in, and its sound files.

    Attributes:
        folder: where it is; commands run inside it.
        files: the sound contents of every file, and the times it was changed, by its path.
    """

    folder: Path
    files: dict[str, tuple[bytes, int]] = field(default_factory=dict)

    def learn(self) -> None:
        """Take what is there now for sound."""
        for file in sorted(self.folder.rglob("*")):
            if file.is_file():
                name = file.relative_to(self.folder).as_posix()
                self.files[name] = (file.read_bytes(), file.stat().st_mtime_ns)

    def content(self, name: str) -> bytes:
        """The sound contents of a file."""
        return self.files[name][0]

    def put(self, name: str, content: Any) -> None:
        """Make one thing odd.

        Args:
            name: path in the place.
            content: the bytes of a file; or ``{"link": target}``, ``{"pipe": true}``,
                ``{"folder": true}`` or ``{"none": true}``.
        """
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            if path.is_symlink() or not path.is_file():
                remove(path)
            path.write_bytes(content)
            return
        remove(path)
        if "link" in content:
            path.symlink_to(content["link"])
        elif "pipe" in content:
            os.mkfifo(path)
        elif "folder" in content:
            path.mkdir()

    def restore(self) -> None:
        """Make everything sound again."""
        for path in self.folder.iterdir():
            remove(path)
        for name, (content, changed) in self.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
            os.utime(path, ns=(changed, changed))


@dataclass(frozen=True)
class Case:
    """One input.

    Attributes:
        place: name of the place that it is put into.
        arguments: the command line; paths are relative to the place.
        files: what is odd, by path in the place; see ``Place.put``.
    """

    place: str
    arguments: tuple[str, ...]
    files: dict[str, Any] = field(default_factory=dict)

    def put(self, place: Place) -> None:
        """Put the odd things where they belong."""
        for name, content in self.files.items():
            place.put(name, content)

    def as_json(self) -> dict[str, Any]:
        """The input as it stands in the corpus."""
        return {
            "place": self.place,
            "arguments": list(self.arguments),
            "files": {name: _written(content) for name, content in self.files.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Case:
        """See ``as_json``."""
        files = {name: _read(content) for name, content in content["files"].items()}
        return cls(content["place"], tuple(content["arguments"]), files)


def corpus() -> dict[str, Case]:
    """Every input that ever broke something, by the name of its file."""
    return {
        file.stem: Case.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(CORPUS.glob("*.json"))
    }


def _written(content: Any) -> dict[str, Any]:
    if not isinstance(content, bytes):
        return dict(content)
    if len(content) < 4096:
        try:
            return {"text": content.decode("utf-8")}
        except UnicodeDecodeError:
            pass
    return {"zlib": base64.b64encode(zlib.compress(content, 9)).decode()}


def _read(content: dict[str, Any]) -> Any:
    if "text" in content:
        return content["text"].encode("utf-8")
    if "zlib" in content:
        return zlib.decompress(base64.b64decode(content["zlib"]))
    return content


def remove(path: Path) -> None:
    """Remove whatever has this name, and never what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def state(folder: Path | str) -> State:
    """What stands in a folder and below it: kind, inode, size and times of everything."""
    found: State = {}
    folders = [str(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                seen = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(seen.st_mode):  # its times change with what is inside
                    found[entry.path] = (seen.st_mode, seen.st_ino)
                    folders.append(entry.path)
                else:
                    times = (seen.st_mtime_ns, seen.st_ctime_ns)
                    found[entry.path] = (seen.st_mode, seen.st_ino, seen.st_size, *times)
    return found


OF_PROGRAMS = ("llama.gguf", "llama.parts", "llama.q4_k_m", "llama.torchtune", "mixtral.litgpt")
OF_PROGRAMS += ("mixtral.mlx", "mixtral.mlx_blocks", "qwen3_moe.torchtitan")
WRITTEN = {"meta": "llama", "torchtitan": "llama", "megatron": "mixtral"}
"""Formats that growkit writes, each with the model that is written."""
LOGITS = "logits"
READERS = (*OF_PROGRAMS, *WRITTEN, LOGITS)
"""Places with files of other programs."""


def build(root: Path) -> dict[str, Place]:
    """Make all places in an empty folder."""
    here = Path.cwd()
    places = {}
    try:
        others = {kind: (kind, config) for kind, config in OTHERS.items()}
        for name, (kind, sizes) in (MODELS | others).items():
            places[name] = _begin(root / name)
            _model(root / name / "source", kind, sizes)
        written = {name: (origin, name) for name, origin in WRITTEN.items()}
        for name, (origin, layout) in (STORED | written).items():
            places[name] = _begin(root / name)
            source = root / name / "source"
            growkit.convert(root / origin / "source", source, to=layout, verify=False)
            for file in ("growkit.json", "README.md"):
                (source / file).unlink()
            for archive in source.glob("*.pth"):  # with checksums
                torch.save(torch.load(archive), archive)
        places["sharded"] = _begin(root / "sharded")
        _model(root / "sharded/source", "llama", SIZES, shard_size="1KB")
        places["bin"] = _begin(root / "bin")
        _pickled(_model(root / "bin/source", "llama", SIZES))
        for name in OF_PROGRAMS:
            places[name] = _begin(root / name)
            if (FILES / name).is_dir():
                shutil.copytree(FILES / name, root / name / "source")
            else:
                (root / name / "source").mkdir()
                shutil.copy(FILES / name, root / name / "source/model.gguf")
        places[LOGITS] = _begin(root / LOGITS)
        _logits(root / LOGITS / "source")
        places["words"] = _begin(root / "words")
        _tokenizer(_model(root / "words/source", "llama", SIZES))
        places["pair"] = _begin(root / "pair")
        _tokenizer(_model(root / "pair/source", "llama", SIZES))
        os.chdir(root / "pair")
        growkit.grow("source", "target", hidden="x2", verify=QUICK)
        _shorten(root / "pair/target/growkit.json")
    finally:
        os.chdir(here)
    for place in places.values():
        place.learn()
    return places


def _begin(folder: Path) -> Place:
    (folder / "elsewhere").mkdir(parents=True)
    (folder / "elsewhere/secret.txt").write_bytes(SECRET)
    (folder / "text.txt").write_bytes(TEXT)
    (folder / "recipe.yaml").write_bytes(RECIPE)
    return Place(folder)


def _model(folder: Path, kind: str, sizes: dict[str, Any], shard_size: str = "5GB") -> Path:
    config = CONFIG_MAPPING[kind](**(ENDS | sizes))
    save_random(folder, config, shard_size=shard_size)
    for file in folder.glob("*.safetensors"):  # few different bytes, so that inputs are kept small
        rounded = {name: (t * 4).round() / 4 for name, t in load_file(file).items()}
        save_file(rounded, file, {"format": "pt"})
    return folder


def _logits(folder: Path) -> None:
    folder.mkdir()
    about = {"program": "p", "dtype": "bfloat16"}
    tensors = {"ids": torch.arange(4), "positions": torch.tensor([1, 3])}
    tensors |= {"logits": torch.ones(2, 8), "hidden.0": torch.ones(4, 3)}
    save_file(tensors, folder / "logits.safetensors", about)
    del tensors["logits"]
    tensors |= {"top_ids": torch.arange(6).view(2, 3), "top_logprobs": -torch.ones(2, 3)}
    content = {name: tensor.tolist() for name, tensor in tensors.items()}
    (folder / "logits.json").write_text(json.dumps(about | content))


def _pickled(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _shorten(manifest: Path) -> None:
    """Leave long lists of figures out, which nothing reads: YAML takes half a second for them."""
    content = json.loads(manifest.read_text())
    verdict = content["verification"]
    for key, value in verdict.items():
        if isinstance(value, list | dict) and len(json.dumps(value)) > 500:
            verdict[key] = type(value)()
    manifest.write_text(json.dumps(content, indent=2))


def _tokenizer(folder: Path) -> None:
    words = ["<unk>", "<s>", "</s>", "one", "two", "three", "four", "five", "six", "seven", "eight"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    marks = '{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}'
    (folder / "special_tokens_map.json").write_text(marks)
    (folder / "added_tokens.json").write_text('{"<s>": 1, "</s>": 2}')
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
