"""Addition of an output gate to the attention of a trained model.

The output of the heads is multiplied by σ(W x) before ``o_proj``, where x is the input of
``q_proj``. W starts at zero: σ(0) = ½ everywhere, and ``o_proj`` is doubled to compensate. W trains
from the first step on, since σ'(0) = ¼.

Qiu et al., "Gated Attention for Large Language Models", arXiv 2505.06708.

The rest of the class must compute the same as the source's class (``Family.upgrades``). In
``q_proj``, each head has the rows of its queries and then those of its gate. Norms that add 1 to
their weights store them minus 1, which rounds if a weight is small for its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from growkit.algebra.expansion import NOTHING
from growkit.algebra.growth_law import Rows
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor
from growkit.base.tensors import TensorInfo, Weights
from growkit.extras.composed_transforms import Computed
from growkit.extras.upgrades.more_general import upgraded
from growkit.model.families.family_parts import Member
from growkit.model.model import Model
from growkit.operations.growth.copying import PROMISE
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Kept, Mapped, Slices, Transform, row_maps


class OutputGate(Operation):
    """See the module."""

    name = "output-gate"
    paper = "https://arxiv.org/abs/2505.06708"
    options = (PROMISE,)

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        target, config = upgraded(source, self.name)
        rounds = options[PROMISE.name] == "bounded"
        sizes = source.family.sizes(source.config)
        width = sizes["head_dim"]
        queries = [range(head * width, (head + 1) * width) for head in range(sizes["heads"])]
        order = tuple(row for head in queries for row in (*head, *[NOTHING] * width))

        def special(member: Member, info: TensorInfo) -> Transform | None:
            name, offset = member.name, member.tensor.offset
            if ".q_proj." in name:
                maps = partial(row_maps, source.tensors[name].shape, order)
                return Mapped(name, maps, "queries, and zeros for their gate")
            if name.endswith("o_proj.weight"):
                return Kept(name, 2.0, "× 2, because the gate is ½")
            if not offset:
                return None
            why = f"minus the {offset:g} that its class adds"
            if rounds:
                return Computed((name,), f"{why}, rounded", partial(_subtract, offset))
            return Minus(name, why=why, offset=offset)

        plan = rewrite(source, target, config, special, divergence="the output gate is new")
        if rounds:
            lost = "one rounding of the weights of norms"
            return Change([plan], "bounded", lost, by_rounding=True)
        return Change([plan])


def _subtract(offset: float, weight: Tensor) -> Tensor:
    return (weight.double() - offset).to(weight.dtype)


@dataclass(frozen=True, eq=False)
class Minus(Kept):
    """A tensor minus a number, exactly."""

    offset: float = 0.0
    refuses: bool = True

    def part(self, source: Weights, where: Slices) -> Tensor:
        """See ``Transform``.

        Raises:
            InputError: the difference rounds.
        """
        weight = super().part(source, where)
        difference = _subtract(self.offset, weight)
        if not (difference.double() + self.offset).equal(weight.double()):
            raise InputError(
                f"{self.source} in {source.where(self.source)} is stored minus {self.offset:g}, "
                f"which the class with a gate adds; this rounds in {weight.dtype}; pass a wider "
                "--dtype, or --promise bounded"
            )
        return difference

    def undo(self, rows: Rows, of: slice, *, nearest: bool = False) -> Tensor | None:
        """See ``Transform``."""
        recovered = super().undo(rows, of, nearest=nearest)
        return None if recovered is None else (recovered.double() + self.offset).to(recovered.dtype)


OPERATION = OutputGate()
