"""The vocabulary of family descriptions: every key and the kind of its value."""

from __future__ import annotations

from typing import Any

from growkit.base.errors import InputError
from growkit.base.names import did_you_mean
from growkit.base.parsing import in_yaml

ANY = "any key"
"""In a mapping of kinds: the kind of all values, for any key."""

TEXTS = {ANY: str}
CONDITION = (bool, str)

NORM = {"norm": str, "eps": str, "centred": bool, "behind": bool}

TENSOR = NORM | {
    "pattern": str,
    "tied": str,
    "bias": CONDITION,
    "when": CONDITION,
    "offset": float,
    "root": str,
    "order": [str],
    "component": str,
    "dense": ([str], str),
    "canonical": str,
}
"""What a tensor may say.

``tied`` is its pattern in tied models; ``bias`` the models with a bias next to a weight; ``root``
an axis whose root its class multiplies it by; ``order`` one of ``ORDERS`` and its axes.
"""

MULTIPLE = {"of": str, "why": str}

FORM = {
    "switches": dict,
    "keys": TEXTS,
    "lambda_init": str,
    "harmless": {ANY: list},
    "assumed": dict,
    "strict": bool,
}

EXPERTS = {
    "width": str,
    "top_k": str,
    "alone": CONDITION,
    "scaling": str,
    "groups": [str],
    "float32": bool,
    "dense": {
        ANY: {"assumed": dict, "ignored": dict, "only": {ANY: list}, "when": CONDITION},
    },
    "config": dict,
    "part": float,
    "beside": float,
    "sizes": TEXTS,
}

KEYS = {
    "family": str,
    "model_type": ([str], str),
    "extends": str,
    "architecture": str,
    "loads_with": str,
    "sizes": {ANY: ({ANY: CONDITION}, str)},
    "same": TEXTS,
    "constants": {ANY: int},
    "assumed": dict,
    "conditions": TEXTS,
    "computed": [str],
    "may_be_zero": [str],
    "ratios": TEXTS,
    "aliases": TEXTS,
    "former": TEXTS,
    "per_layer": [str],
    "choices": {ANY: [str]},
    "groups": {ANY: ([str], str)},
    "kinds": TEXTS,
    "places": TEXTS,
    "multiples": {ANY: ([MULTIPLE], MULTIPLE, str)},
    "needs": TEXTS,
    "lists": [str],
    "arranged": dict,
    "numbered": str,
    "normed_sums": CONDITION,
    "fixed": {ANY: ({"when": CONDITION, "why": str}, str)},
    "norms": [NORM],
    "recomputed": [str],
    "tied": TEXTS,
    "tensors": {ANY: ([TENSOR], TENSOR, str)},
    "other_forms": [dict],
    "form": FORM,
    "experts": EXPERTS,
}
"""The keys of a description and the kinds of their values; kinds in a tuple are alternatives."""

MOST = 1 << 24
"""Of a constant."""

WORDS = {
    str: "text",
    dict: "a mapping",
    list: "a list",
    bool: "true or false",
    float: "a number",
    int: "a whole number",
}


def check_kind(value: Any, kinds: Any, what: str) -> None:
    """Refuse a value that is of none of some kinds, and one with such a part; see ``KEYS``.

    Raises:
        InputError: names the part, and what was expected.
    """
    several = kinds if isinstance(kinds, tuple) else (kinds,)
    kind = next((each for each in several if _is_kind(value, each)), None)
    if kind is None:
        expected = [WORDS[each if isinstance(each, type) else type(each)] for each in several]
        raise InputError(f"{what} is {in_yaml(value)}; {' or '.join(expected)} was expected")
    if isinstance(kind, list):
        for each in value:
            check_kind(each, kind[0], f"an entry of {what}")
    elif isinstance(kind, dict):
        for key, each in value.items():
            if key not in kind and ANY not in kind:
                raise InputError(f"{what} has an unknown key {key!r}; {did_you_mean(key, kind)}")
            check_kind(each, kind.get(ANY, kind.get(key)), f"{key} in {what}")


def _is_kind(value: Any, kind: Any) -> bool:
    if kind in (int, float):
        number = isinstance(value, int if kind is int else int | float)
        return number and not isinstance(value, bool) and (kind is float or 0 < value < MOST)
    return isinstance(value, kind if isinstance(kind, type) else type(kind))
