"""Comparison of two configs as their classes resolve them, key by key.

For a pair without a manifest, all settings must be equal, except for sizes, which the shapes of the
weights show, and for numbers that every logit depends on, which the logits show.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

from torch import Tensor

from growkit.base.tensors import TORCH_NAMES, Config
from growkit.checkpoint.reading import Checkpoint, rounds
from growkit.differential.family import FAMILY as DIFF
from growkit.engine.loader import LAYERS, loading
from growkit.engine.oracle import PROVENANCE_KEYS, resolved
from growkit.engine.published import other_names, unrolled
from growkit.engine.user_family import shown_by_tensors
from growkit.families.description import LISTS, PREDICTING, Experts
from growkit.families.family import Family, by_layer, families, first_index, known_family
from growkit.families.keys import EXPERTS, GROUPS, SCALING, TOP_K
from growkit.planning.plan import Lineage

SHARED = frozenset(
    {"vocab_size", "max_position_embeddings", "rope_parameters"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
)
"""Keys with the same meaning in every class that has them."""

SIZES = frozenset(
    {
        *("d_model", "d_ff", "d_kv", "num_layers", "num_heads", "n_head_kv", "embedding_size"),
        *("hidden_dim", "block_ff_dim", "mlp_hidden_size", "kv_channels", "qk_head_dim"),
        "rotary_dim",
        # Names of tensors show these.
        *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"),
    }
).union(*(each.size_keys - each.unseen_sizes - SHARED for each in families().values()))
"""Keys whose values may differ in a larger model of the same function: those of models without a
description, and the size keys of all families."""

IN_CACHES = frozenset({"sliding_window", "layer_types", "attention_chunk_size", "per_layer_config"})
"""Keys that caches follow, even if the model's class ignores them."""

WINDOWS = IN_CACHES | {"use_sliding_window", "max_window_layers"}
"""Keys for the attention windows, which are compared layer by layer (``_windows``)."""

OF_LONG_TEXTS = re.compile(
    r".*(window|chunk|position|seq_?len|context|n_ctx|_length).*|floor_scale|attn_scale"
)
"""Keys that affect only long texts: their defaults are compared like written values."""

OF_TRAINING = re.compile(
    r"initializer_.*|.*dropout.*|.*_pdrop|pretraining_tp|.*aux_loss.*|router_jitter_noise|"
    r"output_router_logits|output_attentions|output_hidden_states|use_cache|return_dict|"
    r"problem_type|num_labels|id2label|label2id|lambda_std_dev|.*init_std|gradient_checkpointing"
)
"""Keys that do not change the function of a trained model."""

JUDGED = re.compile(
    r".*(eps|epsilon)|.*multiplier.*|logits?_scal.*|scale_.*|.*_scale|query_pre_attn_scalar|"
    r"dim_model_base|mup_.*|tie_word_embeddings|final_logit_softcapping|attn_logit_softcapping"
)
"""Keys that every logit of every prompt depends on, so that the logits show a wrong value."""

SWITCHES = frozenset(DIFF.choices) | {"lambda_init", "shared_rank", "num_noise_heads"}
"""Keys of the variants of differential attention, on which every logit depends, too."""


Copied = Sequence[frozenset[int]]
"""For each layer of a target, the layers of the source that it copies."""


def in_order(was: Sequence[object], now: Sequence[object]) -> bool:
    """Whether the list of a deeper model has the source's entries in order, as plans keep them."""
    rest = iter(now)
    return all(entry in rest for entry in was)


def different_settings(
    first: Config,
    second: Config,
    fits: Callable[[Sequence[object], Sequence[object]], bool] = in_order,
    layers: tuple[int, int] | None = None,
) -> tuple[list[str], list[str]]:
    """Find the keys with different values in two complete configs.

    Between two classes, only the keys that both have, and the windows of all layers, are compared.

    Args:
        first: config of the source.
        second: config of the target.
        fits: whether a list of the target, with one entry per layer, fits the source's, if their
            numbers of layers differ.
        layers: their numbers of layers; None for what the configs say.

    Returns:
        The keys that make another model, and the keys that are only reported.
    """
    changed: list[str] = []
    named: list[str] = []
    follow = _follow_experts(first, second)
    layers = layers or (layers_of(first), layers_of(second))
    free, own = PROVENANCE_KEYS | _sizes(second), {}
    one_class = first.get("model_type") == second.get("model_type")
    keys = first.keys() | second.keys()
    if not one_class:
        free |= _sizes(first) | {"model_type"}
        own = _own_names(second)
        usual = "layer_types" if "layer_types" in second else "sliding_window"
        own["sliding_window"] = min({**_ignored(first), **_ignored(second)}, default=usual)
        first, second = _in_shared_names(first), _in_shared_names(second)
        keys = first.keys() & second.keys()
    missing: Any = object()
    for key in sorted(keys - free):
        was, now = (_entries(*of, key, missing) for of in zip((first, second), layers, strict=True))
        if was == now or not (one_class or key in SHARED or was or now):
            continue
        by_layer = key in WINDOWS or (one_class and key not in SHARED)
        if isinstance(was, dict) and isinstance(now, dict) and key.endswith("config"):
            inside = different_settings(was, now, fits, layers)
            changed += [f"{key}.{name}" for name in inside[0]]
            named += [f"{key}.{name}" for name in inside[1]]
        elif _harmless(key, was, now) or follow.get(key, missing) == now:
            named.append(own.get(key, key))
        elif by_layer and _deeper(was, now, layers) and fits(was, now):
            continue
        elif all(each is missing or each is None or each is False for each in (was, now)):
            named.append(key)  # unknown to one class, and off in the other
        elif one_class and (_is_size(key, first, second) or _repeats_size(key, first, second)):
            continue
        else:
            changed.append(own.get(key, key))
    return changed, named


def _deeper(was: Any, now: Any, layers: tuple[int, int]) -> bool:
    """Whether both values are lists with one entry per layer, for different numbers of layers."""
    lists = isinstance(was, list) and isinstance(now, list)
    return lists and layers[0] != layers[1] and layers == (len(was), len(now))


def not_compared(first: Config, second: Config) -> list[str]:
    """Find the keys of a config that cannot be compared with the config of another class.

    Args:
        first: a complete config.
        second: the complete config of a model of another class.

    Returns:
        The keys of ``second`` whose values differ from ``first``; a key whose effect a short text
        would show is left out if it has the default of its class.
    """
    assumed = resolved({"model_type": second.get("model_type")}) or {}
    experts, _ = _experts_of(second)
    chosen = (experts.top_k, *experts.groups, experts.scaling) if experts else ()
    names = _own_names(second)
    both = _in_shared_names(first).keys() & _in_shared_names(second).keys() & SHARED
    compared = {names.get(key, key) for key in both}
    seen = {*compared, *first, *_sizes(second), *PROVENANCE_KEYS, "model_type"}
    found = []
    for key in sorted(second.keys() - seen):
        value, shown = second[key], key in WINDOWS or not OF_LONG_TEXTS.fullmatch(key)
        default = shown and key not in chosen and value == assumed.get(key, False)
        if value not in (None, first.get(key, False)) and not default:
            found.append(key)
    return found


def _in_shared_names(config: Config) -> Config:
    """Rename the keys of a config to those in ``SHARED``, and list the window of every layer."""
    own = _own_names(config)
    apart = WINDOWS.union(own.values())
    found = {key: value for key, value in config.items() if key not in apart}
    found |= {key: config[name] for key, name in own.items() if name in config}
    return found | {"sliding_window": _windows(config)}


def _own_names(config: Config) -> dict[str, str]:
    """The class's own names for keys in ``SHARED``, where they differ."""
    return {key: own for key, own in aliases(config).items() if key in SHARED}


def aliases(config: Config) -> Mapping[str, str]:
    """Other names of keys that a config's class reads, with its own names."""
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    return CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}


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
    found = [lengths.get(str(each), each) for each in types]
    single = _entries(config, layers_of(config), "per_layer_config", None)
    if not isinstance(single, list):
        return found
    return [[*each] for each in zip(found, single, strict=False)]


def _follow_experts(
    first: Config, second: Config, described: Family | None = None
) -> dict[str, Any]:
    """The expected settings of routers if experts were copied, or made from a dense MLP."""
    experts, keys = _experts_of(first, described)
    if experts is None:
        return {}
    chosen = (experts.top_k, *experts.groups)
    dense = experts.dense.get(first["model_type"])
    if dense and dense.when(first):
        return {key: second.get(key) for key in (*chosen, experts.scaling) if key}
    numbers = [next((c[key] for key in keys if c.get(key)), 0) for c in (first, second)]
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        return {}
    copies, rest = divmod(numbers[1], numbers[0])
    if rest or copies < 2:
        return {}
    found = {key: copies * first[key] for key in chosen if isinstance(first.get(key), int)}
    if experts.scaling and isinstance(first.get(experts.scaling), int | float):
        found[experts.scaling] = first[experts.scaling] / copies
    return found


def routed(lineage: Lineage) -> set[str]:
    """The keys of routers whose values the steps of a lineage explain.

    They explain every value if another function is meant, such as with another ``top_k``; otherwise
    each step leaves a value as it is or follows the number of experts.
    """
    if (experts := lineage.target.family.experts) is None:
        return set()
    keys = {key for key in (experts.top_k, *experts.groups, experts.scaling) if key}
    if lineage.promise != "different":
        complete = [each.family.complete(each.config) for each in lineage.stages]
        for before, after in pairwise(complete):
            follow = _follow_experts(before, after, lineage.source.described)
            keys -= {
                key
                for key in keys
                if before.get(key) != after.get(key) != follow.get(key, before.get(key))
            }
    return keys


def _experts_of(
    config: Config, described: Family | None = None
) -> tuple[Experts | None, list[str]]:
    """The experts of a model's family, if any, and the names of the key for their number."""
    family = known_family(config.get("model_type"), described)
    if family is None:  # names of keys say enough
        numbers = [key for key, value in config.items() if type(value) is int]
        groups = tuple(key for key in GROUPS if key in numbers)
        scaling = next(filter(SCALING.search, config), None)
        chosen = [
            Experts("", key, scaling=scaling, groups=groups) for key in numbers if TOP_K.search(key)
        ]
        return next(iter(chosen), None), [*filter(EXPERTS.search, numbers)]
    if family.experts is None:
        return None, []
    keys = [key for key, axes in family.axes.items() if axes == ("experts",)]
    return family.experts, keys + [family.aliases[key] for key in keys if key in family.aliases]


def _sizes(config: Config) -> frozenset[str]:
    """``SIZES``, and the size keys of the config's family."""
    family = known_family(config.get("model_type"))
    if family is None:
        return SIZES
    # No model depends on the width of an MLP that none of its layers has.
    unseen = family.unseen_sizes - {"intermediate_size"}
    return (SIZES | family.size_keys) - unseen - SHARED


def _is_size(key: str, first: Config, second: Config) -> bool:
    """Whether the shapes of the class's tensors show the value of a key that no family lists."""
    judged_apart = key in SHARED | WINDOWS or OF_LONG_TEXTS.fullmatch(key)
    return not judged_apart and shown_by_tensors(key, first, second)


def _repeats_size(key: str, first: Config, second: Config) -> bool:
    """Whether a key repeats a size under another name in both configs, as plans write it."""
    if key in SHARED | WINDOWS:
        return False
    sizes = {size: (first.get(size), second.get(size)) for size in _sizes(second)}
    changed = {size: values for size, values in sizes.items() if values[0] != values[1]}
    missing: Any = object()
    return bool(other_names({key: first.get(key)}, changed).get(key, missing) == second.get(key))


def _entries(config: Config, count: int, key: str, missing: Any) -> Any:
    """The value of a key; lists with entries per layer are cut to the number of layers.

    A mapping from layers to their settings is such a list, with nothing for all other layers, and
    so are repeated blocks of entries.
    """
    value = config.get(key, missing)
    if key == "rope_parameters" and isinstance(value, dict):  # all of a head, as without the key
        return {k: v for k, v in value.items() if (k, v) != ("partial_rotary_factor", 1)}
    inside = value if key.endswith("config") and isinstance(value, dict) else {}
    if inside and all(str(each).isdigit() for each in inside):
        numbered = {int(each): entry for each, entry in inside.items()}
        return [numbered.get(layer) for layer in range(count)]
    family = known_family(config.get("model_type"))
    value = unrolled(value) or value
    of_layers = key in (family.lists if family else LISTS) and isinstance(value, list)
    first = 0 if "model_type" in config else first_index(config, count)
    return value[:count] if of_layers else by_layer(key, value, count, first)


def _harmless(key: str, was: Any, now: Any) -> bool:
    if key == "dtype":
        return _holds(was, now)
    if key == "vocab_size":  # with more tokens, the logits of the old ones are compared
        return isinstance(was, int) and isinstance(now, int) and was < now
    if PREDICTING.fullmatch(key):  # of layers that no class of transformers has among its own
        return not now
    if key == "max_window_layers":  # every class derives layer_types from it
        return True
    judged = JUDGED.fullmatch(key) and not OF_LONG_TEXTS.fullmatch(key)
    return bool(judged or OF_TRAINING.fullmatch(key) or key in SWITCHES)


def layers_of(config: Config) -> int:
    """The number of layers in a config; 0 if it has none."""
    return next((c for c in map(config.get, LAYERS) if isinstance(c, int)), 0)


def _holds(was: Any, now: Any) -> bool:
    """Whether the second dtype holds every number of the first."""
    names: Mapping[str, str] = {name: short for short, name in TORCH_NAMES.items()}
    if was is None or now is None:
        return True
    both = [names[each] for each in (was, now) if isinstance(each, str) and each in names]
    return len(both) == 2 and not rounds(*both)


IN_LAYER = re.compile(r"(?P<stack>[^\d]+\.)(?P<layer>\d+)(?P<rest>\..+)")


def copied_layers(source: Checkpoint, target: Checkpoint) -> Copied | None:
    """Find the source layers that each target layer copies; an empty set for a new layer.

    Copies have the same matrices or, in a wider model, the same values in their vectors.

    Args:
        source: the source.
        target: the target, with another number of layers.

    Returns:
        The source layers of every target layer; None if some source layer has no copy.
    """
    for part_of in (_smallest_matrices, _values_of_vectors):
        before, after = part_of(source), part_of(target)
        found = [frozenset(i for i in before if before[i] == after[j]) for j in sorted(after)]
        if before and frozenset().union(*found) == before.keys():
            return found
    return None


def follows(copied: Copied | None, was: Sequence[object], now: Sequence[object]) -> bool:
    """Whether a list with one entry per layer fits a target with another number of layers.

    Args:
        copied: see ``copied_layers``; if None, all entries must be the same.
        was: entries of the source.
        now: entries of the target.
    """
    if copied is None or len(copied) != len(now):
        return all(entry == was[0] for entry in (*was, *now))
    pairs = zip(now, copied, strict=True)
    return all(was[i] == entry for entry, layers in pairs for i in layers)


def _smallest_matrices(checkpoint: Checkpoint) -> dict[int, bytes]:
    """Hashes of the smallest matrix of each layer; of equally small ones, the first by name."""
    found: dict[int, tuple[int, str]] = {}
    for layer, name in _in_layers(checkpoint, dimensions=2):
        size = checkpoint.tensors[name].bytes
        found[layer] = min(found.get(layer, (size, name)), (size, name))
    return {layer: _hash(checkpoint.read(name)) for layer, (_, name) in found.items()}


def _values_of_vectors(checkpoint: Checkpoint) -> dict[int, bytes]:
    """Hashes of the different values in the vectors of each layer."""
    found: dict[int, bytes] = {}
    for layer, name in _in_layers(checkpoint, dimensions=1):
        found[layer] = found.get(layer, b"") + _hash(checkpoint.read(name).unique())
    return found


def _hash(tensor: Tensor) -> bytes:
    """A hash of a tensor's shape and numbers, which are the same in every dtype."""
    numbers = tensor.double().contiguous().numpy()
    return sha256(f"{numbers.shape}".encode() + numbers.tobytes()).digest()


def _in_layers(checkpoint: Checkpoint, dimensions: int) -> Iterator[tuple[int, str]]:
    """The tensors of all layers with this number of dimensions, by name, and their layers."""
    unread = {*loading(checkpoint).unread}
    for name, info in sorted(checkpoint.tensors.items()):
        inside = IN_LAYER.fullmatch(name)
        if inside and len(info.shape) == dimensions and name not in unread:
            yield int(inside["layer"]), name
