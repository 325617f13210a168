"""Prompts: windows of text, encoded by a folder's tokenizer, or seeded random tokens.

Their number and length are in ``growkit.base.settings``; ``growkit.proof.modes`` cuts them.

Texts are untrusted files; each is read once, up to a limit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from growkit.base.errors import InputError, foreign, reason
from growkit.base.lazy import Tensor, torch
from growkit.base.settings import Settings
from growkit.base.tensors import Config
from growkit.engine.transformers_class import longest_context, quiet, tokens_of
from growkit.model.checkpoint.folder import (
    TOKENIZER_FILES,
    Folder,
    is_of_tokenizer,
    open_regular,
    read,
)

T = TypeVar("T")

MAX_TEXT = 1 << 22
"""Limit for the bytes read from a text: a million tokens, far more than a proof needs."""

LONGEST_DOCUMENT = 1 << 16
"""Limit in characters: the time of tokenizers grows faster than the length of unbroken text."""

DOCUMENT_SEPARATOR = "<|endoftext|>"
"""Conventional separator of documents in text files; each document is encoded on its own."""

MAX_TOKENS = 1 << 22
"""Limit for the tokens of all prompts: thirty megabytes of ids, and far more of other data."""

FEWEST = 8
"""Least number of tokens to predict in a text; fewer would prove nothing."""


@dataclass(frozen=True)
class Prompts:
    """Token ids, one tensor [tokens] per prompt, and the hash of the bytes read from the text."""

    windows: tuple[Tensor, ...]
    text_sha256: str | None

    def cut(self, prompts: int, length: int) -> Prompts:
        """Reduce to ``prompts`` evenly spread windows of at most ``length`` tokens.

        The windows of a short text are fewer, and are divided.
        """
        windows: Sequence[Tensor] = self.windows
        if len(windows) < prompts:
            parts = [part for window in windows for part in window.split(length)]
            windows = [part for part in parts if len(part) > 1]  # one token predicts nothing
        windows = _spread(windows, prompts)
        return replace(self, windows=tuple(window[:length] for window in windows))


def make_prompts(settings: Settings, folder: Path, config: Config) -> Prompts:
    """Make the prompts that the settings describe.

    Args:
        settings: text or random tokens, with the number and length of prompts.
        folder: the folder with the tokenizer.
        config: the model's config, for the vocabulary and the longest context.

    Raises:
        InputError: the text cannot be read or is too short, there is no tokenizer for it, or the
            config has no usable context length.
    """
    prompts, wanted = settings.amount
    longest = longest_context(config) or wanted
    if not isinstance(longest, int) or longest < 2:
        raise InputError(
            f"max_position_embeddings is {longest!r} in {folder}; at least 2 was expected"
        )
    length = min(wanted, longest)
    if settings.text is None:
        if prompts * length > MAX_TOKENS:
            raise InputError(
                f"{prompts:,} prompts of {length:,} tokens are too many to compare; "
                f"give fewer or shorter ones, with at most {MAX_TOKENS:,} tokens in all"
            )
        generator = torch.Generator().manual_seed(settings.seed)
        shape = (prompts, length)
        return Prompts(tuple(torch.randint(tokens_of(config), shape, generator=generator)), None)
    file, raw = Path(settings.text), read_text(settings.text)
    tokenizer = load_tokenizer(folder)
    ids = [
        torch.tensor(ids_of(tokenizer, document), dtype=torch.long) for document in documents(raw)
    ]
    begins = [(tokens, at) for tokens in ids for at in range(0, len(tokens) - 1, length)]
    predictions = sum(min(length, len(tokens) - at) - 1 for tokens, at in begins)
    if predictions < FEWEST:
        raise InputError(
            f"text {file} has only {predictions} tokens to predict; at least {FEWEST} are needed, "
            "give a longer one"
        )
    check_ids(ids, config, folder, file)
    windows = tuple(tokens[at : at + length] for tokens, at in _spread(begins, prompts))
    return Prompts(windows, hashlib.sha256(raw).hexdigest())


def check_ids(ids: Iterable[Tensor], config: Config, folder: Path, file: str | Path) -> None:
    """Refuse token ids of a text that the model's vocabulary does not have.

    Raises:
        InputError: an id is too large.
    """
    largest = max(int(tokens.max()) for tokens in ids if len(tokens))
    if largest >= config["vocab_size"]:
        raise InputError(
            f"the tokenizer in {folder} makes token {largest} of {file}, but the model's "
            f"vocab_size is {config['vocab_size']}; they do not belong together"
        )


def _spread(windows: Sequence[T], count: int) -> tuple[T, ...]:
    """Pick evenly spread windows of a text, since its beginning may be untypical."""
    count = min(count, len(windows))
    return tuple(windows[(2 * i + 1) * len(windows) // (2 * count)] for i in range(count))


def read_text(path: str, max_bytes: int = MAX_TEXT) -> bytes:
    """Read a UTF-8 text, or the beginning of a large one.

    Args:
        path: path of the file.
        max_bytes: limit in bytes.

    Raises:
        InputError: the file cannot be read, is empty, or is not UTF-8 text.
    """
    file = Path(path)
    try:
        with open_regular(file) as stream:
            content = read(stream, max_bytes + 1, file)
    except InputError as error:
        raise InputError(f"text {error}, or give another UTF-8 text") from None
    if len(content) > max_bytes:
        content = content[:max_bytes].decode("utf-8", "ignore").encode() or content
    try:
        content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"text {file} cannot be read ({reason(error)}); give a UTF-8 text file"
        ) from None
    if b"\0" in content:  # the rest may be a hole as large as any disk
        raise InputError(
            f"text {file} holds zero bytes, as sparse and binary files do; give a UTF-8 text file"
        )
    if not documents(content):
        raise InputError(
            f"text {file} {'holds only white space' if content else 'is empty'}, so it has fewer "
            "than 2 tokens in a row; give a longer one"
        )
    return content


def documents(content: bytes, *, strip: bool = True) -> list[str]:
    """Split a text into documents, and long documents into parts, at spaces if possible.

    Args:
        content: the text, in UTF-8.
        strip: whether spaces around parts are left out.
    """
    parts: list[str] = []
    for document in content.decode("utf-8").split(DOCUMENT_SEPARATOR):
        stripped, start = document.strip() if strip else document, 0
        while len(stripped) - start > LONGEST_DOCUMENT:
            limit = start + LONGEST_DOCUMENT
            end = stripped.rfind(" ", start + LONGEST_DOCUMENT // 2, limit)
            parts.append(stripped[start : end if end >= 0 else limit])
            start += len(parts[-1])
            while strip and stripped[start].isspace():
                start += 1
        parts.append(stripped[start:])
    return [part for part in parts if part]


def check_tokenizer(folder: Folder, instead: str = "") -> None:
    """Refuse a folder without tokenizer files; ``load_tokenizer`` checks that they load.

    Args:
        folder: the folder.
        instead: another remedy than to add the files, to end the sentence.

    Raises:
        InputError: the folder has no tokenizer file.
    """
    if not any(map(is_of_tokenizer, folder.names(*TOKENIZER_FILES))):
        raise InputError(f"{folder} has no tokenizer; add tokenizer.json{instead}")


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
"""Texts that distinguish tokenizers: words, numbers, spaces, scripts, marks, special tokens."""

SETTINGS = (
    *("chat_template", "model_max_length", "padding_side", "truncation_side"),
    *("clean_up_tokenization_spaces", "split_special_tokens", "model_input_names"),
)
"""Further settings of a tokenizer that are compared."""


def load_tokenizer(folder: Folder | Path) -> Any:
    """Load the tokenizer of a folder with transformers, from its files alone.

    Raises:
        InputError: the tokenizer names files elsewhere, or does not load.
    """
    from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

    opened = folder if isinstance(folder, Folder) else Folder(folder)
    opened.check_loaded()
    kind = opened.json("config.json").get("model_type") if opened.has("config.json") else None
    # Other keys in configs of classes that transformers lacks may not suit it.
    unknown = isinstance(kind, str) and kind not in CONFIG_MAPPING
    config = PreTrainedConfig.from_dict({"model_type": kind}) if unknown else None
    failure = f"{opened.path} has no tokenizer that loads"
    with quiet(), _silent(), foreign(failure, f"{_remedy(opened)}, or give no text"):
        return AutoTokenizer.from_pretrained(
            opened.path, config=config, local_files_only=True, trust_remote_code=False
        )


def _remedy(folder: Folder) -> str:
    """How to make a tokenizer load that does not."""
    if any(folder.json(name).get("auto_map") for name in folder.names("tokenizer_config.json")):
        return "growkit does not run the code of tokenizers, so save one without code"
    missing = [name for name in ("sentencepiece", "tiktoken") if find_spec(name) is None]
    if missing and not folder.has("tokenizer.json"):
        return f"install what transformers reads its files with (pip install {' '.join(missing)})"
    return "repair its files"


@contextmanager
def _silent() -> Iterator[None]:
    """Silence file descriptor 1, where the tokenizers library prints about settings it ignores."""
    try:
        kept = os.dup(1)
    except OSError:  # there is no such descriptor
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
    """Encode a text to ids, special tokens included.

    Raises:
        InputError: the tokenizer fails on it.
    """
    failure = f"the tokenizer in {tokenizer.name_or_path} fails on a text"
    with quiet(), foreign(failure, "repair its files"):
        return list(tokenizer(text)["input_ids"])


def first_difference(first: Any, second: Any) -> str | None:
    """The first trait in which two tokenizers differ; None if they are equivalent."""
    one, other = _traits(first), _traits(second)
    return next((trait for trait in one | other if one.get(trait) != other.get(trait)), None)


def _traits(tokenizer: Any) -> dict[str, Any]:
    """The traits of a tokenizer, by their names in messages."""
    traits: dict[str, Any] = {"the vocabulary": tokenizer.get_vocab()}
    failure = f"the tokenizer in {tokenizer.name_or_path} fails on its own special tokens"
    with quiet(), foreign(failure, "repair its files"):
        for name, token in tokenizer.special_tokens_map.items():
            words = list(map(str, token if isinstance(token, list) else [token]))
            traits[name] = [(word, tokenizer.convert_tokens_to_ids(word)) for word in words]
    traits["special tokens"] = sorted(map(str, tokenizer.all_special_tokens))
    traits |= {name: getattr(tokenizer, name, None) for name in SETTINGS}
    # Added tokens are matched first, with properties such as the spaces that they absorb.
    added = getattr(tokenizer, "added_tokens_decoder", {})
    traits["the properties of added tokens"] = [f"{n}: {added[n]!r}" for n in sorted(added)]
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = json.loads(backend.to_str()) if backend is not None else {}
    # Truncation and padding are left over from the last call.
    kept = {key: steps[key] for key in steps if key not in ("truncation", "padding")}
    if isinstance(model := kept.get("model"), dict):  # an affix that is empty is none
        kept["model"] = {key: value if value != "" else None for key, value in model.items()}
    traits["the way from texts to ids"] = kept
    special = tokenizer.all_special_tokens
    for text in (*PROBES, " ".join(special), *special):
        try:
            ids = ids_of(tokenizer, text)
            with quiet(), foreign("the tokenizer fails on its own ids", "repair its files"):
                outcome = ids, tokenizer.decode(ids)
        except InputError:
            outcome = None
        traits[f"the ids of {text!r}"] = outcome
    return traits
