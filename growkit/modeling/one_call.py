"""Signal and noise heads as ordinary attention has them, in a single call with grouped queries.

No mathematics: heads change places, and zeros or copies are put beside them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional


class OneCall(NamedTuple):
    """How many heads of which kind there are, and how wide.

    Attributes:
        signal: number of signal heads.
        noise: number of noise heads.
        values: number of value heads.
        own_keys: whether noise heads have keys of their own.
        head_dim: of queries and keys.
        value_head_dim: of values.
    """

    signal: int
    noise: int
    values: int
    own_keys: bool
    head_dim: int
    value_head_dim: int

    @property
    def groups(self) -> int:
        """Queries for each key."""
        heads = self.signal if self.own_keys else self.signal + self.noise
        return heads // self.values

    def merge(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries in the order of the keys that they read; keys and values as wide as each other.

        Args:
            query: [batch, signal + noise, rows, head_dim], signal heads first.
            key: [batch, key_heads, columns, head_dim].
            value: [batch, values, columns, value_head_dim].

        Returns:
            [batch, groups · keys, rows, width], and twice [batch, keys, columns, width].
        """
        if self.noise:
            signal, noise = (
                heads.unflatten(1, (self.values, -1))
                for heads in query.split([self.signal, self.noise], dim=1)
            )
            if self.own_keys:  # as many queries for a noise key as for a signal key
                noise = functional.pad(noise, (0, 0, 0, 0, 0, signal.shape[2] - noise.shape[2]))
                value = torch.cat([value, value], dim=1)
            query = torch.cat([signal, noise], dim=1 if self.own_keys else 2).flatten(1, 2)
        width = max(self.head_dim, self.value_head_dim)
        query, key = (functional.pad(each, (0, width - self.head_dim)) for each in (query, key))
        return query, key, functional.pad(value, (0, width - self.value_head_dim))

    def part(self, heads: Tensor) -> tuple[Tensor, Tensor | None]:
        """Signal and noise heads of a result, [batch, heads, rows, value_head_dim] each.

        Args:
            heads: [batch, groups · keys, rows, width].
        """
        heads = heads[..., : self.value_head_dim]
        if not self.noise:
            return heads, None
        if self.own_keys:
            signal, noise = heads.chunk(2, dim=1)
            noise = noise.unflatten(1, (self.values, -1))[:, :, : self.noise // self.values]
            return signal, noise.flatten(1, 2)
        grouped = heads.unflatten(1, (self.values, -1))
        signal, noise = grouped.split(
            [self.signal // self.values, self.noise // self.values], dim=2
        )
        return signal.flatten(1, 2), noise.flatten(1, 2)
