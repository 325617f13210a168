"""What goes along with the weights: tokenizer, templates, licences, and a model's own code."""

from __future__ import annotations

from pathlib import Path

from growkit.checkpoint.folder import Folder, check_size, read

BLOCK = 1 << 20
"""Bytes that are copied at a time."""

GENERATION = "generation_config.json"

CARRIED = (
    GENERATION,
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tekken.json",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates",
    "preprocessor_config.json",
    "LICENSE*",
    "NOTICE*",
    "USE_POLICY*",
)
"""What a model folder holds beside weights and config that growth leaves as it is."""


READ = ("*.json", "*.jinja", "*.model", "*.py")
"""What transformers may read in a folder besides."""


def check_companions(folder: Folder) -> None:
    """Refuse links that lead nowhere or elsewhere, pipes and the like, before they are read.

    Raises:
        InputError: names the file.
    """
    for name in {*folder.names(*CARRIED), *folder.names(*READ)}:
        check_size(folder.path / name, folder.require(name).stat().st_size)


def carried(source: Folder) -> list[str]:
    """The files that go along with the weights of a model, by their names in its folder."""
    return source.names(*CARRIED)


def carried_bytes(source: Folder) -> int:
    """How large these files are."""
    return sum((source.path / name).stat().st_size for name in carried(source))


def check_carried(source: Folder) -> None:
    """Refuse what cannot be copied, before anything is.

    Raises:
        InputError: one of these files cannot be read.
    """
    for name in carried(source):
        with source.open(name):
            pass


def code_of(source: Folder) -> list[str]:
    """The files of the model's own code, to which ``auto_map`` in its config refers."""
    return [name for name in source.names("*.py") if "/" not in name]


def carry_over(source: Folder, target: Path) -> None:
    """Copy the tokenizer and its like.

    Raises:
        InputError: one of these files cannot be read.
    """
    for name in carried(source):
        copy(source, name, target)


def carry_code(source: Folder, target: Path) -> None:
    """Copy the model's own code; it is never run.

    Raises:
        InputError: one of these files cannot be read.
    """
    for name in code_of(source):
        copy(source, name, target)


def copy(source: Folder, name: str, target: Path) -> None:
    """Copy one file into another folder, block by block.

    Raises:
        InputError: it cannot be read; see ``Folder.open``.
    """
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    with source.open(name) as stream, (target / name).open("xb") as copied:
        while block := read(stream, BLOCK, source.path / name):
            copied.write(block)
