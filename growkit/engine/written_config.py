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
from growkit.model.families.config_keys import PERIODS
from growkit.model.families.family import Family, first_index
from growkit.model.families.family_parts import PREDICTING, value_at, with_value
from growkit.model.model import Model

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

LAYER_KEYS = re.compile(
    r"(?!.*token).*(layer|attn|attention|block|idx|index|indices|pattern|types).*"
)
"""Names of keys that may have one entry per layer, or list the numbers of some layers."""

FOLDER_KEYS = {"architectures", "auto_map"}
"""Keys that name classes."""

MISSING: Any = object()
"""No value."""


def config_to_write(source: Model, planned: Config, family: Family) -> Config:
    """The ``config.json`` of a model that was made from a source.

    A model of another class gets the keys of its own class.

    Args:
        source: the source.
        planned: config of the planned model.
        family: its family.
    """
    before, named = source.config, family.named(planned)
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
    layers = family.sizes(before)["layers"], family.sizes(named)["layers"]
    if layers[0] != layers[1]:
        names |= _other_lists(rest, complete(before), complete(named), *layers)
    written: Config = dict(published)
    for key, value in ({key: now for key, (_, now) in changed.items()} | names).items():
        written = _with(written, key, value)
    try:
        now = complete(written)
    except InputError:  # a changed switch needs the value of a new key
        for key, (was, value) in changed.items():
            written = _with(written, key, value) if was is MISSING else written
        now = complete(written)
    wanted = complete(named)
    for key in sorted(wanted.keys() - names.keys()):
        if now.get(key) != wanted[key]:
            written = _with(written, key, named.get(key, wanted[key]))
    new = (key for key in changed if _has(written, key) and not _has(published, key))
    for key in sorted(key for key in new if key.partition(".")[0] not in FOLDER_KEYS):
        written = _without_need(written, key, complete)
    return written


def _has(config: Config, key: str) -> bool:
    part, _, last = key.rpartition(".")
    inside = value_at(config, part) if part else config
    return isinstance(inside, Mapping) and last in inside


def _without_need(config: Config, key: str, complete: Callable[[Config], Config]) -> Config:
    """The config without a new key, if the class takes its value from others.

    Otherwise, if it is a list of layers, without the periods from which the class would take it.
    """
    without = _with(config, key, MISSING)
    with suppress(InputError):
        if value_at(complete(without), key) == value_at(complete(config), key):
            return without
        with foreign("the config is not understood", "correct it"):  # a property is not saved
            computed = getattr(parsed(without), key, MISSING)
        if computed == value_at(config, key):
            return without
    return _without_periods(config, key, complete) if isinstance(config.get(key), list) else config


def _in_words(value: Any, read: Any, written: Any) -> Any:
    """A list of words that a class reads, such as kinds of layers, in the words of a publisher."""
    if not all(isinstance(words, list) for words in (value, read, written)) or read == written:
        return value
    words = {now: was for now, was in zip(read, written, strict=False) if isinstance(now, str)}
    return [words.get(word, word) if isinstance(word, str) else word for word in value]


def _without_periods(config: Config, listed: str, complete: Callable[[Config], Config]) -> Config:
    """The config without the keys from which its class would take a list that it has."""
    unlisted = _with(config, listed, MISSING)
    for key in filter(PERIODS.search, [*config]):
        other = config[key] + 1 if type(config[key]) is int else MISSING
        lists = [complete(_with(base, key, other)).get(listed) for base in (config, unlisted)]
        if lists[0] == config[listed] and lists[1] != complete(unlisted).get(listed):
            config = _with(config, key, MISSING)
    return config


def _changes(before: Config, after: Config, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Every key whose values differ, with both; a dot leads into a part of the config."""
    for key in dict.fromkeys([*before, *after]):
        was, now = before.get(key, MISSING), after.get(key, MISSING)
        if isinstance(was, dict) and isinstance(now, dict):
            yield from _changes(was, now, f"{path}{key}.")
        elif was is MISSING or now is MISSING or was != now:
            yield f"{path}{key}", was, now


def _with(config: Config, key: str, value: Any) -> dict[str, Any]:
    """The config with another value of a key, or without it."""
    if value is not MISSING:
        return dict(with_value(config, key, value))
    first, _, rest = key.partition(".")
    if rest:
        return {**config, first: _with(config[first], rest, value)} if _has(config, key) else config
    return {name: entry for name, entry in config.items() if name != first}


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


def unrolled(value: Any) -> list[Any]:
    """The entries of blocks that are repeated, ``[[block, times], …]``; empty for other lists."""
    try:
        return [entry for block, times in value for entry in [*block] * times]
    except (TypeError, ValueError):
        return []


def _other_lists(
    config: Config, before: Config, after: Config, count: int, more: int, first: int = 0
) -> dict[str, Any]:
    """The published lists and patterns of layers, for a deeper model.

    The class's own lists state the kind of each layer, and a new layer has the entry of the layers
    of its kind. Lists without such entries are left out.

    Args:
        config: the published config, without what the plan changes itself.
        before: config of the source, as the class completes it.
        after: that of the deeper model.
        count: number of layers of the source.
        more: that of the deeper model.
        first: the number of the first layer in lists of numbers.
    """
    lists = [
        (was, now)
        for was, now in ((before[key], after[key]) for key in before.keys() & after.keys())
        if isinstance(was, list) and isinstance(now, list) and (len(was), len(now)) == (count, more)
    ]
    old = [str([was[layer] for was, _ in lists]) for layer in range(count)]
    new = [str([now[layer] for _, now in lists]) for layer in range(more)]
    renewed: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and "model_type" not in value:
            start = first_index(value, count)
            inside = _other_lists(value, before, after, count, more, start)
            renewed |= {f"{key}.{name}": entry for name, entry in inside.items()}
        if not LAYER_KEYS.fullmatch(key) or not isinstance(value, str | list) or not value:
            continue
        listed = all(type(entry) is int and entry < first + count for entry in value)
        listed = listed and sorted({*value}) == value
        repeated = unrolled(value)
        entries = (
            [first + layer in value for layer in range(count)] if listed else repeated or value
        )
        if len(entries) != count:
            continue
        of_kind: dict[str, list[Any]] = {}
        for kind, entry in zip(old, entries, strict=True):
            if entry not in of_kind.setdefault(kind, []):
                of_kind[kind].append(entry)
        chosen = [of_kind.get(kind, []) for kind in new]
        anew = [entries[0] for entries in chosen if len(entries) == 1]
        if len(anew) != more:
            # A text is a word that has as many letters as there are layers.
            renewed |= {} if isinstance(value, str) else {key: MISSING}
        elif listed:
            renewed[key] = [layer for layer, entry in enumerate(anew, first) if entry]
        elif repeated:
            renewed[key] = [[anew, 1]]
        else:
            renewed[key] = "".join(anew) if isinstance(value, str) else anew
    return renewed
