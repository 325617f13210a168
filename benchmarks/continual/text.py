"""The text: Python's own standard library, which every machine with Python has; or any other.

Sources of installed packages can be added to it.

Whole files are held out, by the hash of their path: a twentieth for choosing learning rates
(``validation``), as much for what is reported (``test``). The tokenizer sees neither.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from growkit.base.errors import InputError

END = "<|end|>"
"""Between files; token 0."""

ABOUT = "about.json"
PARTS = ("train", "validation", "test")
SHARES = 20
"""One of so many files is for validation, one for the test."""

GENERATED = ("include/ATen/ops/",)
"""Headers of torch, several for each operator, that hardly differ."""

PIECE = 200
"""Lines of a single file that are held out together."""


Document = tuple[str, str]
"""A file, or a piece of one: its path inside the folder, with ``/``, and its text."""


@dataclass(frozen=True)
class Text:
    """Tokens of all parts.

    Attributes:
        about: the text, its hash and sizes.
        folder: holds the tokenizer, and ``calibration.txt``, a part of what is trained on.
        parts: ``train``, ``validation`` and ``test``, each [tokens].
    """

    about: dict[str, Any]
    folder: Path
    parts: dict[str, Tensor]

    def held_out(self, part: str, windows: int, context: int) -> Tensor:
        """Windows that are evenly spread over a part, [windows, context]."""
        tokens = self.parts[part]
        count = min(windows, len(tokens) // context)
        starts = torch.linspace(0, len(tokens) - context, count).long().tolist()
        return torch.stack([tokens[at : at + context] for at in starts])

    def windows(self, part: str, context: int) -> Tensor:
        """All of a part without overlap, [windows, context]."""
        tokens = self.parts[part]
        return tokens[: len(tokens) // context * context].view(-1, context)


def read_text(
    path: Path | None,
    vocabulary: int,
    work: Path,
    most: int | None = None,
    packages: Sequence[str] = (),
    endings: Sequence[str] = (".py",),
) -> Text:
    """The text as tokens; made once, then read from the work folder.

    Args:
        path: a file, or a folder with text, or what this function made of one in another work
            folder; None for the standard library.
        vocabulary: tokens of the tokenizer.
        work: where it is kept.
        most: bytes that are used; None for all.
        packages: installed packages that are read with the standard library.
        endings: of the files that are read, of these and of the standard library.
    """
    if path and (path / f"{PARTS[0]}.pt").is_file():
        made = _made(path)
        if made.about["vocabulary"] != vocabulary:
            raise InputError(
                f"{path} has {made.about['vocabulary']} tokens, but {vocabulary} are needed; give "
                "the text of the same scale"
            )
        return made
    if path:
        documents, about_text = _of_path(path), path.name
    else:
        documents, about_text = _installed(packages, endings)
    documents = _up_to(most, documents)
    found = hashlib.sha256(str(vocabulary).encode())
    for name, content in documents:
        found.update(f"{name}\0{content}\0".encode())
    folder = work / f"text-{found.hexdigest()[:16]}"
    about = folder / ABOUT
    if not about.is_file():  # written last
        folder.mkdir(parents=True, exist_ok=True)
        _prepare(documents, vocabulary, folder)
        kept = {
            "text": about_text,
            "sha256": found.hexdigest(),
            "files": len(documents),
            "bytes": sum(len(content.encode()) for _, content in documents),
            "test_bytes": sum(
                len(content.encode()) for name, content in documents if part_of(name) == "test"
            ),
            "vocabulary": vocabulary,
            "tokens": {part: len(torch.load(folder / f"{part}.pt")) for part in PARTS},
        }
        about.with_suffix(".new").write_text(json.dumps(kept), "utf-8")
        os.replace(about.with_suffix(".new"), about)
    return _made(folder)


def _made(folder: Path) -> Text:
    parts = {part: torch.load(folder / f"{part}.pt").long() for part in PARTS}
    return Text(json.loads((folder / ABOUT).read_text("utf-8")), folder, parts)


def _installed(packages: Sequence[str], endings: Sequence[str]) -> tuple[list[Document], str]:
    """Files of the standard library and of packages, and what they are."""
    documents = standard_library(endings)
    names = [f"standard library of Python {platform.python_version()}"] if documents else []
    for package in packages:
        root = Path(sysconfig.get_paths()["purelib"]) / package
        found = _documents(root, endings, skip=GENERATED)
        documents += [(f"{package}/{name}", content) for name, content in found]
        names.append(f"{package} ({_licence(package)})")
    kinds = "" if ".py" in endings else f"{', '.join(endings)} files of "
    return documents, kinds + ", ".join(names)


def standard_library(endings: Sequence[str] = (".py",)) -> list[Document]:
    """The sources of the standard library of this Python, in order of their paths.

    Left out are installed packages, what is no UTF-8 (tests of encodings), and the one module that
    is about the machine.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    return _documents(root, endings, skip=("site-packages", "dist-packages", "_sysconfigdata"))


def _licence(package: str) -> str:
    """The version and the licence of an installed package, as its metadata state them."""
    about = metadata.metadata(package)
    licence = about.get("License-Expression") or about.get("License") or "no licence stated"
    return f"{about['Version']}, {licence.splitlines()[0]}"


def _of_path(path: Path) -> list[Document]:
    if path.is_dir():
        return _documents(path, [".txt", ".md", ".py", ".rst", ".json", ".c", ".h"])
    lines = path.read_text("utf-8").splitlines(keepends=True)
    pieces = range(0, len(lines), PIECE)
    return [(f"{number:08}", "".join(lines[number : number + PIECE])) for number in pieces]


def _documents(root: Path, endings: Sequence[str], skip: Sequence[str] = ()) -> list[Document]:
    found = []
    for file in root.rglob("*"):
        name = file.relative_to(root).as_posix()
        if file.suffix in endings and not any(each in name for each in skip) and file.is_file():
            try:
                found.append((name, file.read_bytes().decode("utf-8")))
            except UnicodeDecodeError:
                continue
    return sorted(found)


def _up_to(most: int | None, documents: list[Document]) -> list[Document]:
    """As many files as there is room for, in the order of their hashes."""
    if most is None:
        return documents
    kept, left = set(), most
    for name, content in sorted(documents, key=lambda each: _hash(each[0])):
        size = len(content.encode())
        if size <= left:
            kept.add(name)
            left -= size
    return [document for document in documents if document[0] in kept]


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def part_of(name: str) -> str:
    """The part that a file belongs to."""
    return {0: "validation", 1: "test"}.get(_hash(name) % SHARES, "train")


def _prepare(documents: Sequence[Document], vocabulary: int, folder: Path) -> None:
    """Train a tokenizer, and write what it makes of every part."""
    by_part: dict[str, list[str]] = {part: [] for part in PARTS}
    for name, content in documents:
        by_part[part_of(name)].append(content)
    tokenizer = trained_tokenizer(by_part["train"], vocabulary)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)
    wrapped.save_pretrained(folder)
    for part, texts in by_part.items():
        ids: list[int] = []
        for text in texts:
            ids += [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
        torch.save(torch.tensor(ids, dtype=torch.int32), folder / f"{part}.pt")
    some = "".join(by_part["train"][:: max(1, len(by_part["train"]) // 32)])
    (folder / "calibration.txt").write_text(some[:200_000], "utf-8")


def trained_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE, the same every time."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
