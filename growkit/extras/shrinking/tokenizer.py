"""Tokenizers with fewer tokens, which encode what is left as before.

A text whose tokens are all kept is encoded in the same pieces:

- BPE merges the pair of the lowest rank, again and again. ``needed`` adds the pieces on the way to
  every token. Then all merges of the text are kept, and at each step the lowest of them is the one
  of before, as there are fewer others.
- Unigram chooses the most probable pieces, and WordPiece the longest; both are still there.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from growkit.base.errors import InputError
from growkit.extras.shrinking.token_ids import with_new_ids
from growkit.model.checkpoint.folder import GENERATION, TEMPLATES, Folder, is_of_tokenizer, matches
from growkit.model.checkpoint.publishing import write_json

TOKENIZER, SETTINGS, ADDED = "tokenizer.json", "tokenizer_config.json", "added_tokens.json"

HELD = (TOKENIZER, SETTINGS, ADDED, "special_tokens_map.json", "chat_template*", f"{TEMPLATES}/*")
"""Files of a tokenizer that stay; others repeat the vocabulary."""

BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token for a byte."""

Content = dict[str, Any]
"""The contents of ``tokenizer.json``."""


def read_tokenizer(folder: Folder) -> Content:
    """Read the steps and the vocabulary of a tokenizer.

    Raises:
        InputError: the folder has no tokenizer that can be described by ``tokenizer.json``.
    """
    if folder.has(TOKENIZER):
        content = folder.json(TOKENIZER)
    else:
        from growkit.engine.prompts import check_tokenizer, load_tokenizer  # imports torch

        check_tokenizer(folder)
        backend = getattr(load_tokenizer(folder), "backend_tokenizer", None)
        if backend is None:
            raise InputError(
                f"the tokenizer in {folder} runs in Python alone, so its vocabulary cannot be "
                f"trimmed; save one with {TOKENIZER}"
            )
        content = json.loads(backend.to_str())
    kind = _kind(content)
    if kind not in KINDS:
        raise InputError(
            f"the tokenizer in {folder} is of type {kind!r}, whose vocabulary cannot be trimmed; "
            f"one of {', '.join(KINDS)} was expected"
        )
    return content


def _kind(content: Content) -> str:
    model = content.get("model")
    model = model if isinstance(model, dict) else {}
    return str(model.get("type") or ("BPE" if "merges" in model else ""))


def ids_by_token(content: Content) -> dict[str, int]:
    """The ids of all tokens, those added to the vocabulary included."""
    vocabulary = content["model"]["vocab"]
    if isinstance(vocabulary, list):  # Unigram
        vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
    return {**vocabulary, **{token["content"]: token["id"] for token in content["added_tokens"]}}


def needed(content: Content, used: Collection[int]) -> set[int]:
    """Add to some tokens all those without which a tokenizer would not make them.

    Args:
        content: the tokenizer.
        used: ids of the tokens.

    Returns:
        The ids of these tokens, of those on the way to them, of added and unknown ones, of those
        that are put around texts, and of what stands for single bytes.
    """
    ids, model = ids_by_token(content), content["model"]
    kept = {*used, *(token["id"] for token in content["added_tokens"])}
    kept |= {*_ids_of_step(content.get("post_processor"))}
    steps = [content.get(step) for step in ("normalizer", "pre_tokenizer", "decoder")]
    by_bytes = '"ByteLevel"' in json.dumps(steps)
    kept |= {
        number
        for token, number in ids.items()
        if BYTE.fullmatch(token)
        or (by_bytes and len(_letters(token, model)) == 1)
        or token == model.get("unk_token")
    }
    if _kind(content) == "Unigram":
        scores = [score for _, score in model["vocab"]]
        kept.add(scores.index(min(scores)))  # unknown characters cost more than the least probable
        kept |= {model["unk_id"]} if model.get("unk_id") is not None else set()
    if _kind(content) == "BPE":
        names = {number: token for token, number in ids.items()}
        ranks = {pair: rank for rank, pair in enumerate(_merges(model))}
        for number in [*kept]:
            pieces = _on_the_way(names.get(number, ""), ranks, model)
            kept |= {ids[piece] for piece in pieces if piece in ids}
    return kept


def _merges(model: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The pairs that are merged, the lowest rank first; older files join them by a space."""
    for pair in model["merges"]:
        first, second = pair.split(" ") if isinstance(pair, str) else pair
        yield first, second


def _letters(token: str, model: Mapping[str, Any]) -> list[str]:
    """The pieces from which merges begin; a prefix or suffix marks those in a word, or its end."""
    prefix = model.get("continuing_subword_prefix") or ""
    suffix = model.get("end_of_word_suffix") or ""
    inside = len(token) > len(prefix) and token.startswith(prefix)
    rest = token.removeprefix(prefix) if inside else token
    ends = len(rest) > len(suffix) and rest.endswith(suffix)
    rest = rest.removesuffix(suffix) if ends else rest
    letters = [prefix + letter if at or inside else letter for at, letter in enumerate(rest)]
    return [*letters[:-1], letters[-1] + suffix] if ends else letters


def _on_the_way(
    token: str, ranks: Mapping[tuple[str, str], int], model: Mapping[str, Any]
) -> set[str]:
    """The pieces that are merged into a token."""
    pieces, prefix = _letters(token, model), model.get("continuing_subword_prefix") or ""
    passed = {*pieces}
    while True:
        pairs = [*pairwise(pieces)]
        known = [pair for pair in pairs if pair in ranks]
        if not known:
            return passed if len(pieces) == 1 else set()
        at = pairs.index(min(known, key=ranks.__getitem__))
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1].removeprefix(prefix)]
        passed.add(pieces[at])


def new_ids(content: Content, kept: Sequence[int]) -> dict[int, int]:
    """New ids by old ones: the indices of kept ones; added tokens without a row come behind."""
    added = {token["id"] for token in content["added_tokens"]}
    return {number: at for at, number in enumerate([*kept, *sorted(added.difference(kept))])}


def trimmed(content: Content, kept: Sequence[int]) -> Content:
    """The tokenizer with some of its tokens alone.

    Args:
        content: the tokenizer.
        kept: the ids of these tokens, in ascending order; see ``new_ids``.
    """
    new = new_ids(content, kept)
    model = KINDS[_kind(content)](content["model"], new)
    added = [{**token, "id": new[token["id"]]} for token in content["added_tokens"]]
    content = {**content, "model": model, "added_tokens": added}
    ids = ids_by_token(content)
    content["post_processor"] = _renumbered(content.get("post_processor"), ids)
    if isinstance(padding := content.get("padding"), dict):
        content["padding"] = {**padding, "pad_id": ids.get(padding["pad_token"], 0)}
    return content


def _listed(model: Mapping[str, Any], new: Mapping[int, int]) -> Content:
    """The model of Unigram: pieces with their scores, in the order of their ids."""
    vocabulary = [entry for number, entry in enumerate(model["vocab"]) if number in new]
    unknown = model.get("unk_id")
    unknown = None if unknown is None else new[unknown]
    return {**model, "vocab": vocabulary, "unk_id": unknown}


def _named(model: Mapping[str, Any], new: Mapping[int, int]) -> Content:
    """The model of WordPiece or WordLevel: ids by pieces."""
    names = {token: new[number] for token, number in model["vocab"].items() if number in new}
    return {**model, "vocab": names}


def _merged(model: Mapping[str, Any], new: Mapping[int, int]) -> Content:
    """The model of BPE: pieces, and the pairs whose parts and whole are among them."""
    reduced = _named(model, new)
    prefix, names = model.get("continuing_subword_prefix") or "", reduced["vocab"]
    pairs = zip(model["merges"], _merges(model), strict=True)
    reduced["merges"] = [
        pair
        for pair, (first, second) in pairs
        if {first, second, first + second.removeprefix(prefix)} <= names.keys()
    ]
    return reduced


KINDS: dict[str, Callable[[Mapping[str, Any], Mapping[int, int]], Content]] = {
    "BPE": _merged,
    "Unigram": _listed,
    "WordPiece": _named,
    "WordLevel": _named,
}
"""The kinds of vocabularies, and how each is trimmed."""


def _ids_of_step(step: Any) -> Iterator[int]:
    """The ids of tokens that a step after encoding names."""
    match step:
        case [str(), int(number)]:
            yield number
        case {"tokens": list(), "ids": list(numbers)}:
            yield from numbers
        case dict() | list():
            for value in step.values() if isinstance(step, dict) else step:
                yield from _ids_of_step(value)


def _renumbered(step: Any, ids: Mapping[str, int]) -> Any:
    """A step after encoding with the new ids of the tokens that it names."""
    match step:
        case [str(token), int()]:
            return [token, ids[token]]
        case {"tokens": list(tokens), "ids": list()}:
            return {**step, "ids": [ids[token] for token in tokens]}
        case dict():
            return {key: _renumbered(value, ids) for key, value in step.items()}
        case list():
            return [_renumbered(value, ids) for value in step]
    return step


def write_trimmed(folder: Folder, content: Content, kept: Sequence[int]) -> None:
    """Trim the tokenizer that was copied into a folder.

    Args:
        folder: the folder.
        content: the tokenizer as it was.
        kept: see ``trimmed``.
    """
    new = new_ids(content, kept)
    for name in folder.names():
        if is_of_tokenizer(name) and not matches(name, HELD):
            (folder.path / name).unlink()
    write_json(folder.path / TOKENIZER, trimmed(content, kept))
    if folder.has(SETTINGS):
        settings = folder.json(SETTINGS)
        if isinstance(decoder := settings.get("added_tokens_decoder"), dict):
            settings["added_tokens_decoder"] = {
                str(new[int(number)]): token
                for number, token in decoder.items()
                if number.isdecimal() and int(number) in new
            }
        write_json(folder.path / SETTINGS, settings)
    if folder.has(ADDED):
        added = folder.json(ADDED)
        write_json(folder.path / ADDED, {t: new[n] for t, n in added.items() if n in new})
    if folder.has(GENERATION):
        write_json(folder.path / GENERATION, with_new_ids(folder.json(GENERATION), new))
