"""Layers of transformers' caches with the column sums that the causal integral needs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, StaticLayer

from .differential_attention import Sums, column_sums, outputs_of
from .transformers_versions import SHAPES_OF_STATIC

CROPPED_ROWS = 256
"""How many of the last tokens can be cropped: a layer keeps their queries."""


class _ColumnSums:
    """Tensors of a cache layer that are moved, reordered and repeated with its keys.

    Attributes:
        column_sums: [batch, signal heads, tokens], the sum of all rows of the signal maps so far.
        rest: [batch, signal heads, width + 1], what these leave out; see ``Sums``.
        queries: [batch, signal heads, last tokens, head_dim]; when tokens are cropped, their part
            of the sums is computed from their queries.
        real: [batch, tokens], false for padding; None if there is none.
    """

    column_sums: Tensor | None = None
    rest: Tensor | None = None
    queries: Tensor | None = None
    real: Tensor | None = None

    @property
    def sums(self) -> Sums | None:
        """Sums over all tokens so far; None before the first."""
        return None if self.column_sums is None else Sums(self.column_sums, self.rest)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Reorder the beams."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        self._map(lambda tensor: tensor[beam_idx.to(tensor.device)])

    def offload(self) -> None:
        """Move to the CPU."""
        super().offload()  # type: ignore[misc]
        self._map(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move back to the device."""
        super().prefetch()  # type: ignore[misc]
        keys: Tensor | None = self.keys  # type: ignore[attr-defined]
        if keys is not None:
            self._map(lambda tensor: tensor.to(keys.device, non_blocking=True))

    def _map(self, change: Callable[[Tensor], Tensor]) -> None:
        for name in ("column_sums", "rest", "queries", "real"):
            if (tensor := getattr(self, name)) is not None:
                setattr(self, name, change(tensor))


class IntegralLayer(_ColumnSums, DynamicLayer):
    """Keys, values and column sums of any number of tokens.

    Attributes:
        key_heads: number of signal key heads.
        scaling: factor of the scores.
    """

    key_heads = 1
    scaling = 1.0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values.

        Raises:
            ValueError: gradients would have to flow into the column sums.
        """
        if self.keys is not None and self.keys.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "gradients do not flow through the cache of an integral; run the whole text at "
                "once, or fill the cache under torch.no_grad()"
            )
        updated: tuple[Tensor, Tensor] = super().update(*args, **kwargs)
        return updated

    def add_rows(
        self, sums: Sums, queries: Tensor, key_heads: int, real: Tensor | None, scaling: float
    ) -> None:
        """Store the sums after new rows, and what cropping these rows needs.

        Args:
            sums: over all tokens.
            queries: queries of the new rows, [batch, signal heads, rows, head_dim].
            key_heads: number of signal key heads, which precede the noise key heads.
            real: [batch, tokens], false for padding; None if there is none.
            scaling: factor of the scores.
        """
        (self.column_sums, self.rest), self.key_heads, self.real = sums, key_heads, real
        self.scaling = scaling
        queries = queries.detach()
        if self.queries is not None:
            queries = torch.cat([self.queries, queries], dim=2)
        self.queries = queries[:, :, -CROPPED_ROWS:]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.column_sums = self.rest = self.queries = self.real = None

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences of the batch."""
        super().batch_select_indices(indices)
        self._map(lambda tensor: tensor[indices.to(tensor.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        self._map(lambda tensor: tensor.repeat_interleave(repeats, dim=0))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens, and what they added to the column sums of earlier tokens.

        Args:
            tokens_to_remove: negative number of tokens, as in transformers.

        Raises:
            ValueError: the layer no longer holds the queries of all these tokens.
        """
        keys, values, before = self.keys, self.values, self.get_seq_length()
        super().crop(tokens_to_remove)
        left = self.get_seq_length()
        if left == before or self.column_sums is None:
            return
        if not left:
            self.column_sums = self.rest = self.queries = self.real = None
            return
        kept = 0 if self.queries is None else self.queries.shape[2]
        if before - left > kept:
            raise ValueError(
                f"{before - left} tokens cannot be removed from the cache of an integral, only "
                f"the last {kept}; begin with an empty cache"
            )
        assert self.queries is not None
        assert keys is not None
        real, last = self.real, self.queries[:, :, left - before :]
        added = column_sums(last, keys[:, : self.key_heads], self.scaling, left, real)
        sums = self.column_sums - added
        if self.rest is not None:
            assert values is not None
            self.rest = self.rest + outputs_of(sums[..., left:], values[:, :, left:])
        self.column_sums = sums[..., :left]
        self.queries = self.queries[:, :, : left - before]
        self.real = None if real is None else real[:, :left]


class StaticHeadsLayer(StaticLayer):
    """Static layer whose values differ from the keys in the number or width of heads."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        updated: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args)
        return updated

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tensors, once their shapes are known."""
        super().lazy_initialization(*(key_states, value_states)[:SHAPES_OF_STATIC])
        shape = (*value_states.shape[:2], self.max_cache_len, value_states.shape[3])
        self.values = value_states.new_zeros(shape)
        _fix_address(self.values)


class StaticIntegralLayer(_ColumnSums, StaticHeadsLayer):
    """Static layer with column sums, [batch, signal heads, max_cache_len]; cannot be cropped."""

    def add_rows(self, sums: Sums, *unused: object) -> None:
        """Store the column sums after new rows; see ``IntegralLayer``."""
        columns = sums.columns
        if self.column_sums is None:
            self.column_sums = columns.new_zeros(*columns.shape[:2], self.max_cache_len)
            _fix_address(self.column_sums)
        # In place, since compiled graphs read this address.
        self.column_sums[..., : columns.shape[-1]].copy_(columns)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        if self.column_sums is not None:
            self.column_sums.zero_()


def _fix_address(tensor: Tensor) -> None:
    """Promise compiled graphs that the tensor keeps its address, as transformers does."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(tensor)


def fit_cache(cache: Cache, layers: int, *, integral: bool, same_shape: bool) -> None:
    """Replace layers of an empty cache that lack what this model stores for each token.

    Args:
        cache: dynamic, static, offloaded or quantized.
        layers: number of layers of the model.
        integral: whether the model needs column sums.
        same_shape: whether there are as many value heads as key heads, of the same width.

    Raises:
        ValueError: the cache holds tokens of another model, or layers that cannot be replaced.
    """
    if any(cache.is_sliding):
        raise ValueError(
            "this cache has a window, but a DIFF Transformer attends to all earlier tokens; pass a "
            "DynamicCache(config=model.config), or leave cache_implementation out"
        )
    if integral and not cache.layers:
        cache.layers.extend(IntegralLayer() for _ in range(layers))
    static = StaticIntegralLayer if integral else StaticHeadsLayer
    cache_layers: list[Any] = cache.layers
    for index, layer in enumerate(cache_layers):
        replacement: Any = None
        if type(layer) is StaticLayer and (integral or not same_shape):
            replacement = static(max_cache_len=layer.max_cache_len)
        elif type(layer) is DynamicLayer and integral:
            replacement = IntegralLayer()
        elif not integral or isinstance(layer, _ColumnSums):
            continue
        if replacement is None or (layer.is_initialized and int(layer.get_seq_length())):
            raise ValueError(
                f"this cache ({type(layer).__name__}) cannot hold the column sums of an integral, "
                "or already holds tokens of another model; pass an empty "
                "DynamicCache(config=model.config) or StaticCache"
            )
        cache_layers[index] = replacement
