"""The algebra half of the proof: the target's weights give the source's weights back.

Prompts never touch most rows of an embedding, and a change in a row that no prompt touches changes
no logit. Collapsing the written tensors (W = L W' E) looks at every element of every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

from growkit.checkpoint import Weights
from growkit.plan import Plan


def first_lost_tensor(source: Weights, target: Weights, plans: Sequence[Plan]) -> str | None:
    """The first tensor of the target that does not give its source back, bit for bit.

    Args:
        source: what the first plan was made for.
        target: what was written.
        plans: all steps from one to the other.

    Returns:
        The tensor's name; None if nothing is lost.
    """
    for written in plans[-1].rules:
        info = target.tensors.get(written.target)
        if info != written.info:
            return written.target
        tensor, name = target.read(written.target), written.target
        for plan in reversed(plans):
            rule = plan.rule(name)
            collapsed = rule.collapse(tensor)
            if collapsed is None:
                return written.target
            tensor, name = collapsed, rule.sources[0]
        if not tensor.equal(source.read(name)):
            return written.target
    return None
