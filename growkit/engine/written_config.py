"""The config.json of a grown model: the source's, as its publisher wrote it, with what grew.

Publishers use keys that a class reads in place of its own (``rope_theta``, ``block_ff_dim``), and
keys that only other software reads (``block_dim``). What a class would save lacks the former, and
software that knows no other names would take its own defaults. So every key stays as published,
sizes change under all their names, and a key is added only if the class would not compute the same
without it.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from growkit.base.errors import InputError, foreign
from growkit.base.tensors import Config
from growkit.engine.transformers_class import PROVENANCE_KEYS, parsed, resolved
from growkit.model.families.family import rearranged
from growkit.model.families.family_parts import MISSING, PREDICTING, value_at, with_value
from growkit.planning.plan import Lineage

KINDS = {
    "vocab": r"((padded|org|total)_)?vocab(ulary)?_size",
    "kv_heads": r"(num|n)_(kv|key_value|head_kv)(_heads)?|kv_n_heads|multi_query_group_num"
    r"|num_query_groups",
    "heads": r"(num|n)?_?(attention|attn|query|q)?_?heads?",
    "layers": r"(num|n)_(hidden_|decoder_|transformer_)?(layers?|blocks?)|depth",
    "experts": r"(moe_)?(num|n)_(routed_|local_|total_)?experts",
    "top_k": r".*experts_per_tok(en)?|(moe_)?(router_)?top_?k|moe_k",
    "predicting": PREDICTING.pattern,
    "ffn": r".*(intermediate|ffn?|feed_forward|inner|mlp)_(size|dim|hidden_size|hidden_dim)"
    r"|d_ff|d_inner|n_inner|(ffn?|feed_forward|mlp)_hidden_(size|dim)",
    "hidden": r"(hidden|model|block|conv|embed|embd|embedding|emb|d|n)_?"
    r"(dim|size|width|embd|embed|model|units)?(_in|_out)?|dim|width",
    "eps": r".*(eps|epsilon)",
}
"""The names of a key by its kind: equal numbers of one kind are one size under several names."""

FOLDER_KEYS = {"architectures", "auto_map"}
"""Keys that name classes."""


def config_to_write(lineage: Lineage) -> Config:
    """The ``config.json`` of a target.

    A model of another class than the source's gets the keys of its own class.

    Args:
        lineage: the steps to it.
    """
    source, family = lineage.source, lineage.target.family
    before, named = source.config, family.named(lineage.target.config)
    if before.get("model_type") != named.get("model_type"):
        return named
    published = source.published or before
    by_class = published != before or family.description is not None

    def complete(config: Config) -> Config:
        read = resolved(config) if by_class else None
        known = {**config, **(read or {})}
        completed = family.complete({k: v for k, v in known.items() if k not in source.nested_keys})
        return {key: value for key, value in completed.items() if key not in PROVENANCE_KEYS}

    changed = {
        key: (was, _in_words(now, was, published.get(key)))
        for key, was, now in _changes(before, named)
    }
    rest = {key: value for key, value in published.items() if key not in changed}
    of_class = {*family.axes, *family.ratios, *family.defaults}
    rest = {key: value for key, value in rest.items() if key not in of_class}
    names = other_names(rest, changed)
    if lineage.layers:
        # Other software has its own words for a kind of layers that the source lacks.
        new_kind = any(layer.entries for layer in lineage.layers)
        moved = _changes(rest, rearranged(rest, lineage.layers, source.sizes["layers"]))
        names |= {key: MISSING if new_kind else now for key, _, now in moved}
    names |= {key: MISSING for plan in lineage.plans for key in plan.contradicting}
    written = dict(published)
    for key, value in ({key: now for key, (_, now) in changed.items()} | names).items():
        written = with_value(written, key, value)
    try:
        now = complete(written)
    except InputError:  # a changed switch needs the value of a new key
        for key, (was, value) in changed.items():
            written = with_value(written, key, value) if was is MISSING else written
        now = complete(written)
    wanted = complete(named)
    for key in sorted(wanted.keys() - names.keys()):
        if now.get(key) != wanted[key]:
            written = with_value(written, key, named.get(key, wanted[key]))
    new = (key for key in changed if value_at(published, key, MISSING) is MISSING)
    for key in sorted(key for key in new if key.partition(".")[0] not in FOLDER_KEYS):
        written = _without_need(written, key, complete)
    return written


def _without_need(config: Config, key: str, complete: Callable[[Config], Config]) -> Config:
    """The config without a new key, if the class takes its value from others."""
    without = with_value(config, key, MISSING)
    with suppress(InputError):
        if value_at(complete(without), key, MISSING) == value_at(complete(config), key):
            return without
        with foreign("the config is not understood", "correct it"):  # a property is not saved
            computed = getattr(parsed(without), key, MISSING)
        if computed == value_at(config, key):
            return without
    return config


def _in_words(value: Any, read: Any, written: Any) -> Any:
    """A list of words that a class reads, such as kinds of layers, in the words of a publisher."""
    if not all(isinstance(words, list) for words in (value, read, written)) or read == written:
        return value
    words = {now: was for now, was in zip(read, written, strict=False) if isinstance(now, str)}
    return [words.get(word, word) if isinstance(word, str) else word for word in value]


def _changes(before: Config, after: Config, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every key whose values differ, with both; a dot leads into a part of the config."""
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key, MISSING), after.get(key, MISSING)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _changes(was, now, f"{path}{key}.")
        elif was is MISSING or now is MISSING or was != now:
            yield f"{path}{key}", was, now


# Other names of what changed


def other_names(config: Config, changed: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """The numbers of a config that repeat a changed one of their kind, with their new values.

    They may stand in a list, once for each layer.
    """
    renamed: dict[str, Any] = {}
    for key, value in config.items():
        numbers = value if isinstance(value, list) and value else [value]
        kind = _kind(key)
        new = {
            now
            for name, (was, now) in changed.items()
            if kind and _is_number(now) and numbers == [was] * len(numbers) and _kind(name) == kind
        }
        if len(new) == 1 and all(map(_is_number, numbers)):
            renamed[key] = [*new] * len(value) if isinstance(value, list) else new.pop()
    return renamed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _kind(key: str) -> str | None:
    """The kind of a key; see ``KINDS``."""
    last = key.rpartition(".")[2]
    return next((kind for kind, names in KINDS.items() if re.fullmatch(f"(?i){names}", last)), None)
