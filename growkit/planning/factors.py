"""The law of updates in a few lines, as manifests hold it: layers and experts are alike."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from growkit.checkpoint.tensors import TensorInfo
from growkit.planning.update import Update
from growkit.planning.updates import Law
from growkit.results.operation import UpdateGroup, Updates

NUMBER = re.compile(r"(?<=\.)[0-9]+(?=\.)")
"""Of a layer or an expert, in the name of a tensor."""


def summary(law: Law, tensors: Mapping[str, TensorInfo]) -> Updates:
    """What a law says.

    Args:
        law: of a target.
        tensors: of the target.
    """
    alike: dict[tuple[object, ...], list[str]] = {}
    for name, update in law.updates.items():
        alike.setdefault(_key(update), []).append(name)
    kinds: dict[str, set[int]] = {}
    for number, names in enumerate(alike.values()):
        for name in names:
            kinds.setdefault(NUMBER.sub("*", name), set()).add(number)
    groups = []
    for names in alike.values():
        some = {name: NUMBER.sub("*", name) for name in names}
        listed = dict.fromkeys(
            kind if len(kinds[kind]) == 1 else name for name, kind in some.items()
        )
        groups.append(_group(list(listed), law.updates[names[0]]))
    return Updates(
        exact=not law.why,
        why=list(law.why),
        single_rate=_single_rate(law, tensors),
        groups=groups,
    )


def _group(names: list[str], update: Update) -> UpdateGroup:
    return UpdateGroup(
        tensors=names,
        lr=update.rate,
        weight_decay=update.decay,
        eps=update.eps,
        n_in=update.n_in,
        n_out=sorted({float(each) for each in update.n_out.flat}),
        new=update.new,
    )


def _key(update: Update) -> tuple[object, ...]:
    return (update.n_in, update.factor, update.new, *sorted(set(update.n_out.flat)))


def _single_rate(law: Law, tensors: Mapping[str, TensorInfo]) -> float:
    """The root mean square of all factors: AdamW moves every element by about its rate."""
    total = squares = 0.0
    for name, update in law.updates.items():
        total += tensors[name].elements
        squares += tensors[name].elements * update.rate**2
    return math.sqrt(squares / total) if total else 1.0
