"""A tokenizer of transformers as settings of a GGUF file, with which llama.cpp tokenizes alike.

llama.cpp has pieces of sentencepiece, which it merges in the order of their scores, and byte-level
BPE, for which it knows some rules that divide a text into words by name (``src/llama-vocab.cpp`` in
https://github.com/ggml-org/llama.cpp).
"""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby, product
from typing import Any

from growkit.base.tensors import Config
from growkit.engine.prompts import check_tokenizer, load_tokenizer
from growkit.model.checkpoint.folder import Folder

NORMAL, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 3, 4, 5, 6
"""Kinds of tokens."""

NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Names of special tokens in transformers, and in the settings."""

AFFIXES = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
UNMERGED = -1e6
"""Score of tokens that no merge makes."""

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPACE = "▁"
"""Stands for a space in the pieces of sentencepiece."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
BY_THREE, ONE_BY_ONE = WORDS % r"\p{N}{1,3}", WORDS % r"\p{N}"
RULES = {
    ((BY_THREE,), True): "llama-bpe",
    ((BY_THREE,), False): "smaug-bpe",
    ((ONE_BY_ONE,), False): "qwen2",
    (("GPT-2",), False): "gpt-2",
    (("digits", "GPT-2"), False): "smollm",
}
"""llama.cpp's name of a rule, and of whether a word that is a token is taken whole."""

PREPEND = {"type": "Prepend", "prepend": SPACE}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "invert": False}
METASPACE = {"type": "Metaspace", "replacement": SPACE, "split": False}
SPACES: list[tuple[list[Any], Any, bool]] = [
    ([PREPEND, REPLACE], None, True),
    ([REPLACE], None, False),
    ([REPLACE], {**SPLIT, "behavior": "MergedWithPrevious"}, False),
    ([], {**METASPACE, "prepend_scheme": "always"}, True),
    ([], {**METASPACE, "prepend_scheme": "first"}, True),
    ([], {**METASPACE, "prepend_scheme": "never"}, False),
]
"""Normalizers, the pre-tokenizer, and whether a space is put before a text."""


def tokenizer_settings(folder: Folder, config: Config) -> dict[str, Any]:
    """The settings of a tokenizer, without ``tokenizer.`` before their names.

    Args:
        folder: the folder of the tokenizer.
        config: the config of the model.

    Raises:
        ValueError: there is no tokenizer, or llama.cpp has none that does the same.
    """
    check_tokenizer(folder)
    tokenizer = load_tokenizer(folder)
    if not getattr(tokenizer, "backend_tokenizer", None):
        raise ValueError(f"{type(tokenizer).__name__} is written in Python")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    model = content["model"]
    if model["type"] != "BPE" or any(map(model.get, AFFIXES)):
        raise ValueError(f"llama.cpp has no equal of its {model['type']}")
    tokens, kinds = _tokens(content, config["vocab_size"])
    of_kind = _pieces if model["byte_fallback"] else _byte_level
    settings = {"ggml.tokens": tokens, "ggml.token_type": kinds, **of_kind(content, tokens, kinds)}
    for name, key in NAMED.items():
        numbers = getattr(tokenizer, f"{name}_token_id"), config.get(f"{name}_token_id")
        settings |= {f"ggml.{key}_token_id": one for one in numbers[::-1] if type(one) is int}
    settings |= _ends(tokenizer, settings)
    template = tokenizer.chat_template
    return settings | ({"chat_template": template} if isinstance(template, str) else {})


def _tokens(content: Mapping[str, Any], count: int) -> tuple[list[str], list[int]]:
    """The text and the kind of every token; the model may have more than the tokenizer."""
    vocab, single = content["model"]["vocab"], content["model"]["byte_fallback"]
    texts = {token: text for text, token in vocab.items()}
    kinds = {token: BYTE if single and text in BYTES else NORMAL for text, token in vocab.items()}
    for added in content["added_tokens"]:
        special, text = added["special"], added["content"]
        texts[added["id"]] = text if special else text.replace(SPACE, " ")
        kinds[added["id"]] = CONTROL if special else USER_DEFINED
    if max(texts) >= count:
        raise ValueError(f"it has token {max(texts)}, and the model has {count} of them")
    filled = [texts.get(token, f"[PAD{token}]") for token in range(count)]
    if len({*filled}) < count or "" in filled:
        raise ValueError("two of its tokens have the same text, or one has none")
    return filled, [kinds.get(token, UNUSED) for token in range(count)]


def _pieces(
    content: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    """The settings of sentencepiece, where any two pieces that make a piece can be merged."""
    normalizer, words = content["normalizer"] or {"normalizers": []}, content["pre_tokenizer"]
    steps = normalizer.get("normalizers", [normalizer])
    prefixed = [prefix for *known, prefix in SPACES if known == [steps, words]]
    if not prefixed or kinds.count(BYTE) < len(BYTES):
        raise ValueError("it replaces spaces, or single bytes, otherwise than sentencepiece")
    pieces = {text for text, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    merges = [tuple(pair) for pair in content["model"]["merges"]]
    pairs = ((text[:at], text[at:]) for text in pieces for at in range(1, len(text)))
    expected = {pair for pair in pairs if all(len(one) == 1 or one in pieces for one in pair)}
    order = [text for text, _ in groupby(map("".join, merges))]
    if expected != {*merges} or len({*order}) < len(order):
        raise ValueError("no scores of its tokens give the order of its merges")
    scores = {text: -float(rank) for rank, text in enumerate(order)}
    return {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.scores": [scores.get(text, UNMERGED) for text in tokens],
        "ggml.add_space_prefix": prefixed[0],
    }


def _byte_level(
    content: Mapping[str, Any], tokens: Sequence[str], kinds: Sequence[int]
) -> dict[str, Any]:
    """The settings of byte-level BPE; as llama.cpp's converter does, NFC is left out."""
    normalizer, words = content["normalizer"] or {}, content["pre_tokenizer"] or {}
    steps, whole = words.get("pretokenizers", [words]), content["model"]["ignore_merges"]
    rule = tuple(filter(None, map(_rule, steps)))
    name = RULES.get((rule, whole)) if normalizer.get("type", "NFC") == "NFC" else None
    if steps[-1].get("type") != "ByteLevel":
        raise ValueError("it is not byte-level BPE, and has no tokens for single bytes")
    if name is None:
        raise ValueError("growkit knows no name that llama.cpp has for how it divides text")
    merges = [" ".join(pair) for pair in content["model"]["merges"]]
    return {"ggml.model": "gpt2", "ggml.pre": name, "ggml.merges": merges}


def _rule(step: Mapping[str, Any]) -> str:
    """A step that divides text, in a word or as its regular expression; empty for none."""
    kind = step.get("type")
    if kind == "ByteLevel" and not step["add_prefix_space"]:
        return "GPT-2" if step["use_regex"] else ""
    if kind == "Digits" and step["individual_digits"]:
        return "digits"
    if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
        return str(step["pattern"].get("Regex", "other"))
    return "other"


def _ends(tokenizer: Any, settings: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the tokenizer adds its first and its last token to a text."""
    bare, full = (tokenizer("a", add_special_tokens=add).input_ids for add in (False, True))
    first, last = ([settings.get(f"ggml.{end}_token_id")] for end in ("bos", "eos"))
    for begins, ends in product((False, True), repeat=2):
        if full == first * begins + bare + last * ends:
            return {"ggml.add_bos_token": begins, "ggml.add_eos_token": ends}
    raise ValueError("it adds other tokens to a text than the first and the last")
