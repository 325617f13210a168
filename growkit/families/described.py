"""A family that somebody describes in YAML: what a family's file says, as far as that is no code.

::

    family: My model
    model_type: mine
    sizes: {vocab_size: vocab, hidden_size: hidden, num_hidden_layers: layers, ...}
    assumed: {tie_word_embeddings: false, head_dim: hidden_size / num_attention_heads}
    groups: {heads: kv_heads}
    tied: {lm_head.weight: model.embed_tokens.weight}
    tensors:
      model.embed_tokens.weight: vocab -> hidden
      model.layers.{layer}.norm.weight: {pattern: hidden, norm: hidden, eps: rms_norm_eps}
      ...

Patterns are those of ``growkit.algebra.axes``. ``growkit inspect --infer`` writes such a file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from growkit.algebra.axes import Axis, Pattern
from growkit.base.errors import InputError
from growkit.base.names import did_you_mean
from growkit.base.parsing import in_yaml
from growkit.base.tensors import Config
from growkit.families.description import Multiple, Norm, Tensor, always
from growkit.families.family import LISTS, Family

KEYS: dict[str, type] = {
    "family": str,
    "model_type": str,
    "sizes": dict,
    "assumed": dict,
    "computed": list,
    "constants": dict,
    "groups": dict,
    "multiples": dict,
    "lists": list,
    "fixed": dict,
    "tied": dict,
    "tensors": dict,
}
"""What a description has, and of which kind it is."""

NEEDED = ("family", "model_type", "sizes", "tensors")

NEEDED_AXES = ("layers", "vocab", "hidden")

OF_A_TENSOR: dict[str, type] = {
    "pattern": str,
    "tied": str,
    "norm": str,
    "eps": str,
    "centred": bool,
    "behind": bool,
    "offset": float,
    "root": str,
}
"""What a tensor may say beside its pattern.

``tied`` is its pattern in tied models; ``root`` an axis whose root its class multiplies it by.
"""

KINDS = {str: "text", dict: "a mapping", list: "a list", bool: "true or false", float: "a number"}

NAME = re.compile(r"[\w.\-]{1,200}")
TIED = "tie_word_embeddings"


def described(content: Any, where: str) -> Family:
    """The family that a description describes.

    Args:
        content: of the YAML.
        where: what to call it in messages.

    Raises:
        InputError: it is no description; names the key or tensor that is wrong.
    """
    if not isinstance(content, Mapping):
        raise InputError(f"{where} must be a mapping with {', '.join(NEEDED)}")
    _check(content, KEYS, where)
    for key in NEEDED:
        if not content.get(key):
            raise InputError(f"{where} has no {key}; a family needs {', '.join(NEEDED)}")
    sizes = {
        key: tuple(axis.strip() for axis in _text(axes, f"size {key} in {where}").split("+"))
        for key, axes in content["sizes"].items()
    }
    constants = _mapping(content, "constants", int, where)
    known = {axis for axes in sizes.values() for axis in axes} | constants.keys()
    for axis in NEEDED_AXES:
        if axis not in known:
            raise InputError(f"sizes in {where} have no key for {axis}, which every family needs")
    assumed = content.get("assumed", {})
    groups = _mapping(content, "groups", str, where)
    fixed = _mapping(content, "fixed", str, where)
    multiples = _mapping(content, "multiples", str, where)
    for axis in (*groups, *groups.values(), *fixed):
        _check_axis(axis, known, where)
    numbers = {*sizes, *assumed, *known}
    for number in (*multiples, *multiples.values()):
        if number not in numbers:
            raise InputError(
                f"multiples in {where} name {number!r}; {did_you_mean(number, numbers)}"
            )
    lists = frozenset(_listed(content, "lists", where))
    ordered = sorted(sizes.items(), key=lambda entry: len(entry[1]))  # single axes come first
    tied = _mapping(content, "tied", str, where)
    tensors = _tensors(content["tensors"], known, tied, where)
    eps = {tensor.norm.eps for tensor in tensors if tensor.norm and tensor.norm.eps}
    return Family(
        name=content["family"][:100],
        model_types=(content["model_type"],),
        axes=dict(ordered),
        defaults={key: _assumed(value) for key, value in assumed.items()},
        tensors=tensors,
        constants=constants,
        derived=frozenset(_listed(content, "computed", where)),
        fixed=lambda config: fixed,
        lists=LISTS | lists,
        grouped=frozenset({*groups, *groups.values()}),
        served={axis: (serving,) for axis, serving in groups.items()},
        multiples=tuple(
            Multiple(what, of, "as its description says") for what, of in multiples.items()
        ),
        recomputed=("rotary_emb.inv_freq",),
        duplicates=tied,
        check=partial(_check_eps, eps, content["family"]),
    )


def _tensors(
    content: Mapping[str, Any], known: set[str], tied: Mapping[str, str], where: str
) -> tuple[Tensor, ...]:
    names = content.keys()
    for name in names:
        as_layer = re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name, count=1)
        if as_layer != name and as_layer in names:
            raise InputError(f"{where} has tensor {name} twice: {as_layer} stands for it as well")
    for each in (*tied.values(), *tied):
        if each not in names:
            raise InputError(f"tied in {where} names {each!r}; {did_you_mean(each, names)}")
    entries = {name: _entry(name, entry, known, where) for name, entry in content.items()}
    found = []
    for name, entry in entries.items():
        norm = None
        if "norm" in entry:
            does = {key: entry[key] for key in ("centred", "behind") if key in entry}
            norm = Norm(entry["norm"], entry.get("eps"), **does)
        root = entry.get("root")
        scale = partial(_root, root, 1) if root else None
        describe = partial(Tensor, name, norm=norm, offset=entry.get("offset", 0.0))
        if "tied" in entry:
            # A tied head reads the embedding as it is stored, without the factor of the class.
            roots = [entries[of]["root"] for of in tied.values() if "root" in entries[of]]
            unscaled = partial(_root, roots[0], -1) if roots else scale
            found.append(describe(entry["tied"], when=_tied, scale=unscaled))
        when = _untied if name in tied or "tied" in entry else always
        found.append(describe(entry["pattern"], when=when, scale=scale))
    return tuple(found)


def _entry(name: str, entry: Any, known: set[str], where: str) -> dict[str, Any]:
    """What is said of a tensor.

    Raises:
        InputError: something is wrong with it.
    """
    of = f"tensor {name} in {where}"
    if not NAME.fullmatch(name.replace("{layer}", "0", 1)):
        raise InputError(f"{of} has a name that no tensor has; {{layer}} may stand in it once")
    said = {"pattern": entry} if isinstance(entry, str) else entry
    if not isinstance(said, Mapping) or "pattern" not in said:
        raise InputError(f"{of} must be a pattern, or a mapping with one")
    _check(said, OF_A_TENSOR, of)
    for key in ("pattern", "tied"):
        if key in said:
            _check_pattern(said[key], known, of)
    for key in ("norm", "root"):
        if key in said:
            _check_axis(said[key], known, of)
    return dict(said)


def _check_pattern(pattern: str, known: set[str], of: str) -> None:
    try:
        parsed = Pattern.parse(pattern[:200])
    except (ValueError, RecursionError) as error:
        raise InputError(f"{of}: {error}") from None
    for number, dimension in enumerate(parsed.dimensions):
        for axis in dimension.axes:
            _check_axis(axis, known, of)
        if "vocab" in dimension.axes and (number or dimension.form != Axis("vocab")):
            raise InputError(f"{of} is {pattern!r}; vocab can only be the first dimension, alone")


def _check_axis(axis: str, known: set[str], of: str) -> None:
    if axis not in known:
        raise InputError(
            f"{of} names axis {axis!r}, which no size says; {did_you_mean(axis, known)}"
        )


def _check(content: Mapping[Any, Any], kinds: Mapping[str, type], where: str) -> None:
    for key, value in content.items():
        if key not in kinds:
            raise InputError(f"{where} has an unknown key {key!r}; {did_you_mean(key, kinds)}")
        _check_kind(value, kinds[key], f"{key} in {where}")


def _check_kind(value: Any, kind: type, what: str) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number if kind is float else isinstance(value, kind)):
        raise InputError(f"{what} is {in_yaml(value)}; {KINDS[kind]} was expected")


def _mapping(content: Mapping[str, Any], key: str, kind: type, where: str) -> dict[str, Any]:
    found = content.get(key, {})
    for name, value in found.items():
        if kind is str:
            _text(value, f"{name} of {key} in {where}")
        elif not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 24:
            raise InputError(
                f"{name} of {key} in {where} is {value!r}; a whole number was expected"
            )
    return dict(found)


def _listed(content: Mapping[str, Any], key: str, where: str) -> list[str]:
    return [_text(each, f"an entry of {key} in {where}") for each in content.get(key, [])]


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{what} is {value!r}; text was expected")
    return value


def _assumed(value: Any) -> Any:
    """A value, or the quotient of two other keys."""
    whole, sign, parts = value.partition(" / ") if isinstance(value, str) else ("", "", "")
    return (lambda config: config[whole] // config[parts]) if sign else value


def _root(axis: str, power: int, sizes: Mapping[str, int]) -> float:
    return math.sqrt(sizes[axis]) ** power


def _tied(config: Config) -> bool:
    return bool(config.get(TIED))


def _untied(config: Config) -> bool:
    return not _tied(config)


def _check_eps(keys: set[str], name: str, config: Config) -> None:
    for key in keys:
        value = config.get(key)
        if not isinstance(value, float | int) or isinstance(value, bool):
            raise InputError(
                f"config.json of a {name} model has {key} {value!r}, which a norm of its "
                f"description adds to a mean; say it there, or under assumed"
            )
