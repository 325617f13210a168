"""An output gate for attention, so that a trained model continues with it.

What the heads of a token attend to is multiplied by σ(W x) before ``o_proj``, where x is what the
token's queries are made of. W begins as zeros: σ(0) = ½ everywhere, and ``o_proj`` times 2 makes up
for it. W learns from the first step on, since its gradient is ¼ of what it multiplies.

Qiu et al., "Gated Attention for Large Language Models", arXiv 2505.06708.

The class must do the rest as the source does, which families say (``ungated``). Rows of the gate
follow those of the queries of each head. Norms that add 1 to their weights store them less 1, which
rounds where a weight is small for its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from growkit.algebra.expansion import NOTHING
from growkit.algebra.law import Rows
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor
from growkit.base.tensors import Weights
from growkit.families.family import families, stored_family
from growkit.growth.copying import PROMISE
from growkit.growth.upcycling import config_with
from growkit.planning.operation import Change, Operation, Option
from growkit.planning.plan import Plan, unused_tensors
from growkit.planning.transforms import Computed, Kept, Mapped, Slices, Transform, row_maps


class OutputGate(Operation):
    """See the module."""

    name = "output-gate"
    paper = "https://arxiv.org/abs/2505.06708"

    @property
    def options(self) -> tuple[Option, ...]:
        """See ``Operation``."""
        return (PROMISE,)

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        family, kind = stored_family(source), source.config["model_type"]
        known = {each: target for target in families().values() for each in target.ungated}
        if kind not in known:
            raise InputError(
                f"no class with an output gate does the rest of what a {family.name} model does, "
                f"so {source.where()} cannot get one; these can: {', '.join(sorted(known))}"
            )
        target, rounds = known[kind], options[PROMISE.name] == "bounded"
        config = config_with(source, family, target, target.ungated[kind])
        sizes = family.sizes(source.config)
        width = sizes["head_dim"]
        queries = [range(head * width, (head + 1) * width) for head in range(sizes["heads"])]
        order = tuple(row for head in queries for row in (*head, *[NOTHING] * width))
        made: dict[str, Transform] = {}
        for name, tensor, *_ in target.members(config):
            if ".q_proj." in name:
                maps = partial(row_maps, source.tensors[name].shape, order)
                made[name] = Mapped(name, maps, "queries, and zeros for their gate")
            elif name.endswith("o_proj.weight"):
                made[name] = Kept(name, 2.0, "× 2, because the gate is ½")
            elif tensor.offset and rounds:
                less = partial(_less, tensor.offset)
                made[name] = Computed((name,), "less what its class adds, rounded", less)
            elif tensor.offset:
                made[name] = Less(name, why="less what its class adds", offset=tensor.offset)
            else:
                made[name] = Kept(name)
        unused = unused_tensors(source, family)
        plan = Plan.checked(
            source, target, config, made, unused=unused, apart="the output gate is new"
        )
        if rounds:
            lost = "one rounding of the weights of norms"
            return Change([plan], "bounded", lost, by_rounding=True)
        return Change([plan])


def _less(offset: float, weight: Tensor) -> Tensor:
    return (weight.double() - offset).to(weight.dtype)


@dataclass(frozen=True, eq=False)
class Less(Kept):
    """A tensor less a number, exactly."""

    offset: float = 0.0

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``.

        Raises:
            InputError: it rounds.
        """
        weight = super().part(source, where)
        less = _less(self.offset, weight)
        if not (less.double() + self.offset).equal(weight.double()):
            raise InputError(
                f"{self.source} in {source.where(self.source)} less {self.offset:g}, which the "
                f"class with a gate adds, rounds in {weight.dtype}; pass a wider --dtype, or "
                "--promise bounded"
            )
        return less

    def undo(self, rows: Rows, of: slice) -> Tensor | None:
        """See ``Transform``."""
        less = super().undo(rows, of)
        return None if less is None else (less.double() + self.offset).to(less.dtype)


OPERATION = OutputGate()
