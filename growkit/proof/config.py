"""What the configs of two folders make of their class: everything that it resolves, key by key.

For a pair without a manifest, all settings must be the same, except for sizes, which the shapes of
the weights contain, and for numbers that every logit depends on, which the logits judge.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from growkit.base.tensors import TORCH_NAMES, Config
from growkit.checkpoint.reading import Checkpoint, rounds
from growkit.engine.loader import LAYERS
from growkit.engine.oracle import PROVENANCE_KEYS, resolved
from growkit.families.description import LISTS, Experts
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.family import Family, families, own_families

SHARED = frozenset(
    {"vocab_size", "max_position_embeddings", "rope_parameters"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "dtype"}
)
"""Keys that mean the same in every class that has them."""

SIZES = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "num_noise_heads", "d_model", "d_ff", "d_kv"),
        *("n_embd", "n_inner", "n_layer", "n_head", "num_layers", "num_heads", "ffn_dim"),
        *("ffn_hidden_size", "embedding_size", "word_embed_proj_dim", "hidden_dim", "rotary_dim"),
        *("moe_intermediate_size", "shared_expert_intermediate_size", "kv_channels"),
        *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "qk_head_dim"),
        *("v_head_dim", "num_experts", "num_local_experts", "n_routed_experts"),
        *("num_kv_heads", "n_head_kv", "block_ff_dim", "mlp_hidden_size"),
        *("first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers"),  # names say the same
    }
).union(*(each.size_keys - each.unseen_sizes - SHARED for each in own_families().values()))
"""Keys that a larger model of the same function may have other numbers for."""

WINDOWS = frozenset({"sliding_window", "use_sliding_window", "layer_types", "max_window_layers"})
"""Keys that say how far every layer looks back, which is compared (``_windows``)."""

OF_LONG_TEXTS = re.compile(r".*(window|chunk|position|seq_?len|context|n_ctx|_length).*")
"""Keys with an effect on long texts alone: a default is compared like a written value."""

OF_TRAINING = re.compile(
    r"initializer_.*|.*dropout.*|.*_pdrop|pretraining_tp|.*aux_loss.*|router_jitter_noise|"
    r"output_router_logits|output_attentions|output_hidden_states|use_cache|return_dict|"
    r"problem_type|num_labels|id2label|label2id|lambda_std_dev|.*init_std|gradient_checkpointing"
)
"""Keys that change nothing of what a trained model computes."""

JUDGED = re.compile(
    r".*(eps|epsilon)|.*multiplier.*|logits?_scal.*|scale_.*|.*_scale|query_pre_attn_scalar|"
    r"dim_model_base|mup_.*|tie_word_embeddings|final_logit_softcapping|attn_logit_softcapping"
)
"""Keys that every logit of every prompt depends on, so that logits judge whether they fit."""

SWITCHES = frozenset(DIFF.choices) | {"lambda_init", "shared_rank", "num_noise_heads"}
"""The variants of differential attention, likewise."""


Copied = Sequence[frozenset[int]]
"""For each layer of a target, the layers of the source that have the same matrix."""


def different_settings(
    first: Config, second: Config, copied: Copied | None = None
) -> tuple[list[str], list[str]]:
    """The keys that two configs resolve to other values.

    Of two classes, only those keys are compared that both have, and how far every layer looks back.

    Args:
        first: the source's, complete.
        second: the target's.
        copied: which layers of the source those of the target copy, if there are more, or fewer,
            and that is known.

    Returns:
        Those that make another model, and those that are only to be named.
    """
    changed: list[str] = []
    named: list[str] = []
    follow = _follow_experts(first, second)
    layers = layers_of(first), layers_of(second)
    free, own = PROVENANCE_KEYS | _sizes(second), {}
    one_class = first.get("model_type") == second.get("model_type")
    keys = first.keys() | second.keys()
    if not one_class:
        free |= _sizes(first) | {"model_type"}
        own = _own_names(second)
        own["sliding_window"] = "layer_types" if "layer_types" in second else "sliding_window"
        first, second = _in_shared_names(first), _in_shared_names(second)
        keys = first.keys() & second.keys()
    missing: Any = object()
    for key in sorted(keys - free):
        was, now = (_entries(each, key, missing) for each in (first, second))
        if was == now or not (one_class or key in SHARED or was or now):
            continue
        by_layer = key in WINDOWS or (one_class and key not in SHARED)
        if isinstance(was, dict) and isinstance(now, dict) and key.endswith("config"):
            inside = different_settings(was, now, copied)
            changed += [f"{key}.{name}" for name in inside[0]]
            named += [f"{key}.{name}" for name in inside[1]]
        elif _harmless(key, was, now) or follow.get(key, missing) == now:
            named.append(own.get(key, key))
        elif by_layer and _deeper(was, now, layers) and follows(was, now, copied):
            named += [key] if copied is None else []
        elif all(each is missing or each is None or each is False for each in (was, now)):
            named.append(key)  # what the class does not know, and is not on
        else:
            changed.append(own.get(key, key))
    return changed, named


def _deeper(was: Any, now: Any, layers: tuple[int, int]) -> bool:
    """Whether both are lists with an entry for each layer, of another number of layers."""
    lists = isinstance(was, list) and isinstance(now, list)
    return lists and layers[0] != layers[1] and layers == (len(was), len(now))


def not_compared(first: Config, second: Config) -> list[str]:
    """The keys of a config whose values cannot be compared with those of another class.

    Args:
        first: a complete config.
        second: that of a model of another class.

    Returns:
        Those that differ from the other config, and from the default of the class where a short
        text would show it.
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
    """A config with the keys in ``SHARED`` under these names, and a window for every layer."""
    own = _own_names(config)
    apart = WINDOWS.union(own.values())
    found = {key: value for key, value in config.items() if key not in apart}
    found |= {key: config[name] for key, name in own.items() if name in config}
    return found | {"sliding_window": _windows(config)}


def _own_names(config: Config) -> dict[str, str]:
    """What the class of a config calls keys of ``SHARED``, where it has a name of its own."""
    from transformers import CONFIG_MAPPING

    model_type = str(config.get("model_type"))
    names = CONFIG_MAPPING[model_type].attribute_map if model_type in CONFIG_MAPPING else {}
    return {key: own for key, own in names.items() if key in SHARED}


def _windows(config: Config) -> list[Any]:
    """How far every layer looks back; None for all the way."""
    window = config.get("sliding_window")
    types = _entries(config, "layer_types", None)
    if not isinstance(types, list):
        lasts = config.get("use_sliding_window", True)
        return [window if lasts else None] * max(layers_of(config), 1)
    lengths = {"full_attention": None, "sliding_attention": window}
    return [lengths.get(str(each), each) for each in types]


def _follow_experts(first: Config, second: Config) -> dict[str, Any]:
    """What becomes of the choice of experts where each has so many copies, or there were none."""
    experts, keys = _experts_of(first)
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


def _experts_of(config: Config) -> tuple[Experts | None, list[str]]:
    """How a model uses experts, if it has any, and what the key of their number is called."""
    model_type = config.get("model_type")
    family = next((each for each in families().values() if model_type in each.model_types), None)
    if family is None or family.experts is None:
        return None, []
    keys = [key for key, axes in family.axes.items() if axes == ("experts",)]
    return family.experts, keys + [family.aliases[key] for key in keys if key in family.aliases]


def listed_family(config: Config) -> Family | None:
    """The family of the package that knows a model's type, if there is one."""
    known = {kind: each for each in own_families().values() for kind in each.model_types}
    return known.get(str(config.get("model_type")))


def _sizes(config: Config) -> frozenset[str]:
    """See ``SIZES``; of what its family describes."""
    family = listed_family(config)
    return (SIZES | family.size_keys) - family.unseen_sizes - SHARED if family else SIZES


def _entries(config: Config, key: str, missing: Any) -> Any:
    """The value of a key; of a list for the layers, as much as there are layers."""
    value = config.get(key, missing)
    family = listed_family(config)
    of_layers = key in (family.lists if family else LISTS) and isinstance(value, list)
    return value[: layers_of(config)] if of_layers else value


def _harmless(key: str, was: Any, now: Any) -> bool:
    if key == "dtype":
        return _holds(was, now)
    if key == "vocab_size":  # of more tokens, the logits of the old ones are compared
        return isinstance(was, int) and isinstance(now, int) and was < now
    if key == "max_window_layers":  # every class makes layer_types of it
        return True
    return bool(OF_TRAINING.fullmatch(key) or JUDGED.fullmatch(key) or key in SWITCHES)


def layers_of(config: Config) -> int:
    """The number of layers in a config; 0 if it has none."""
    return next((c for c in map(config.get, LAYERS) if isinstance(c, int)), 0)


def _holds(was: Any, now: Any) -> bool:
    """Whether a dtype holds every number of another."""
    names: Mapping[str, str] = {name: short for short, name in TORCH_NAMES.items()}
    if was is None or now is None:
        return True
    both = [names[each] for each in (was, now) if isinstance(each, str) and each in names]
    return len(both) == 2 and not rounds(*both)


IN_LAYER = re.compile(r"(?P<stack>[^\d]+\.)(?P<layer>\d+)(?P<rest>\..+)")


def copied_layers(source: Checkpoint, target: Checkpoint) -> Copied | None:
    """The layers of the source that each layer of the target copies; none for a new layer.

    Args:
        source: a folder.
        target: a folder with another number of layers.

    Returns:
        None where some layers of the target are of another shape, or no layer is a copy.
    """
    before, after = (_smallest_matrices(each) for each in (source, target))
    shapes = {source.tensors[name].shape for name in before.values()}
    if not after or any(target.tensors[name].shape not in shapes for name in after.values()):
        return None
    matrices = {layer: source.read(name) for layer, name in before.items()}
    copies = (target.read(after[layer]) for layer in sorted(after))
    found = [frozenset(i for i, other in matrices.items() if copy.equal(other)) for copy in copies]
    return found if any(found) else None


def follows(was: Sequence[object], now: Sequence[object], copied: Copied | None) -> bool:
    """Whether a list with an entry for each layer is right for a model with other layers.

    Args:
        was: the source's entries.
        now: the target's.
        copied: see ``copied_layers``; without, the source's entries must be there in their order.
    """
    if copied is not None and len(copied) == len(now):
        pairs = zip(now, copied, strict=True)
        return all(not layers or any(was[i] == entry for i in layers) for entry, layers in pairs)
    rest = iter(now)
    return all(entry in rest for entry in was)


def _smallest_matrices(checkpoint: Checkpoint) -> dict[int, str]:
    """The matrix with the fewest elements of each layer; of equal ones the first by name."""
    found: dict[int, tuple[int, str]] = {}
    for name, info in checkpoint.tensors.items():
        inside = IN_LAYER.fullmatch(name)
        if inside and len(info.shape) == 2:
            layer = int(inside["layer"])
            found[layer] = min(found.get(layer, (info.bytes, name)), (info.bytes, name))
    return {layer: name for layer, (_, name) in found.items()}
