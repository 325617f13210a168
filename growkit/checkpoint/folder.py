"""A model folder, opened once: how growkit reads untrusted folders, and which files are a model.

Every file of a source or a target is found and opened here (``docs/trust.md``). A name leads to a
regular file inside the folder, or inside the blobs of the cache that the folder belongs to, or the
folder is refused: links to anywhere else, named pipes and devices are never opened.

The weights are those that ``from_pretrained`` of transformers loads; where there are none, those of
torch.distributed.checkpoint, which it does not look for. A folder with anything else that it would
follow is refused: a model would be proved that no user gets.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from growkit.base.errors import InputError, reason
from growkit.base.parsing import parse_json, parse_yaml
from growkit.base.tensors import Config
from growkit.base.units import size

MOST_BYTES = 1 << 28
"""Size of a file, at most, that is read as a whole; weights are not."""

MOST_JSON = 1 << 26
"""The same of JSON, which takes more memory than its file."""

MOST_YAML = 1 << 17
"""The same of YAML, which takes long to parse."""

MOST_ENTRIES = 100_000
"""Files and folders, at most, that a model folder holds."""

BLOCK = 1 << 20
"""Bytes that are copied at a time."""

State = tuple[int, int, int, int, int, int]
"""Device, inode, kind, size and times: these tell files apart, and one from itself before."""

SINGLE = {single: f"{single}.index.json" for single in ("model.safetensors", "pytorch_model.bin")}
"""Files with all weights, in the order in which they are preferred, and the index of shards where
no such file has all."""

LIST = ".metadata"
"""The list of entries in a folder of torch.distributed.checkpoint."""

GENERATION = "generation_config.json"
TEMPLATES = "additional_chat_templates"
ADAPTER = "adapter_config.json"

CARRIED = (
    *(GENERATION, "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*"),
    *("merges.txt", "*.tiktoken", "tekken.json", "spiece.model", "sentencepiece*.model"),
    *("chat_template*", TEMPLATES, "preprocessor_config.json", "LICENSE*", "NOTICE*"),
    "USE_POLICY*",
)
"""Files next to weights and config that growth copies as they are."""

SMALL = ("*.json", "*.jinja", "*.model", "*.py")
"""Other files, all small, that transformers may read."""

LOADED = (
    *("*.model.*", "*.txt", "*.bpe", "*.codes", "*.tokenizer", "custom_generate"),
    *("*.safetensors", "*.bin", "*.gguf"),
)
"""Other files, of any size, that transformers, tokenizers or peft may read."""

TOKENIZER_FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*.jinja", f"{TEMPLATES}*"),
    *("vocab*", "*_vocab.json", "merges.txt", "bpe.codes", "dict.txt", "normalizer.json"),
    *("*.model", "*.model.*", "*.tiktoken", "*.tokenizer", "tekken.json", "byte_maps.json"),
    *("entity_vocab.json", "emoji.json", "word_shape.json", "word_pronunciation.json"),
)
"""Everything that a tokenizer of transformers is made of."""

NAMES_FILES = ("vocab", "merges")
"""Settings of tokenizers that are a vocabulary, or the path of one."""

OVERRULED = ("special_tokens_map_file", "tokenizer_config_file", "added_tokens_file")
"""Settings of tokenizers that name files, which transformers overrules."""

FOLLOWED = {
    "configuration_files": "other configs",
    "transformers_weights": "other files of weights",
    "fusion_config": "other modules",
}
"""Keys of a config by which transformers loads something that the folder's name does not tell."""

DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors$")
"""Next to such a file, transformers takes every safetensors file for a part of the model."""

HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
"""What the Hub accepts as the name of a model."""

STORE = re.compile(r"[a-z][a-z0-9+.-]+:/+[^/].*")
"""``s3://BUCKET/MODEL`` and the like; a path has one slash where two were written."""

COPY_CONFIG = "the weights are there, so copy it from the model that they are of"
GGUF = "is GGUF, for llama.cpp; give the folder of the model that it was made from"
SAVE = "save the model with transformers' save_pretrained, and give that folder"

INSTEAD_OF_WEIGHTS = {
    ADAPTER: "is that of an adapter; merge it into its base model first",
    "*.gguf": GGUF,
    "model-*-of-*.safetensors": "is there, but no model.safetensors.index.json; copy that as well",
    "pytorch_model-*-of-*.bin": "is there, but no pytorch_model.bin.index.json; copy that as well",
    "zero_to_fp32.py": "is DeepSpeed's; run it, and give the folder that it makes",
    "*.distcp": "is part of a distributed checkpoint, but has no .metadata; copy that as well",
    "growkit.json": (
        "is a proof whose weights were not kept; growkit.load makes them of the source while it "
        "loads, and growkit run writes them again"
    ),
    **dict.fromkeys(
        ("consolidated*", "*.safetensors", "*.pth", "*.pt", "*.bin", "*.ckpt", "*.h5", "*.onnx"),
        f"is not read; call it model.safetensors if it is that, or {SAVE}",
    ),
}
"""Patterns of names, and why such a file is no weights; the first that matches is reported."""


class Folder:
    """A model folder.

    Args:
        path: where it is; a link to a folder is followed once, here.

    Raises:
        InputError: there is no folder.
    """

    def __init__(self, path: Path | str) -> None:
        check_name(path)
        self.path = Path(path)
        try:
            is_folder = self.path.is_dir()
        except OSError:  # its name is too long, say
            is_folder = False
        if not is_folder:
            raise InputError(no_folder(self.path))
        self._inside = [self.path.resolve()]
        snapshots = self._inside[0].parent
        if snapshots.name == "snapshots":  # of a hub cache: the files are links into its blobs
            self._inside.append(snapshots.parent / "blobs")

    def __str__(self) -> str:
        return str(self.path)

    def has(self, name: str) -> bool:
        """Whether there is anything of this name, usable or not."""
        return os.path.lexists(self.path / name)

    def find(self, name: str) -> Path | None:
        """The path of a regular file, by its name relative to the folder; None if there is none.

        Raises:
            InputError: what has this name is a folder, a pipe or a device, or a link that leads
                nowhere or out of the folder.
        """
        check_name(name)
        path = self.path / name
        if not os.path.lexists(path):
            return None
        try:
            real = path.resolve(strict=True)
            mode = real.stat().st_mode
        except (OSError, RuntimeError) as error:
            raise InputError(
                f"{path} is a link that leads nowhere ({reason(error)}); copy the file itself there"
            ) from None
        if not any(map(real.is_relative_to, self._inside)):
            raise InputError(f"{path} leads out of the folder, to {real}; copy the file there")
        if not stat.S_ISREG(mode):
            raise _irregular(path, mode)
        return path

    def require(self, name: str) -> Path:
        """As ``find``.

        Raises:
            InputError: there is no such file either.
        """
        if path := self.find(name):
            return path
        if name == "config.json":
            raise InputError(no_model(self.path))
        raise InputError(f"{self.path / name} does not exist; is {self.path} a model folder?")

    @contextmanager
    def open(self, name: str) -> Iterator[BufferedReader]:
        """A regular file, to be read; see ``require``."""
        with open_regular(self.require(name)) as stream:
            yield stream

    def bytes(self, name: str, most: int = MOST_BYTES) -> bytes:
        """The contents of a file of at most that many bytes.

        Raises:
            InputError: see ``require``; or it is larger, or cannot be read.
        """
        with self.open(name) as stream:
            content = read(stream, most + 1, self.path / name)
        _check_size(self.path / name, len(content), most)
        return content

    def copy(self, name: str, target: Path) -> None:
        """Copy a file into another folder, block by block; see ``open``."""
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        with self.open(name) as stream, (target / name).open("xb") as copied:
            while block := read(stream, BLOCK, self.path / name):
                copied.write(block)

    def json(self, name: str, digits: int = 100) -> dict[str, Any]:
        """A JSON object.

        Args:
            name: of the file.
            digits: of a whole number in it, at most.

        Raises:
            InputError: see ``bytes``; or it is not a JSON object, see ``parse_json``.
        """
        content = self.bytes(name, MOST_JSON)
        try:
            parsed = parse_json(content, digits)
        except ValueError as error:
            raise InputError(
                f"{self.path / name} cannot be read as JSON ({reason(error)}); copy it again"
            ) from None
        if not isinstance(parsed, dict):
            raise InputError(
                f"{self.path / name} holds a JSON {type(parsed).__name__}; an object was expected"
            )
        return parsed

    def names(self, *patterns: str) -> list[str]:
        """Everything in the folder that is no folder itself, relative to it.

        Links are not followed: one to a folder is listed, what is behind it is not.

        Args:
            *patterns: only files and folders at the top that match one of these, with contents.

        Raises:
            InputError: there are more than ``MOST_ENTRIES``, or a folder cannot be read.
        """

        def stop(error: OSError) -> None:
            raise _unreadable(Path(error.filename), error)

        found: list[str] = []
        for where, folders, files in os.walk(self.path, onerror=stop):
            at = Path(where)
            if at == self.path and patterns:
                folders[:] = [name for name in folders if matches(name, patterns)]
                files = [name for name in files if matches(name, patterns)]
            links = [name for name in folders if (at / name).is_symlink()]
            found += [(at / name).relative_to(self.path).as_posix() for name in (*links, *files)]
            if len(found) > MOST_ENTRIES:
                raise InputError(
                    f"{self.path} holds more than {MOST_ENTRIES:,} files; give a model folder"
                )
        return sorted(found)

    def carried(self) -> list[str]:
        """The files that are copied along with the weights of a model, by their names."""
        return self.names(*CARRIED)

    def carried_bytes(self) -> int:
        """Size of these files."""
        return sum((self.path / name).stat().st_size for name in self.carried())

    def check_carried(self) -> None:
        """Refuse files that cannot be copied, before any is.

        Raises:
            InputError: one of these files cannot be read.
        """
        for name in self.carried():
            with self.open(name):
                pass

    def carry_over(self, target: Path) -> None:
        """Copy the tokenizer and the like; see ``copy``."""
        for name in self.carried():
            self.copy(name, target)

    def code(self) -> list[str]:
        """The files of the model's own code, to which ``auto_map`` in its config refers."""
        return [name for name in self.names("*.py") if "/" not in name]

    def check_files(self) -> None:
        """Refuse files that a loader would follow, pipes, and links that lead nowhere or elsewhere.

        Raises:
            InputError: names the file.
        """
        check_names(str(self), os.listdir(self.path))
        for name in self.names(*CARRIED, *SMALL):
            _check_size(self.path / name, self.require(name).stat().st_size, MOST_BYTES)
        for name in self.names(*LOADED):
            self.find(name)

    def check_loaded(self) -> None:
        """Refuse what a loader of transformers would follow, in files or a tokenizer's settings.

        Raises:
            InputError: names the file, or the key of the settings that names one elsewhere.
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

    def weight_files(self, config: Config) -> tuple[list[str], dict[str, str]]:
        """The names of the files with the weights, in order; of DCP, that of its list of entries.

        Returns:
            The names, and where the index (if there is one) has each tensor.

        Raises:
            InputError: there are none, one is missing, or transformers would load something else.
        """
        for key, what in FOLLOWED.items():
            if config.get(key) is not None:
                raise InputError(
                    f"config.json in {self} has {key}, by which transformers loads {what}; "
                    "load the model with transformers, save it again and take that"
                )
        for single, index in SINGLE.items():
            if self.find(single):  # transformers as well prefers it to an index
                return [single], {}
            if self.find(index):
                ending = single.rpartition(".")[2]
                listed = _parse_index(str(self.path / index), self.json(index), ending)
                names = sorted(set(listed.values()))
                for name in names:
                    if not self.find(name):
                        raise InputError(
                            f"shard {self.path / name} is missing, {index} lists it; "
                            "copy it into the folder"
                        )
                return names, listed
        if self.find(LIST):
            return [LIST], {}
        found = instead_of_weights(self.path) or f"{', '.join(SINGLE)} or an index was expected"
        raise InputError(f"{self} has no weights; {found}")


def check_name(path: Path | str) -> None:
    """Refuse a path that cannot be written down in a manifest.

    Raises:
        InputError: it is empty, or has what UTF-8 or the system has no place for.
    """
    text = str(path)
    if not text or "\0" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(f"{text!r} is no name of a file or folder; give one in UTF-8")


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """A regular file, to be read; nothing is waited for, as behind a pipe.

    Raises:
        InputError: it cannot be opened, or is something else.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        raise _irregular(path, mode)
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object; see ``Folder.json``."""
    return Folder(file.parent).json(file.name)


def state_of(status: os.stat_result) -> State:
    """The state of a file, from its status."""
    return (
        *(status.st_dev, status.st_ino, status.st_mode, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


def _check_size(path: Path, count: int, most: int) -> None:
    if count > most:
        raise InputError(
            f"{path} is larger than {size(most)}; a file of this kind should be small, "
            "copy it again"
        )


def read(stream: IO[bytes], count: int, path: Path | str) -> bytes:
    """As many bytes, at most.

    Raises:
        InputError: they cannot be read.
    """
    try:
        return stream.read(count)
    except OSError as error:
        raise _unreadable(path, error) from None


def read_yaml(file: Path, kind: str) -> Any:
    """The value of a YAML file.

    Args:
        file: where it is.
        kind: its name in messages.

    Raises:
        InputError: it cannot be read, or is not the YAML that growkit takes.
    """
    try:
        with open_regular(file) as stream:
            text = read(stream, MOST_YAML + 1, file).decode("utf-8")
        if len(text) > MOST_YAML:
            raise InputError(f"{file} is larger than {size(MOST_YAML)}; give a smaller one")
        return parse_yaml(text)
    except InputError as error:  # which names the file
        raise InputError(f"{kind} {error}") from None
    except ValueError as error:
        raise InputError(f"{kind} {file} cannot be used: {reason(error)}") from None


def _irregular(path: Path, mode: int) -> InputError:
    if stat.S_ISDIR(mode):
        return InputError(f"{path} is a folder, and a file was expected; put it there")
    return InputError(f"{path} is no regular file; replace it by one")


def _unreadable(path: Path | str, error: OSError | ValueError) -> InputError:
    if isinstance(error, FileNotFoundError):
        return InputError(f"{path} cannot be read (there is no such file); check its name")
    why = error.strerror if isinstance(error, OSError) else error
    return InputError(f"{path} cannot be read ({why}); check its name, and make it readable")


# Which files are a model


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches one of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_of_tokenizer(name: str) -> bool:
    """Whether a tokenizer of transformers may be made of a file, by its name in the folder."""
    return ("/" not in name or name.startswith(f"{TEMPLATES}/")) and matches(name, TOKENIZER_FILES)


def check_names(where: str, names: Iterable[str]) -> None:
    """Refuse a model with files next to its weights that transformers takes for more of them.

    Args:
        where: what the model is called.
        names: of its files.

    Raises:
        InputError: names the file.
    """
    for name in names:
        if name == ADAPTER:
            raise InputError(
                f"{where} has {ADAPTER}, and transformers would add its adapter to the weights; "
                "merge the adapter, or move its files away"
            )
        if DISTRIBUTED.match(name):
            raise InputError(
                f"{where} has {name}, a part of a distributed checkpoint, and transformers would "
                "load that instead of the other weights; consolidate it, or move it away"
            )


def small_files(where: str, names: Iterable[str]) -> list[str]:
    """The files next to weights that growkit reads, by their names in a model.

    Raises:
        InputError: see ``check_names``.
    """
    check_names(where, names)

    def is_read(name: str) -> bool:
        top, *below = name.split("/")
        return ".." not in below and matches(top, CARRIED if below else (*CARRIED, *SMALL))

    return [*filter(is_read, names)]


def _parse_index(where: str, index: Mapping[str, Any], ending: str) -> dict[str, str]:
    """The file of each tensor, by an index; ``ending`` is that of files of weights."""
    weight_map: Any = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{where} has no weight_map; copy the index again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(rf"[^/\\\0]+\.{ending}", name):
            raise InputError(
                f"{where} lists tensor {tensor} in {name!r}; the name of a "
                f".{ending} file next to it was expected, copy the index again"
            )
    return weight_map


# What users give in the place of a model folder


def address_in(path: Path | str) -> str:
    """An address with the slashes that a path has lost."""
    slashes = "///" if re.match("(file|local):/", str(path)) else "//"
    return re.sub(r"^([a-z][a-z0-9+.-]+):/+", rf"\1:{slashes}", str(path))


def no_folder(path: Path) -> str:
    """Why something that is no folder is no model, and what to give."""
    if os.path.isfile(path) and path.suffix == ".gguf":
        return f"{path} {GGUF}"
    if os.path.lexists(path.parent / "config.json") and os.path.lexists(path):
        return f"{path} is not a folder; give the one that it is in, {path.parent}"
    return (
        f"{address_in(path)} is not a folder; give a model folder with config.json and weights, or "
        "hf://ORG/NAME for a model on the Hub"
    )


def no_model(folder: Path) -> str:
    """Why a folder without ``config.json`` is no model, and what to give."""
    missing = f"{folder / 'config.json'} does not exist"
    weights = (*SINGLE, *SINGLE.values(), LIST)
    if any(os.path.lexists(folder / name) for name in weights):
        adapter = os.path.lexists(folder / ADAPTER)
        return f"{missing}; {instead_of_weights(folder) if adapter else COPY_CONFIG}"
    patterns = "*/config.json", "snapshots/*/config.json"  # those of a model in the Hub's cache
    inside = [file.parent for pattern in patterns for file in folder.glob(pattern)]
    if inside:
        latest = max(inside, key=lambda each: (len(each.name), each.name))  # checkpoint-1000
        return f"{missing}; give one of the folders in there, such as {latest}"
    return f"{missing}; {instead_of_weights(folder) or f'is {folder} a model folder?'}"


def instead_of_weights(folder: Path) -> str | None:
    """A file that a folder has in the place of weights that are read, and what to do about it."""
    names = sorted(os.listdir(folder)) if os.access(folder, os.R_OK) else []
    for pattern, problem in INSTEAD_OF_WEIGHTS.items():
        if found := next((name for name in names if fnmatchcase(name, pattern)), None):
            return f"{found} {problem}"
    return None
