"""Texts to compare on: read once, as much as is needed, from an untrusted file."""

from pathlib import Path

from growkit.base.errors import InputError, reason
from growkit.checkpoint.folder import TOKENIZER_FILES, Folder, is_of_tokenizer, open_regular, read

MOST_TEXT = 1 << 22
"""Bytes that are read of a text; a million tokens are far more than a proof takes."""

LONGEST_DOCUMENT = 1 << 16
"""Characters; tokenizers take far more than twice as long for twice as many without a break."""

DOCUMENT_SEPARATOR = "<|endoftext|>"
"""What separates documents in text files by convention; each document is read on its own."""


def read_text(path: str, most: int = MOST_TEXT) -> bytes:
    """A UTF-8 text; of a large one, its beginning.

    Args:
        path: of the file.
        most: bytes that are read of it.

    Raises:
        InputError: it cannot be read, is empty, or is something else.
    """
    file = Path(path)
    try:
        with open_regular(file) as stream:
            content = read(stream, most + 1, file)
    except InputError as error:
        raise InputError(f"text {error}, or give another UTF-8 text") from None
    if len(content) > most:
        content = content[:most].decode("utf-8", "ignore").encode() or content
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text {file} cannot be read ({reason(error)}); give a UTF-8 text file"
        ) from None
    if not documents(content):
        raise InputError(
            f"text {file} {'holds blanks alone' if content else 'is empty'}, so it has fewer than "
            "2 tokens in a row; give a longer one"
        )
    return content


def documents(content: bytes) -> list[str]:
    """The documents of a text, and long ones in parts that begin with a word where they can."""
    parts: list[str] = []
    for document in content.decode("utf-8").split(DOCUMENT_SEPARATOR):
        whole, begin = document.strip(), 0
        while len(whole) - begin > LONGEST_DOCUMENT:
            most = begin + LONGEST_DOCUMENT
            end = whole.rfind(" ", begin + LONGEST_DOCUMENT // 2, most)
            parts.append(whole[begin : end if end >= 0 else most])
            begin += len(parts[-1])
            while whole[begin].isspace():
                begin += 1
        parts.append(whole[begin:])
    return [part for part in parts if part]


def check_tokenizer(folder: Folder) -> None:
    """Refuse a folder without a tokenizer to read a text with; whether one loads is seen later.

    Raises:
        InputError: there is no file that one could be made of.
    """
    if not any(map(is_of_tokenizer, folder.names(*TOKENIZER_FILES))):
        raise InputError(
            f"{folder} has no tokenizer; add tokenizer.json, or leave out --text to compare on "
            "random tokens"
        )
