"""Projections of signal and noise heads as shared bases with low-rank updates.

Which heads share a base is the scope: ``head``, a noise head with the signal heads of its group;
``layer``, all signal heads together with all noise heads together; ``all_heads``, every head of a
layer with every other. Cang et al., "Shared DIFF Transformer", equations 3 and 4 and section 2.4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.algebra.low_rank import share

Parts = tuple[Tensor, Tensor, Tensor]
"""``base``, ``down`` and ``up``, as ``growkit.modeling`` stores them."""


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
        hidden = weight.shape[1]
        if self.scope == "layer":
            return weight.view(1, 2, -1, hidden).transpose(-1, -2)
        heads = weight.view(self.signal + self.noise, -1, hidden).transpose(1, 2)
        if self.scope == "all_heads":
            return heads[None]
        ratio = self.signal // self.noise
        groups = heads[: self.signal].unflatten(0, (self.noise, ratio))
        return torch.cat([groups, heads[self.signal :, None]], dim=1)

    def full_rank(self, weight: Tensor) -> int:
        """The rank of updates from which on they hold any matrices at all."""
        _, members, inputs, outputs = self.members(weight).shape
        most = min(inputs, outputs)
        return (most + 1) // 2 if members == 2 else most

    def factorise(self, weight: Tensor, rank: int, moment: Tensor | None = None) -> Parts:
        """The best parts of a projection.

        Args:
            weight: [(signal + noise) · head_dim, hidden], in float64.
            rank: of the updates.
            moment: second moment of what it reads, [hidden, hidden]; None to count all inputs
                alike.
        """
        hidden = weight.shape[1]
        found = share(self.members(weight), rank, moment)
        base = found.base.transpose(-1, -2).reshape(-1, hidden)
        down = self._by_head(found.down).transpose(-1, -2).reshape(-1, hidden)
        return base, down, self._by_head(found.up).reshape(-1, rank)

    def multiplied_out(self, base: Tensor, down: Tensor, up: Tensor) -> Tensor:
        """The projection that parts stand for, [(signal + noise) · head_dim, hidden]."""
        hidden, rank = base.shape[1], up.shape[1]
        counts = (self.signal, self.noise)
        head_dim = up.shape[0] // sum(counts)
        bases = base.view(-1, head_dim, hidden)
        ups = up.view(-1, head_dim, rank)
        downs = down.view(-1, rank, hidden)
        if self.scope == "layer":
            downs = torch.cat([downs[i : i + 1].expand(n, -1, -1) for i, n in enumerate(counts)])
        repeated = torch.cat([bases.repeat_interleave(n // len(bases), 0) for n in counts])
        return (repeated + ups @ downs).reshape(-1, hidden)

    def _by_head(self, parts: Tensor) -> Tensor:
        """[groups, members, …] to [heads, …], signal heads first."""
        if self.scope != "head":
            return parts[0]
        return torch.cat([parts[:, :-1].flatten(0, 1), parts[:, -1]])
