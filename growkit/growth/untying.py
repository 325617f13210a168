"""Untying: a head that is the embedding becomes a tensor of its own, with the same weights.

The function stays the same, but in training the head can now diverge from the embedding. Where no
norm can make up for what a tied head reads more than once, only an untied model can grow.
"""

from __future__ import annotations

from collections.abc import Mapping

from growkit.algebra.axes import Role
from growkit.checkpoint.tensors import TensorInfo, Weights
from growkit.errors import InputError
from growkit.families.family import stored_family
from growkit.planning.operation import Switch
from growkit.planning.plan import Plan, Rule, taken_over, unused_tensors
from growkit.planning.transforms import Kept

UNTIE = Switch("untie", "give a model whose output head is its embedding a separate head")


def untied(source: Weights, options: Mapping[str, str]) -> Plan | None:
    """Plan the head, if it is asked for.

    Raises:
        InputError: there is one already.
    """
    if "untie" not in options:
        return None
    family = stored_family(source)
    if not family.complete(source.config).get("tie_word_embeddings"):
        raise InputError(
            f"the {family.name} model in {source.where()} has a head of its own already; leave "
            "--untie out"
        )
    dropped, duplicates = unused_tensors(source, family)
    before = family.patterns(source.config)
    config = {**source.config, "tie_word_embeddings": False}
    after = family.patterns(config)
    sizes = family.sizes(config)
    (embedding,) = (name for name, each in before.items() if "vocab" in each.axes(Role.READ))
    rules = []
    for name, pattern in after.items():
        info = TensorInfo(pattern.shape(sizes), source.tensors[embedding].dtype)
        if name in before:
            rules.append(taken_over(name, source.tensors[name]))
        else:
            rules.append(Rule(name, info, Kept(embedding, why="the embedding, as it is")))
    plan = Plan(config, tuple(rules), {}, dropped=dropped, duplicates=duplicates)
    plan.check(source, after, sizes)
    return plan
