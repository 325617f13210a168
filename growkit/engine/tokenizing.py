"""What a folder's tokenizer does with texts: ids, special tokens, layout; loaded in one place."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from growkit.base.errors import InputError, foreign
from growkit.checkpoint.folder import Folder
from growkit.engine.inert import check_files_run_nothing, check_tokenizer_reads_nothing_else
from growkit.engine.oracle import quiet

PROBES = (
    "The quick brown fox, in 1984: it's “jumped”!",
    "  two  spaces,\ttabs\n\nand\r\nlines   ",
    "naïve café, ÅÉÎ, ﬁne — Ǆ, Straße, İstanbul",
    "数字と漢字 русский العربية हिन्दी ไทย 한국어",
    "🙂👩‍👩‍👧 \u200b\u00a0\ufeff e\u0301 \U0001d518",
    "def f(x):\n    return x**2  # 0xFF 1e-5 a_b camelCase",
    "<s> </s> <|endoftext|> <pad> <unk> [CLS] [MASK] <|im_start|>user",
    "",
)
"""Texts on which tokenizers part: words, numbers, white space, scripts, marks, special tokens."""

SETTINGS = (
    *("chat_template", "model_max_length", "padding_side", "truncation_side"),
    *("clean_up_tokenization_spaces", "split_special_tokens", "model_input_names"),
)
"""What else decides on how texts are laid out."""


def load_tokenizer(folder: Folder | Path) -> Any:
    """The tokenizer of a folder as transformers loads it, from its files alone.

    Raises:
        InputError: it names files elsewhere, or does not load.
    """
    from transformers import AutoTokenizer

    opened = folder if isinstance(folder, Folder) else Folder(folder)
    check_files_run_nothing(opened)
    check_tokenizer_reads_nothing_else(opened)
    failure = foreign(f"{opened.path} has no tokenizer that loads", "add or repair tokenizer.json")
    with quiet(), _silent(), failure:
        return AutoTokenizer.from_pretrained(
            opened.path, local_files_only=True, trust_remote_code=False
        )


@contextmanager
def _silent() -> Iterator[None]:
    """Without what the tokenizers library prints on stdout, past Python, of settings it ignores."""
    try:
        kept = os.dup(1)
    except OSError:  # there is none
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def ids_of(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text, special tokens included.

    Raises:
        InputError: the tokenizer fails on it.
    """
    failure = f"the tokenizer in {tokenizer.name_or_path} fails on a text"
    with quiet(), foreign(failure, "repair its files"):
        return list(tokenizer(text)["input_ids"])


def first_difference(first: Any, second: Any) -> str | None:
    """In what two tokenizers differ; None if they do the same.

    Args:
        first: a tokenizer.
        second: another.
    """
    if first.get_vocab() != second.get_vocab():
        return "the vocabulary"
    one, other = _settings(first), _settings(second)
    for key in one | other:
        if one.get(key) != other.get(key):
            return key
    if _added(first) != _added(second):
        return "the properties of added tokens"
    if _steps(first) != _steps(second):
        return "the way from texts to ids"
    for text in (*PROBES, " ".join(first.all_special_tokens), *first.all_special_tokens):
        if _outcome(first, text) != _outcome(second, text):
            return f"the ids of {text!r}"
    return None


def _outcome(tokenizer: Any, text: str) -> Any:
    try:
        ids = ids_of(tokenizer, text)
        with quiet(), foreign("the tokenizer fails on its own ids", "repair its files"):
            return ids, tokenizer.decode(ids)
    except InputError:
        return None


def _settings(tokenizer: Any) -> dict[str, Any]:
    special: dict[str, Any] = {}
    failure = f"the tokenizer in {tokenizer.name_or_path} fails on its own special tokens"
    with quiet(), foreign(failure, "repair its files"):
        for name, token in tokenizer.special_tokens_map.items():
            words = list(map(str, token if isinstance(token, list) else [token]))
            special[name] = [(word, tokenizer.convert_tokens_to_ids(word)) for word in words]
    special["special tokens"] = sorted(map(str, tokenizer.all_special_tokens))
    return special | {name: getattr(tokenizer, name, None) for name in SETTINGS}


def _added(tokenizer: Any) -> list[str]:
    """Tokens that are cut out before all else, with what belongs to them, such as spaces."""
    found = getattr(tokenizer, "added_tokens_decoder", {})
    return [f"{number}: {token!r}" for number, token in sorted(found.items())]


def _steps(tokenizer: Any) -> Mapping[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = json.loads(backend.to_str()) if backend is not None else {}
    # Cutting and padding belong to a call, and stay behind from the last one.
    return {key: steps[key] for key in steps if key not in ("truncation", "padding")}
