"""The files beside the weights: the tokenizer and its like, which are copied as they are.

Whoever loads a folder with transformers and saves it again writes them anew: other spaces, defaults
filled in, files merged or split. So where bytes differ, what transformers reads from them counts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from growkit.checkpoint.carrying import carried
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.reading import read_json
from growkit.errors import InputError
from growkit.proof.oracle import quiet

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SAVED = (
    TOKENIZER,
    SETTINGS,
    "chat_template.jinja",
    "additional_chat_templates",
)
"""What transformers writes when it saves a tokenizer."""

VOCABULARIES = ("vocab.*", "merges.txt", "*.model", "*.tiktoken")
LEFT_OUT = (*VOCABULARIES, "special_tokens_map.json", "added_tokens.json", "chat_template.json")
"""What it then leaves out, because files above say the same."""

OF_THE_SAVING = frozenset(
    {
        *("transformers_version", "_from_model_config", "tokenizer_class", "processor_class"),
        *("name_or_path", "backend", "is_local", "local_files_only"),
    }
)
"""Keys that say how a file came about."""


def first_changed_companion(source: Path, target: Path) -> str | None:
    """The name of the first file beside the weights that says something else than the source's.

    Files that transformers saved again are the same if the tokenizers that it loads have the same
    vocabulary, special tokens, templates, lengths and steps from text to ids. Where no tokenizer
    loads, only bytes count. Files that the source lacks do not count unless they change that.
    """
    names = carried(Folder(source))
    changed = [name for name in names if not _same_bytes(source / name, target / name)]
    added = [name for name in carried(Folder(target)) if name not in names]
    saved = [name for name in (*changed, *added) if _is_saved_with_it(name, target)]
    if saved and _has_tokenizer(source):
        if not _same_tokenizer(source, target):
            return saved[0]
        if SETTINGS in changed and _contradict(source / SETTINGS, target / SETTINGS):
            return SETTINGS
        changed = [name for name in changed if name not in saved]
    return next((name for name in changed if not _same_json(source / name, target / name)), None)


def different_tokenizers(before: Path, after: Path) -> str | None:
    """In what the vocabularies of two folders differ, as a sentence; None if they do not.

    None as well where one of them has no tokenizer.
    """
    if not (_has_tokenizer(before) and _has_tokenizer(after)):
        return None
    first, second = _load(before), _load(after)
    if first is None and second is None:
        return None
    if first is None or second is None:
        return f"the tokenizer of {before if first is None else after} cannot be loaded"
    ids, others = first.get_vocab(), second.get_vocab()
    if ids == others:
        return None
    token = min(
        (token for token in ids.keys() | others.keys() if ids.get(token) != others.get(token)),
        key=lambda token: (ids.get(token, len(ids)), token),
    )
    was, became = _which(token, ids), _which(token, others)
    return f"token {token!r} is {was} in {before} and {became} in {after}"


def _which(token: str, ids: dict[str, int]) -> str:
    return f"number {ids[token]}" if token in ids else "none"


def _has_tokenizer(folder: Path) -> bool:
    patterns = (TOKENIZER, *VOCABULARIES)
    return any(True for pattern in patterns for _ in folder.glob(pattern))


def _is_saved_with_it(name: str, target: Path) -> bool:
    """Whether saving a tokenizer explains that a file is another, new or missing."""
    if any(Path(name).match(pattern) for pattern in LEFT_OUT):
        return not (target / name).exists()
    return name.split("/")[0] in SAVED


def _same_bytes(path: Path, other: Path) -> bool:
    return other.is_file() and path.read_bytes() == other.read_bytes()


def _same_json(path: Path, other: Path) -> bool:
    """Whether two JSON files say the same; keys without a value count as absent."""
    if path.suffix != ".json" or not other.is_file():
        return False
    try:
        first, second = read_json(path), read_json(other)
    except InputError:
        return False
    if path.name == GENERATION:
        first, second = _generation(first), _generation(second)
    return _given(first) == _given(second)


def _contradict(path: Path, other: Path) -> bool:
    """Whether two files of settings give one key different values; each may leave keys out.

    transformers lets one file overrule another, so that what it loads does not show everything.
    """
    try:
        first, second = _given(read_json(path)), _given(read_json(other))
    except InputError:
        return True
    pairs = [[_plain(each[key]) for each in (first, second)] for key in first.keys() & second]
    return any(was != now for was, now in pairs if not isinstance(was, list | dict))


def _plain(value: Any) -> Any:
    """A setting, or the text of a token that stands there with its properties."""
    return value.get("content", value) if isinstance(value, dict) else value


def _given(content: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in content.items()
        if value is not None and key not in OF_THE_SAVING
    }


def _generation(content: dict[str, Any]) -> dict[str, Any]:
    """With the defaults of transformers."""
    from transformers import GenerationConfig

    with quiet():
        try:
            complete: dict[str, Any] = GenerationConfig(**content).to_dict()
        except Exception:  # a value that makes no sense may raise anything
            return content
    return complete


def _same_tokenizer(source: Path, target: Path) -> bool:
    first, second = _load(source), _load(target)
    if first is None or second is None:
        return False
    return first.get_vocab() == second.get_vocab() and _behaviour(first) == _behaviour(second)


def _load(folder: Path) -> Any:
    """The tokenizer of a folder as transformers loads it, without running code; or None."""
    from transformers import AutoTokenizer

    with quiet():
        try:
            return AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception:  # a damaged tokenizer may raise anything
            return None


def _behaviour(tokenizer: Any) -> dict[str, Any]:
    """What else than the vocabulary decides on ids, and on how texts are laid out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    steps = json.loads(backend.to_str()) if backend is not None else {}
    settings = ("chat_template", "model_max_length", "padding_side", "truncation_side")
    return {
        # Cutting and padding belong to a call, and stay behind from the last one.
        "steps": {key: steps[key] for key in steps if key not in ("truncation", "padding")},
        "special": {name: str(token) for name, token in tokenizer.special_tokens_map.items()},
        **{name: getattr(tokenizer, name, None) for name in settings},
    }
