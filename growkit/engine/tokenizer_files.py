"""The files that tokenizers of transformers are made of."""

from __future__ import annotations

from fnmatch import fnmatch

from growkit.base.errors import InputError
from growkit.checkpoint.folder import Folder

TEMPLATES = "additional_chat_templates"
"""The folder of these."""

FILES = (
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template*.jinja", f"{TEMPLATES}*"),
    *("vocab*", "*_vocab.json", "merges.txt", "bpe.codes", "dict.txt", "normalizer.json"),
    *("*.model", "*.model.*", "*.tiktoken", "*.tokenizer", "tekken.json", "byte_maps.json"),
    *("entity_vocab.json", "emoji.json", "word_shape.json", "word_pronunciation.json"),
)
"""Everything that a tokenizer of transformers is made of."""


def is_of_tokenizer(name: str) -> bool:
    """Whether a tokenizer of transformers may be made of a file, by its name in the folder."""
    inside = "/" not in name or name.startswith(f"{TEMPLATES}/")
    return inside and any(fnmatch(name, pattern) for pattern in FILES)


def check_tokenizer(folder: Folder) -> None:
    """Refuse a folder without a tokenizer to read a text with; whether one loads is seen later.

    Raises:
        InputError: there is no file that one could be made of.
    """
    if not any(map(is_of_tokenizer, folder.names(*FILES))):
        raise InputError(
            f"{folder} has no tokenizer; add tokenizer.json, or leave out --text to compare on "
            "random tokens"
        )
