"""A model folder, opened once: safe reading of untrusted folders, and the files of a model.

Every file of a source or a target is found and opened here (``docs/explanation/trust.md``). A name
must lead to a regular file inside the folder, or inside the blobs of the Hub's cache that the
folder belongs to; otherwise the folder is refused. Links to other places, named pipes and devices
are never opened.

The weights are those that transformers' ``from_pretrained`` loads; if there are none, those of
torch.distributed.checkpoint, which transformers does not read. A folder with other files that
transformers would follow is refused, since the proof would not be about the model that users load.
"""

import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from growkit.base.errors import DISK, InputError, PlaceError, reason
from growkit.base.parsing import parse_json, parse_yaml
from growkit.base.units import size

MAX_BYTES = 1 << 28
"""Limit for files that are read as a whole, which weights are not, in bytes."""

MAX_JSON = 1 << 26
"""Limit for JSON, which takes more memory than its file, in bytes."""

MAX_YAML = 1 << 17
"""Limit for YAML, which takes long to parse, in bytes."""

MAX_ENTRIES = 100_000
"""Limit for files and folders in a model folder."""

MAX_NESTED = 100
"""Largest depth of folders in a model folder."""

BLOCK = 1 << 20
"""Bytes to copy at a time."""

POINTER = b"version https://git-lfs"
"""Beginning of the files that Git LFS leaves in place of large ones."""

State = tuple[int, int, int, int, int, int]
"""Device, inode, kind, size and times: they identify a file, and show whether it has changed."""

SINGLE = {single: f"{single}.index.json" for single in ("model.safetensors", "pytorch_model.bin")}
"""Files with all weights, in order of preference, and the index of the shards that may replace
each."""

GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
"""The tensors of an adapter; the first file is preferred."""

ADAPTER_FOLDER = "adapter"
"""In a grown model: the adapter that was grown with it."""

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*.jinja", f"{TEMPLATES}*"),
    *("vocab*", "*_vocab.json", "merges.txt", "bpe.codes", "dict.txt", "normalizer.json"),
    *(
        "*.model",
        "*.model.*",
        "*.spm",
        "*.tiktoken",
        "*.tokenizer",
        "tekken.json",
        "byte_maps.json",
    ),
    *("entity_vocab.json", "emoji.json", "word_shape.json", "word_pronunciation.json"),
)
"""All files of transformers' tokenizers."""

LICENCES = ("*LICEN[CS]E*", "[Ll]icen[cs]e*", "NOTICE*", "COPYING*", "USE_POLICY*")
"""Files with terms of use."""

CARRIED = (
    *(GENERATION, *TOKENIZER_FILES, "tokenizer*", "chat_template*"),
    *("preprocessor_config.json", *LICENCES),
)
"""Files next to weights and config that growth copies as they are."""

WITH_CODE = ("tokenizer_config.json", "preprocessor_config.json")
"""Carried files whose ``auto_map`` names code, which is carried as well."""

CARD = "README.md"

SMALL = ("*.json", "*.jinja", "*.model", "*.py")
"""Other small files that transformers may read."""

WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "*.gguf", "consolidated*")
"""Files that some engine would read as weights."""

LOADED = (
    *("*.model.*", "*.txt", "*.bpe", "*.codes", "*.tokenizer", "custom_generate"),
    *("*.safetensors", "*.bin", "*.gguf"),
)
"""Other files, of any size, that transformers, tokenizers or peft may read."""

NAMES_FILES = ("vocab", "merges")
"""Settings of tokenizers that are a vocabulary, or the path of one."""

OVERRULED = ("special_tokens_map_file", "tokenizer_config_file", "added_tokens_file")
"""Settings of tokenizers that name files, and that transformers overrides."""

FOLLOWED = {
    "configuration_files": "other configs",
    "transformers_weights": "other files of weights",
    "fusion_config": "other modules",
}
"""Config keys that make transformers load something else than the folder's usual files."""

DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors$")
"""If a folder has such a file, transformers takes all safetensors files in it for parts."""

HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
"""Names of models that the Hub accepts."""

STORE = re.compile(r"[a-z][a-z0-9+.-]+:/+[^/].*")
"""Addresses such as ``s3://BUCKET/MODEL``; a path keeps only one of the two slashes."""

COPY_CONFIG = "the weights are there, so copy it from the model that they belong to"
SAVE = "save the model with transformers' save_pretrained, and give that folder"

INSTEAD_OF_WEIGHTS = {
    ADAPTER: "belongs to an adapter; give its base model, and this folder with --adapter",
    "model-*-of-*.safetensors": "is there, but no model.safetensors.index.json; copy that as well",
    "pytorch_model-*-of-*.bin": "is there, but no pytorch_model.bin.index.json; copy that as well",
    "zero_to_fp32.py": "is DeepSpeed's; run it, and give the folder that it makes",
    "*.distcp": "is part of a distributed checkpoint, but has no .metadata; copy that as well",
    "growkit.json": (
        "is a proof whose weights were not kept; growkit.load computes them from the source while "
        "it loads, and growkit run writes them again"
    ),
    **dict.fromkeys(
        ("consolidated*", "*.safetensors", "*.h5", "*.onnx"),
        f"is not read; rename it to model.safetensors if it is one, or {SAVE}",
    ),
    **dict.fromkeys(
        ("*.pth", "*.pt", "*.bin", "*.ckpt"),
        f"is not read; rename it to pytorch_model.bin if it is a state_dict, or {SAVE}",
    ),
}
"""Patterns of file names, with the reason why such a file is not read as weights, and the remedy;
the first match is reported."""


PART = re.compile(r"-[0-9]{5}(?=-of-[0-9]{5}\.)")
"""In the names of the parts of one model, which GGUF has as well: the number of the part."""

_MODULE = re.compile(r"""(?:["'](?=\w+\.)|^\s*(?:from|import)\s+\.)(\w+)""", re.MULTILINE)
"""A module that ``auto_map`` names, or that other code imports."""


class Folder:
    """A model folder, or a file that holds a whole model.

    Args:
        path: path of the folder, or of the file; a link is followed once, here.

    Attributes:
        path: path of the folder.
        only: name of the file that holds the model; all others in the folder are hidden, but for
            further parts of the model. Empty if the folder is the model.

    Raises:
        InputError: the path is neither.
    """

    def __init__(self, path: Path | str) -> None:
        check_name(path)
        self.path, self.only = Path(path), ""
        try:
            if self.path.is_file():
                self.path, self.only = self.path.parent, self.path.name
            is_folder = self.path.is_dir()
        except OSError:  # for example, its name is too long
            is_folder = False
        if not is_folder:
            raise InputError(no_folder(self.path))
        self._inside = [self.path.resolve()]
        if self.only:
            self._inside.append((self.path / self.only).resolve())
        snapshots = self._inside[0].parent
        if snapshots.name == "snapshots":  # in the Hub's cache, files are links into blobs
            self._inside.append(snapshots.parent / "blobs")

    def __str__(self) -> str:
        return str(self.path / self.only)

    def has(self, name: str) -> bool:
        """Whether the name exists, usable or not."""
        hidden = self.only and PART.sub("", name) != PART.sub("", self.only)
        return not hidden and os.path.lexists(self.path / name)

    def find(self, name: str) -> Path | None:
        """Find a regular file by its name relative to the folder; None if the name does not exist.

        Raises:
            InputError: the name is a folder, a pipe or a device, or a link that leads nowhere or
                out of the folder.
        """
        check_name(name)
        path = self.path / name
        if not self.has(name):
            return None
        try:
            real = path.resolve(strict=True)
            mode = real.stat().st_mode
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) and error.errno in DISK:
                raise _unreadable(path, error) from None
            raise InputError(
                f"{path} is a link that leads nowhere ({reason(error)}); copy the file itself there"
            ) from None
        if not any(map(real.is_relative_to, self._inside)):
            raise InputError(f"{path} leads out of the folder, to {real}; copy the file there")
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode)
        return path

    def require(self, name: str) -> Path:
        """Find a regular file that must exist.

        Raises:
            InputError: see ``find``; or the name does not exist.
        """
        if path := self.find(name):
            return path
        if self.only:
            raise InputError(no_folder(self.path / self.only))
        if name == "config.json":
            raise InputError(no_model(self.path))
        raise InputError(f"{self.path / name} does not exist; is {self.path} a model folder?")

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        """Open a regular file for reading.

        Raises:
            InputError: see ``require``; or the file is a pointer of Git LFS.
        """
        path = self.require(name)
        with open_regular(path) as stream:
            if os.pread(stream.fileno(), len(POINTER), 0) == POINTER:
                raise InputError(f"{path} only points to the file; fetch it with 'git lfs pull'")
            yield stream

    def bytes(self, name: str, limit: int = MAX_BYTES) -> bytes:
        """Read a file of at most ``limit`` bytes.

        Raises:
            InputError: see ``require``; or the file is larger, or cannot be read.
        """
        with self.open(name) as stream:
            content = read(stream, limit + 1, self.path / name)
        _check_size(self.path / name, len(content), limit)
        return content

    def copy(self, name: str, target: Path) -> None:
        """Copy a file into another folder, block by block; see ``open``."""
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with self.open(name) as stream, (target / name).open("xb") as copied:
            while block := read(stream, BLOCK, self.path / name):
                copied.write(block)

    def json(self, name: str, digits: int = 100, remedy: str = "copy it again") -> dict[str, Any]:
        """Read a JSON object.

        Args:
            name: name of the file.
            digits: limit for the digits of a whole number.
            remedy: what to do if it is not JSON.

        Raises:
            InputError: see ``bytes``; or the file is not a JSON object, see ``parse_json``.
        """
        content = self.bytes(name, MAX_JSON)
        try:
            # transformers before 5 writes infinite limits as Python does.
            parsed = parse_json(content, digits, infinite=name == "config.json")
        except ValueError as error:
            raise InputError(
                f"{self.path / name} cannot be read as JSON ({reason(error)}); {remedy}"
            ) from None
        if not isinstance(parsed, dict):
            raise InputError(
                f"{self.path / name} holds a JSON {type(parsed).__name__}; an object was expected"
            )
        return parsed

    def names(self, *patterns: str) -> list[str]:
        """List everything in the folder but folders, by relative path.

        Links are not followed: a link to a folder is listed, but not the contents of its target.

        Args:
            *patterns: patterns for names at the top level; folders that match are listed with their
                contents. None of them to list everything.

        Raises:
            InputError: there are more than ``MAX_ENTRIES``, or a folder cannot be read.
        """

        def stop(error: OSError) -> None:
            raise _unreadable(Path(error.filename), error)

        paths: list[str] = []
        for at, folders, files in walk(self.path, onerror=stop):
            if self.only:
                folders[:], files = [], [name for name in files if self.has(name)]
            if at == self.path and patterns:
                folders[:] = [name for name in folders if matches(name, patterns)]
                files = [name for name in files if matches(name, patterns)]
            links = [name for name in folders if (at / name).is_symlink()]
            paths += [(at / name).relative_to(self.path).as_posix() for name in (*links, *files)]
            if len(paths) > MAX_ENTRIES:
                raise InputError(
                    f"{self.path} holds more than {MAX_ENTRIES:,} files; give a model folder"
                )
        return sorted(paths)

    def carried(self) -> list[str]:
        """The names of files that are copied with the weights of a model.

        A tokenizer with code of its own may read any file; those that its code or its settings name
        in quotes are copied as well.
        """
        files, names = {*self.names(*CARRIED)}, {name for name in self.names() if "/" not in name}
        code = named = ""
        for name in names.intersection(WITH_CODE):
            with suppress(InputError):  # its reader reports the error
                settings = self.json(name)
                code += json.dumps(settings.get("auto_map"))
                named += json.dumps(settings)
        while more := {f"{module}.py" for module in _MODULE.findall(code)} & names - files:
            files |= more
            code += "".join(f"\n{self.bytes(file).decode(errors='replace')}" for file in more)
        named += code
        files |= {name for name in names if f'"{name}"' in named or f"'{name}'" in named}
        left = ("config.json", CARD, *WEIGHTS)
        return sorted(name for name in files if not matches(name, left))

    def carried_bytes(self) -> int:
        """Total size of the carried files."""
        return sum((self.path / name).stat().st_size for name in self.carried())

    def check_carried(self) -> None:
        """Refuse carried files that cannot be read, before any is copied.

        Raises:
            InputError: a file cannot be read, or is a pointer of Git LFS.
        """
        for name in self.carried():
            with self.open(name):
                pass

    def carry_over(self, target: Path) -> None:
        """Copy the carried files; see ``copy``."""
        for name in self.carried():
            self.copy(name, target)

    def code(self) -> list[str]:
        """The files of code to which ``auto_map`` refers, in the config or in a carried file.

        The code of a model may be in any module of its folder.
        """
        names = [name for name in self.names("*.py") if "/" not in name]
        model = self.has("config.json") and self.json("config.json").get("auto_map")
        return names if model else sorted({*names}.intersection(self.carried()))

    def check_files(self) -> None:
        """Refuse files that a loader would follow, pipes, and links that lead nowhere or outside.

        Raises:
            InputError: the message names the file.
        """
        check_names(str(self), [self.only] if self.only else os.listdir(self.path))
        for name in self.names(*CARRIED, *SMALL):
            _check_size(self.path / name, self.require(name).stat().st_size, MAX_BYTES)
        for name in self.names(*LOADED):
            self.find(name)

    def check_loaded(self) -> None:
        """Refuse files, and settings of a tokenizer, that lead transformers out of the folder.

        Raises:
            InputError: the message names the file, or the key of the settings.
        """
        self.check_files()
        name = "tokenizer_config.json"
        for key, value in self.json(name).items() if self.has(name) else ():
            named = key in NAMES_FILES or (key.endswith("_file") and key not in OVERRULED)
            inside = not isinstance(value, str)
            with suppress(OSError, ValueError, RuntimeError):
                inside |= (self.path / str(value)).resolve().is_relative_to(self.path.resolve())
            if named and not inside:
                raise InputError(
                    f"{key} in {self.path / name} is {value!r}, a file outside of the folder; "
                    "remove the key"
                )


def walk(
    folder: Path, onerror: Callable[[OSError], None] | None = None
) -> Iterator[tuple[Path, list[str], list[str]]]:
    """Like ``os.walk``, which would fail in deeply nested folders.

    Raises:
        InputError: folders are nested more than ``MAX_NESTED`` deep.
    """
    top = len(folder.parts)
    for where, folders, files in os.walk(folder, onerror=onerror):
        at = Path(where)
        if len(at.parts) - top > MAX_NESTED:
            raise InputError(
                f"folders in {folder} are nested more than {MAX_NESTED} deep; give a model folder"
            )
        yield at, folders, files


def check_name(path: Path | str) -> None:
    """Refuse a path that a manifest cannot hold.

    Raises:
        InputError: the path is empty, or has characters that UTF-8 or the system does not allow.
    """
    text = str(path)
    if not text or "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"{text!r} is not the name of a file or folder; give a name in UTF-8")


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading, without ever waiting, as for a named pipe.

    Raises:
        InputError: the file cannot be opened, or is not a regular file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(path, mode)
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; see ``Folder.json``."""
    return Folder(file.parent).json(file.name)


def state_of(status: os.stat_result) -> State:
    """The state of a file, from its status."""
    return (
        *(status.st_dev, status.st_ino, status.st_mode, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


def _check_size(path: Path, count: int, limit: int) -> None:
    if count > limit:
        raise InputError(
            f"{path} is larger than {size(limit)}; a file of this kind should be small, "
            "copy it again"
        )


def read(stream: IO[bytes], count: int, path: Path | str) -> bytes:
    """Read at most ``count`` bytes.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        return stream.read(count)
    except OSError as error:
        raise _unreadable(path, error) from None


def read_yaml(file: Path, kind: str) -> Any:
    """Read a YAML file.

    Args:
        file: path of the file.
        kind: purpose of the file, for messages.

    Raises:
        InputError: the file cannot be read, or is not YAML that growkit accepts.
    """
    try:
        with open_regular(file) as stream:
            text = read(stream, MAX_YAML + 1, file).decode("utf-8")
        if len(text) > MAX_YAML:
            raise InputError(f"{file} is larger than {size(MAX_YAML)}; give a smaller one")
        return parse_yaml(text)
    except InputError as error:  # its message names the file
        raise InputError(f"{kind} {error}") from None
    except ValueError as error:
        raise InputError(f"{kind} {file} cannot be used: {reason(error)}") from None


def _irregular(path: Path, mode: int) -> InputError:
    if stat.S_ISDIR(mode):
        return InputError(f"{path} is a folder, and a file was expected; put it there")
    return InputError(f"{path} is not a regular file; replace it by one")


def _unreadable(path: Path | str, error: OSError | ValueError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path} cannot be read (there is no such file); check its name")
    if isinstance(error, OSError) and error.errno in DISK:
        return PlaceError(f"{path} cannot be read ({error.strerror}); check the disk")
    why = error.strerror if isinstance(error, OSError) else error
    return InputError(f"{path} cannot be read ({why}); check its name, and make it readable")


# The files of a model


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches any of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_of_tokenizer(name: str) -> bool:
    """Whether a file may belong to a tokenizer of transformers, by its name in the folder."""
    return ("/" not in name or name.startswith(f"{TEMPLATES}/")) and matches(name, TOKENIZER_FILES)


def check_names(where: str, names: Iterable[str]) -> None:
    """Refuse a model with files that transformers would load in addition to its weights.

    Args:
        where: name of the model in messages.
        names: names of its files.

    Raises:
        InputError: the message names the file.
    """
    for name in names:
        if name == ADAPTER:
            raise InputError(
                f"{where} has {ADAPTER}, and transformers would add its adapter to the weights; "
                "merge the adapter, or move its files into a folder for --adapter"
            )
        if DISTRIBUTED.match(name):
            raise InputError(
                f"{where} has {name}, a part of a distributed checkpoint, and transformers would "
                "load that instead of the other weights; consolidate it, or move it away"
            )


# Mistaken inputs


def address_in(path: Path | str) -> str:
    """Restore the slashes that an address loses when it is converted to a path."""
    slashes = "///" if re.match("(file|local):/", str(path)) else "//"
    return re.sub(r"^([a-z][a-z0-9+.-]+):/+", rf"\1:{slashes}", str(path))


def no_folder(path: Path) -> str:
    """Explain why a path that is no folder is no model, and what to give instead."""
    if os.path.lexists(path.parent / "config.json") and os.path.lexists(path):
        return f"{path} is not a folder; give the folder that contains it, {path.parent}"
    exists = os.path.lexists(path)
    what = "is neither a folder nor a file of a model" if exists else "does not exist"
    return (
        f"{address_in(path)} {what}; give a model folder with config.json and weights, or "
        "hf://ORG/NAME for a model on the Hub"
    )


def no_model(folder: Path) -> str:
    """Explain why a folder without ``config.json`` is not a model, and what to give instead."""
    missing = f"{folder / 'config.json'} does not exist"
    if any(os.path.lexists(folder / name) for name in (*SINGLE, *SINGLE.values(), ".metadata")):
        adapter = os.path.lexists(folder / ADAPTER)
        return f"{missing}; {instead_of_weights(folder) if adapter else COPY_CONFIG}"
    patterns = "*/config.json", "snapshots/*/config.json"  # the latter in the Hub's cache
    inside = [file.parent for pattern in patterns for file in folder.glob(pattern)]
    if inside:
        latest = max(inside, key=lambda path: (len(path.name), path.name))  # checkpoint-1000
        return f"{missing}; give one of the folders in it, such as {latest}"
    return f"{missing}; {instead_of_weights(folder) or f'is {folder} a model folder?'}"


def instead_of_weights(folder: Path) -> str | None:
    """Find a file that is not read, but may hold the weights; return its name and the remedy."""
    names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
    for pattern, problem in INSTEAD_OF_WEIGHTS.items():
        if other := next((name for name in names if fnmatchcase(name, pattern)), None):
            return f"{other} {problem}"
    return None
