"""Projections of signal and noise heads as shared bases with low-rank updates.

Which heads share a base is the scope: ``head``, a noise head with the signal heads of its group;
``layer``, all signal heads together with all noise heads together; ``all_heads``, every head of a
layer with every other. Cang et al., "Shared DIFF Transformer", equations 3 and 4 and section 2.4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """The heads of a projection, signal heads first, and which of them share a base.

    Attributes:
        signal: number of signal heads.
        noise: number of noise heads.
        scope: ``head``, ``layer`` or ``all_heads``.
    """

    signal: int
    noise: int
    scope: str

    def members(self, weight: Tensor) -> Tensor:
        """Matrices by the base they share: [groups, members, hidden, outputs].

        Args:
            weight: [(signal + noise) · head_dim, hidden].
        """
        import torch

        hidden = weight.shape[1]
        if self.scope == "layer":
            return weight.view(1, 2, -1, hidden).transpose(-1, -2)
        heads = weight.view(self.signal + self.noise, -1, hidden).transpose(1, 2)
        if self.scope == "all_heads":
            return heads[None]
        ratio = self.signal // self.noise
        groups = heads[: self.signal].unflatten(0, (self.noise, ratio))
        return torch.cat([groups, heads[self.signal :, None]], dim=1)

    def full_rank(self, shape: Sequence[int]) -> int:
        """The rank of updates from which on they hold any matrices at all.

        Args:
            shape: of the projection, [(signal + noise) · head_dim, hidden].
        """
        members, inputs, outputs = self._sizes(shape)
        most = min(inputs, outputs)
        return (most + 1) // 2 if members == 2 else most

    def saving_rank(self, shape: Sequence[int]) -> int:
        """The largest rank of updates with which the parts have fewer elements; 0 if none has.

        A base and ``members`` updates, r · (inputs + outputs) each, for ``members`` matrices.

        Args:
            shape: of the projection, [(signal + noise) · head_dim, hidden].
        """
        members, inputs, outputs = self._sizes(shape)
        return ((members - 1) * inputs * outputs - 1) // (members * (inputs + outputs))

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Members of a base, and inputs and outputs of each."""
        rows, hidden = shape
        heads = self.signal + self.noise
        if self.scope == "layer":
            return 2, hidden, rows // 2
        members = heads if self.scope == "all_heads" else self.signal // self.noise + 1
        return members, hidden, rows // heads

    def factorise(
        self,
        weight: Tensor,
        rank: int,
        moment: Tensor | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best parts of a projection: base, down and up, as ``growkit.modeling`` stores them.

        Args:
            weight: [(signal + noise) · head_dim, hidden], in float64.
            rank: of the updates.
            moment: second moment of what it reads, [hidden, hidden]; None to count all inputs
                alike.
            dtype: what the parts are rounded to, float64 without; the base is that of the rounded
                updates.
        """
        from growkit.conversions.shared_diff.low_rank import share

        dtype = dtype or weight.dtype
        found = share(self.members(weight), rank, moment)
        down = self._by_head(found.down).transpose(-1, -2).reshape(-1, weight.shape[1]).to(dtype)
        up = self._by_head(found.up).reshape(-1, rank).to(dtype)
        return self.best_base(weight, down.double(), up.double()).to(dtype), down, up

    def best_base(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The mean of what updates leave over; all in float64, the same bits on every machine.

        Args:
            weight: the projection, [(signal + noise) · head_dim, hidden].
            down: of all updates, as stored.
            up: of all updates, as stored.
        """
        rests = self.members(self._updated(weight, down, -up))
        mean = reduce(add, rests.unbind(1)) / rests.shape[1]
        return mean.transpose(-1, -2).reshape(-1, weight.shape[1])

    def multiplied_out(self, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The projection that parts stand for, [(signal + noise) · head_dim, hidden].

        All in float64, the same bits on every machine.
        """
        import torch

        hidden = base.shape[1]
        bases = base.view(-1, up.shape[0] // (self.signal + self.noise), hidden)
        counts = (self.signal, self.noise)
        repeated = torch.cat([bases.repeat_interleave(n // len(bases), 0) for n in counts])
        return self._updated(repeated.reshape(-1, hidden), down, up)

    def _updated(self, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The projection plus the updates.

        Products are rounded, then added in the order of the rank. A product of matrices would be
        summed in another order, with other last bits, by every library and number of threads.
        """
        import torch

        counts = (self.signal, self.noise)
        updated = weight.clone()
        heads = updated.view(sum(counts), -1, weight.shape[1])
        ups = up.view(sum(counts), -1, up.shape[1])
        downs = down.view(-1, up.shape[1], weight.shape[1])
        if self.scope == "layer":
            downs = torch.cat([downs[i : i + 1].expand(n, -1, -1) for i, n in enumerate(counts)])
        for head, tall, wide in zip(heads, ups, downs, strict=True):
            for column, row in zip(tall.unbind(1), wide, strict=True):
                head += column[:, None] * row
        return updated

    def _by_head(self, parts: Tensor) -> Tensor:
        """[groups, members, …] to [heads, …], signal heads first."""
        import torch

        if self.scope != "head":
            return parts[0]
        return torch.cat([parts[:, :-1].flatten(0, 1), parts[:, -1]])
