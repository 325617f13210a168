"""Comparison of two configs as their classes resolve them, key by key.

Every setting is equal, is a size, which the tensors show, or is one that the logits of any two
tokens show. Every other difference makes another model.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from copy import copy
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from growkit.base.errors import InputError
from growkit.base.limits import within
from growkit.base.tensors import TORCH_NAMES, Config
from growkit.engine.calls import Call
from growkit.engine.class_weights import class_weights
from growkit.engine.device import CPU
from growkit.engine.layerwise import Layerwise
from growkit.engine.loader import LAYERS as LAYER_NUMBERS
from growkit.engine.loader import loading
from growkit.engine.long_text_settings import THRESHOLD
from growkit.engine.metrics import error_of
from growkit.engine.rotary import rotary_of
from growkit.engine.strict import strict_float64
from growkit.engine.transformers_class import PROVENANCE_KEYS, aliases, longest_context, resolved
from growkit.engine.user_family import CONTEXT, shown_by_tensors
from growkit.engine.written_config import other_names
from growkit.model.checkpoint.reading import Checkpoint, rounds
from growkit.model.families.config_keys import (
    EXPERTS,
    GROUPS,
    HEADS,
    KV_HEADS,
    LAYERS,
    SCALING,
    TOP_K,
    WIDTH,
    earlier_keys,
)
from growkit.model.families.family import Family, by_layer, first_index, known_family
from growkit.model.families.family_parts import (
    BALANCING,
    LISTS,
    MISSING,
    PREDICTING,
    Experts,
    leaves,
    value_at,
    with_value,
)
from growkit.model.families.family_yaml import TIED
from growkit.planning.plan import Lineage
from growkit.proof.fingerprint import question

SHARED = frozenset(
    {"vocab_size", "max_position_embeddings", "rope_parameters"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
)
"""Keys with the same meaning in every class that has them."""

FREE = frozenset({"use_cache"})
"""Keys that are only how a model is run, not what it computes."""

DTYPES = frozenset({"dtype", "torch_dtype"})
"""Keys that parts of a config may repeat."""

IN_CACHES = frozenset({"sliding_window", "layer_types", "attention_chunk_size", "per_layer_config"})
"""Keys that caches follow, even if the model's class ignores them."""

WINDOWS = IN_CACHES | {"use_sliding_window", "max_window_layers"}
"""Keys for the attention windows, which are compared layer by layer (``_windows``)."""

UNAFFECTED = 1e-12
"""Relative difference of logits up to which a setting has no effect on them."""

Shown = Callable[[str, Any, Any], bool | None]
"""Whether logits show which value of a key a model has, the source's or the target's; None if it
cannot run with the other one."""


def in_order(was: Sequence[object], now: Sequence[object]) -> bool:
    """Whether the list of the deeper model has the other's entries in order.

    Prompts for long texts show which of its layers have them.
    """
    fewer, more = sorted((was, now), key=len)
    rest = iter(more)
    return all(entry in rest for entry in fewer)


def different_settings(
    first: Config,
    second: Config,
    shown: Shown,
    layers: tuple[int, int] | None = None,
    path: str = "",
) -> tuple[list[str], list[str]]:
    """Find the keys with different values in two complete configs.

    Every setting is equal, is a size, which the tensors show, or is one that the logits of any two
    tokens show; else it makes another model. Between two classes, the keys that both have and the
    windows of all layers are compared. A key that only the target has is compared with what the
    source's family computes, or else with the default of its class.

    Args:
        first: config of the source.
        second: config of the target.
        shown: whether logits show that one model has the other's value.
        layers: their numbers of layers; None for what the configs say.
        path: of the part of a config that the two are, with a dot at the end.

    Returns:
        The keys that make another model, and the keys that are only reported.
    """
    changed, named = list[str](), list[str]()
    follow, one_class = _follow_experts(first, second), _of_one_class(first, second)
    layers = layers or (layers_of(first), layers_of(second))
    pair = _comparable(first, second)
    for key in sorted(pair.keys):
        configs = zip((pair.first, pair.second), layers, strict=True)
        was, now = (_entries(config, count, key, MISSING) for config, count in configs)
        by_layer = key in WINDOWS or (one_class and key not in SHARED)
        name = f"{path}{pair.names.get(key, key)}"
        if (
            (was == now or follow.get(key, MISSING) == now)
            # No class runs the layers that predict later tokens.
            or (PREDICTING.fullmatch(key) and not now)
            or (key == "vocab_size" and type(was) is type(now) is int and was < now)
            or (by_layer and _deeper(was, now, layers) and in_order(was, now))
            or (path and key in DTYPES and None in (was, now))
            or (one_class and _is_size(key, pair.first, pair.second))
            or (one_class and layers[0] != layers[1] and _types_follow(key, was, second))
            or (not one_class and _means_the_same(key, was, first, second))
            # Caches of a decoder without its encoder have as many layers as the key of this name.
            or ((was, now) == layers and key == aliases(second).get("num_hidden_layers"))
        ):
            continue
        if isinstance(was, dict) and isinstance(now, dict) and key.endswith("config"):
            inside = different_settings(was, now, shown, layers, f"{name}.")
            changed += inside[0]
            named += inside[1]
        elif key in FREE or (key not in follow and shown(f"{path}{key}", was, now)):
            named.append(name)
        else:
            changed.append(name)
    if not path and one_class:
        changed = [key for key in changed if not _is_derived(key, first, second)]
    return changed, [*named, *sorted(pair.unknown)]


def _of_one_class(first: Config, second: Config) -> bool:
    return bool(first.get("model_type") == second.get("model_type"))


class _Comparable(NamedTuple):
    """Two configs with the same keys for the same settings.

    Attributes:
        first: that of the source.
        second: that of the target.
        keys: keys to compare.
        names: names in messages, where they differ from the keys.
        unknown: keys of settings of which the source says nothing.
    """

    first: Config
    second: Config
    keys: Set[str]
    names: Mapping[str, str] = {}
    unknown: Set[str] = frozenset()


def _comparable(first: Config, second: Config) -> _Comparable:
    """Name equal settings alike in two configs.

    What only the target of another class has is compared with what the source's family computes,
    or with the default of its class; but no default says how many tokens or experts are used.
    """
    if _of_one_class(first, second):
        was, now = _with_sizes(first), _with_sizes(second)
        keys = (was.keys() | now.keys()) - PROVENANCE_KEYS
        return _Comparable(was, now, keys - restated(second, now.keys() - was.keys()))
    was, now = dict(_in_shared_names(first)), _in_shared_names(second)
    free = PROVENANCE_KEYS | _sizes(first) | _sizes(second) | {"model_type"}
    added = now.keys() - was.keys() - first.keys() - free
    experts, _ = experts_by_config(second)
    chosen = {experts.top_k, *experts.groups, experts.scaling} if experts else {}
    unknown = {key for key in added if key in chosen or THRESHOLD.search(key)}
    family = known_family(first)
    assumed = _in_shared_names(resolved({"model_type": second.get("model_type")}) or {})
    assumed |= family.complete(first) if family else {}
    for key in added - unknown:
        was[key] = assumed.get(key, MISSING)
        if was[key] not in (MISSING, now[key]):
            others = {other: value for other, value in second.items() if other != key}
            if (resolved(others) or {}).get(key) == now[key]:  # its class computes it from others
                was[key] = now[key]
    names, keys = _names_in_messages(first, second), (was.keys() & now.keys()) - free
    return _Comparable(was, now, keys, names, unknown)


def restated(config: Config, keys: Iterable[str]) -> set[str]:
    """Keys with which a complete config says once more what it says in others."""
    earlier = earlier_keys(config)
    return {key for key in keys if key in earlier and earlier[key] == config[key]}


def _means_the_same(key: str, was: Any, first: Config, second: Config) -> bool:
    """Whether another value makes no other model of another class.

    Rotary parameters are compared as the angles that they give. Tensors show other values, such as
    whether layers have biases.
    """
    if key == "rope_parameters":
        angles, others = rotary_of(first), rotary_of(second)
        return angles is not None and others is not None and others.same_angles(angles)
    return (
        key not in SHARED | WINDOWS | {TIED}
        and was is not MISSING
        and shown_by_tensors(key, {**second, key: was}, second)
    )


def _names_in_messages(first: Config, second: Config) -> dict[str, str]:
    """The second class's own names of shared keys, and the key that gives its windows."""
    usual = "layer_types" if "layer_types" in second else "sliding_window"
    windows = min({**_ignored(first), **_ignored(second)}, default=usual)
    return {**_own_names(second), "sliding_window": windows}


def _with_sizes(config: Config) -> Config:
    """A config with the sizes that its class computes where it has none, such as head_dim."""
    family = known_family(config)
    complete = family.complete(config) if family else {}
    sizes = family.axes.keys() - family.derived if family else set()
    return {**config, **{key: complete[key] for key in sizes if config.get(key) is None}}


def _is_derived(key: str, first: Config, second: Config) -> bool:
    """Whether the class computes a key from others, whatever a config says."""
    read = resolved(with_value(second, key, value_at(first, key)))
    now = value_at(second, key)
    return read is not None and value_at(read, key) == now != value_at(first, key)


def judge(checkpoint: Checkpoint, *, is_target: bool = False) -> Shown:
    """Make the function that says which settings of a model its logits show.

    It runs the model on two tokens, in strict float64, with the other model's value. All prompts
    have as many, so their logits show a wrong value of what changes those of the second token: of
    an eps, a factor or a switch, for example, but of no window, and of no scale of late positions.

    Args:
        checkpoint: the model.
        is_target: whether it is the target, which gets the source's values.
    """

    @cache
    def second_token(key: str, value: Any) -> Tensor | None:
        with suppress(InputError), strict_float64():
            weights = copy(class_weights(checkpoint))
            weights.config = loading(checkpoint).config
            if key:
                value = list(value) if isinstance(value, tuple) else value
                weights.config = with_value(weights.config, key, value)
            call = Call(question(checkpoint).call.ids[:2])
            return Layerwise(weights, torch.float64, CPU).logits(call)[1]
        return None

    def shown(key: str, was: Any, now: Any) -> bool | None:
        own, value = second_token("", None), was if is_target else now
        if isinstance(value, list) and all(isinstance(factor, float) for factor in value):
            value = tuple(value)  # which the cache can hash
        if own is None or not isinstance(value, bool | int | float | str | tuple):
            return False
        other = second_token(key, value)
        return None if other is None else not within(error_of(other, own), UNAFFECTED)

    return shown


def _deeper(was: Any, now: Any, layers: tuple[int, int]) -> bool:
    """Whether both values are lists with one entry per layer, for different numbers of layers."""
    lists = isinstance(was, list) and isinstance(now, list)
    return lists and layers[0] != layers[1] and layers == (len(was), len(now))


def _in_shared_names(config: Config) -> Config:
    """Rename the keys of a config to those in ``SHARED``, and list the window of every layer."""
    own = _own_names(config)
    excluded = WINDOWS.union(own.values())
    shared = {key: value for key, value in config.items() if key not in excluded}
    shared |= {key: config[name] for key, name in own.items() if name in config}
    return shared | {"sliding_window": _windows(config)}


def _own_names(config: Config) -> dict[str, str]:
    """The class's own names for keys in ``SHARED``, where they differ."""
    return {key: own for key, own in aliases(config).items() if key in SHARED}


def _windows(config: Config) -> list[Any]:
    """The attention window of every layer, of its class and of its cache; None for no window."""
    ignored = _ignored(config)
    return [ignored] * max(layers_of(config), 1) if ignored else _windows_in(config)


def _ignored(config: Config) -> Config:
    """The keys that a model's class ignores, if caches that follow them get other windows."""
    known = resolved({"model_type": config.get("model_type")}) or config
    ignored = {key: config[key] for key in IN_CACHES - known.keys() if config.get(key)}
    read = {key: value for key, value in config.items() if key not in ignored}
    return ignored if _windows_in(read) != _windows_in(config) else {}


def _windows_in(config: Config) -> list[Any]:
    """The window of every layer that the keys of a config give; None for no window."""
    window, chunk = (config.get(key) for key in ("sliding_window", "attention_chunk_size"))
    types = _entries(config, layers_of(config), "layer_types", None)
    if not isinstance(types, list):
        local = window if config.get("use_sliding_window", True) else None
        kind = "sliding" if local else "chunked" if chunk else "full"
        types = [f"{kind}_attention"] * max(layers_of(config), 1)
    lengths = {
        "full_attention": None,
        "sliding_attention": window,
        "chunked_attention": f"chunks of {chunk}",
    }
    windows = [lengths.get(str(kind), kind) for kind in types]
    single = _entries(config, layers_of(config), "per_layer_config", None)
    if not isinstance(single, list):
        return windows
    return [[*pair] for pair in zip(windows, single, strict=False)]


def _follow_experts(
    first: Config, second: Config, described: Family | None = None
) -> dict[str, Any]:
    """The expected settings of routers if experts were copied, merged, or made from a dense MLP."""
    experts, keys = experts_by_config(first, described)
    if experts is None:
        return {}
    chosen = (experts.top_k, *experts.groups)
    dense = experts.dense.get(first["model_type"])
    if dense and dense.when(first):
        return {key: second.get(key) for key in (*chosen, experts.scaling) if key}
    numbers = [next((c[key] for key in keys if c.get(key)), 0) for c in (first, second)]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return {}
    copies, merged = Fraction(numbers[1], numbers[0]).as_integer_ratio()
    if (copies == 1) == (merged == 1):
        return {}
    counts = {key: first[key] for key in chosen if isinstance(first.get(key), int)}
    settings: dict[str, Any] = {
        key: count * copies // merged for key, count in counts.items() if count % merged == 0
    }
    if experts.scaling and isinstance(first.get(experts.scaling), int | float):
        settings[experts.scaling] = first[experts.scaling] * merged / copies
    balancing = first.get(experts.balancing)
    if isinstance(balancing, int | float) and second.get(experts.top_k):
        settings[experts.balancing] = balancing * first[experts.top_k] / second[experts.top_k]
    return settings


def set_by_steps(lineage: Lineage) -> set[str]:
    """The keys that the steps of a lineage set to other values than the model before has.

    If a manifest describes the family, so that its plan is not trusted, they are those of routers
    that follow the experts.
    """
    if lineage.source.described is not None:
        return routed(lineage)
    steps = zip(lineage.stages, lineage.plans, strict=False)
    return {
        key
        for before, plan in steps
        for key, value in plan.config.items()
        if key not in {*SHARED, *plan.defaults} and before.config.get(key, MISSING) != value
    }


def routed(lineage: Lineage) -> set[str]:
    """The keys of routers whose values the steps of a lineage explain.

    They explain every value if another function is meant, such as with another ``top_k``; otherwise
    each step leaves a value as it is or follows the number of experts.
    """
    if (experts := lineage.target.family.experts) is None:
        return set()
    chosen = (experts.top_k, *experts.groups, experts.scaling, experts.balancing)
    keys = {key for key in chosen if key}
    if lineage.promise != "different":
        complete = [stage.family.complete(stage.config) for stage in lineage.stages]
        for before, after in pairwise(complete):
            follow = _follow_experts(before, after, lineage.source.described)
            keys -= {
                key
                for key in keys
                if before.get(key) != after.get(key) != follow.get(key, before.get(key))
            }
    return keys


def experts_by_config(
    config: Config, described: Family | None = None
) -> tuple[Experts | None, list[str]]:
    """The experts of a model's family, if any, and the names of the key for their number."""
    family = known_family(config, described)
    if family is None:  # names of keys say enough
        numbers = [key for key, value in config.items() if type(value) is int]
        groups = tuple(key for key in GROUPS if key in numbers)
        scaling = next(filter(SCALING.search, config), None)
        balancing = next(filter(BALANCING.fullmatch, config), "")
        chosen = [
            Experts("", key, scaling=scaling, groups=groups, balancing=balancing)
            for key in numbers
            if TOP_K.search(key)
        ]
        return next(iter(chosen), None), [*filter(EXPERTS.search, numbers)]
    if family.experts is None:
        return None, []
    keys = [key for key, axes in family.axes.items() if axes == ("experts",)]
    return family.experts, keys + [family.aliases[key] for key in keys if key in family.aliases]


def _sizes(config: Config) -> set[str]:
    """The size keys of the config's family that every prompt shows.

    No model depends on the width of an MLP that none of its layers has.
    """
    width, family = {"intermediate_size"}, known_family(config)
    return width if family is None else family.size_keys - (family.unseen_sizes - width) - SHARED


def _types_follow(key: str, was: Any, config: Config) -> bool:
    """Whether a key only says which types layers have, and does not contradict the config's lists.

    It derives the same lists, or it is left out: plans do that if no number derives them.
    """
    count = layers_of(config)
    lists = {name for name, of in config.items() if isinstance(of, list) and len(of) == count}
    bare = {name: of for name, of in config.items() if name not in lists | {key}}
    before, now, left_out = (
        resolved(bare | value) for value in ({key: was}, {key: config.get(key)}, {})
    )
    if key in lists or before is None or now is None or left_out is None:
        return False
    others = now.keys() - PROVENANCE_KEYS - {key}
    shaped = {name for name in others if before.get(name, MISSING) != now[name]}
    derived = {name for name in lists if now.get(name) == config[name]}
    absent = left_out.get(key, MISSING) == config.get(key)
    return bool(shaped) and shaped <= (lists if absent else derived)


def _is_size(key: str, first: Config, second: Config) -> bool:
    """Whether tensors show a key's value, or it repeats a size under another name, as plans do."""
    now = second.get(key)
    if key in SHARED | WINDOWS:
        return False
    if key == TIED:  # some readers tie a head although it is stored
        return not now
    if now in (_repeated_size(key, first, second), _grown_with_hidden(first, second).get(key)):
        return now is not None
    return _same_context(key, first, now) and (
        shown_by_tensors(key, first, second) or _grew_along(key, first, second)
    )


def _grew_along(key: str, first: Config, second: Config) -> bool:
    """Whether a number of heads or layers equals that of another key, which tensors show, in both.

    The class does not read it, as the number of key and value heads where these are compressed.
    """
    values = first.get(key), second.get(key)
    alike = next((pattern for pattern in (HEADS, LAYERS) if pattern.search(key)), None)
    return alike is not None and any(
        (first[size], second[size]) == values and shown_by_tensors(size, first, second)
        for size in (first.keys() & second.keys()) - {key}
        if alike.search(size) and type(second[size]) is int
    )


def _grown_with_hidden(first: Config, second: Config) -> dict[str, int]:
    """The numbers of heads and the widths of MLPs, multiplied by the factor of hidden, by key."""
    hidden = aliases(second).get("hidden_size", "hidden_size")
    widths = first.get(hidden), second.get(hidden)
    if not all(type(width) is int for width in widths) or widths[0] == widths[1]:
        return {}
    wanted = {
        key: Fraction(first[key] * widths[1], widths[0])
        for key in first.keys() & second.keys()
        if (HEADS.search(key) or WIDTH.search(key)) and type(first[key]) is int
    }
    return {key: int(number) for key, number in wanted.items() if number.denominator == 1}


def _same_context(key: str, config: Config, value: Any) -> bool:
    """Whether another value of a key leaves the longest text as it is, or no text can be read.

    A prompt reads only as many rows of a table of positions as it has tokens.
    """
    other = {**config, key: value}
    if key != aliases(config).get(CONTEXT) and resolved(other) is None:
        return True
    return bool(longest_context(other) == longest_context(config))


def _repeated_size(key: str, first: Config, second: Config) -> Any:
    """The value of a key that repeats a size under another name, as plans write it; else None.

    The class reads that size, so it is compared itself.
    """
    sizes = first.keys() & second.keys() & _read_keys(second) - {key}
    both = ({size: config[size] for size in sizes} for config in (first, second))
    was, now = (read | dict(leaves(read)) for read in both)
    changed = {size: (was[size], now[size]) for size in was if was[size] != now.get(size)}
    return other_names({key: first.get(key)}, changed).get(key)


def _read_keys(config: Config) -> Set[str]:
    """The keys that a config's class reads."""
    return (resolved({"model_type": config.get("model_type")}) or config).keys()


def stale_sizes(first: Config, second: Config, shown: Shown) -> dict[str, Any]:
    """Keys with another number than sizes that grew require, with what plans write instead.

    The class reads none of them, but for the number of heads into which it splits hidden.

    Args:
        first: config of the source.
        second: config of the target.
        shown: whether the target's logits show another value.
    """
    if not _of_one_class(first, second):
        return {}
    unread = second.keys() - _read_keys(second) - SHARED - WINDOWS
    same = sorted(key for key in unread if second[key] == first.get(key))
    sizes = {key: _repeated_size(key, first, second) for key in same}
    for key, number in _grown_with_hidden(first, second).items():
        in_tensors = shown_by_tensors(key, second, {**second, key: 2 * number})
        counts_heads = HEADS.search(key) and not KV_HEADS.search(key) and not in_tensors
        if counts_heads and shown(key, number, second[key]) is not False:
            sizes[key] = number
    return {key: size for key, size in sizes.items() if size not in (None, second[key])}


def _entries(config: Config, count: int, key: str, missing: Any) -> Any:
    """The value of a key, by layer if it is; a list of layers is cut to their number."""
    value = config.get(key, missing)
    if key == "rope_parameters" and isinstance(value, dict):
        return _plain_rope(value)
    value = single_token(key, value)
    family = known_family(config)
    of_layers = key in (family.lists if family else LISTS) and isinstance(value, list)
    first = 0 if "model_type" in config else first_index(config, count)
    return value[:count] if of_layers else by_layer(key, value, count, first)


def single_token(key: str, value: Any) -> Any:
    """The value of a key; of a list with the id of one token, this id."""
    one = key.endswith("_token_id") and isinstance(value, list) and len(value) == 1
    return value[0] if one else value


def _plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters without an earlier name of the type, and without a part that is all."""
    redundant = {"partial_rotary_factor": 1, "type": rope.get("rope_type")}
    return {
        key: _plain_rope(value) if isinstance(value, dict) else value
        for key, value in rope.items()
        if key not in redundant or value != redundant[key]
    }


def layers_of(config: Config) -> int:
    """The number of layers in a config; 0 if it has none."""
    return next((c for c in map(config.get, LAYER_NUMBERS) if isinstance(c, int)), 0)


def holds(was: Any, now: Any) -> bool:
    """Whether the second dtype holds every number of the first."""
    names: Mapping[str, str] = {name: short for short, name in TORCH_NAMES.items()}
    if was is None or now is None:
        return True
    both = [names[dtype] for dtype in (was, now) if isinstance(dtype, str) and dtype in names]
    return len(both) == 2 and not rounds(*both)
