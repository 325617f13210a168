"""Which tokens see which: padding, texts packed into rows, masks and caches.

Usually attention needs nothing beyond causality, or only which tokens are padding. A mask of
queries × keys is made only for maps in full and for graphs.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices

from .transformers_versions import columns_of, is_tracing

MASKED = -1e3
"""A mask's addends below this hide tokens."""

HIDDEN_KEY = -1e9
HIDDEN_KEY_FLOAT16 = -30000.0
"""Addend to the scores of padding, before scaling: far below any score, but finite, so that a row
that sees only padding does not divide by zero."""


def hide_padding(query: Tensor, key: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Queries and keys with an additional coordinate that hides padding.

    A mask would take rows × columns of memory and rule out the fastest kernels.

    Args:
        query: [batch, heads, rows, head_dim].
        key: [batch, key_heads, columns, head_dim].
        real: [batch, columns], false for padding; None if there is none.
    """
    if real is None:
        return query, key
    lowest = HIDDEN_KEY_FLOAT16 if key.dtype == torch.float16 else HIDDEN_KEY
    hidden = (~real).to(key.dtype)[:, None, :, None] * lowest
    key = torch.cat([key, hidden.expand(-1, key.shape[1], -1, -1)], dim=-1)
    return functional.pad(query, (0, 1), value=1.0), key


class PackedTexts(NamedTuple):
    """Texts of similar length that are packed into rows of a batch.

    Attributes:
        indices: [texts, longest], index of each token in the flattened batch; 0 for padding.
        real: [texts, longest], false for padding, which follows each text.
    """

    indices: Tensor
    real: Tensor

    def unpack(self, heads: Tensor) -> Tensor:
        """[batch, heads, rows, width] to [texts, heads, longest, width]; [1, heads, 1, 1] stays."""
        if heads.shape[2] == 1 and heads.shape[0] == 1:
            return heads
        return heads.transpose(1, 2).flatten(0, 1)[self.indices].transpose(1, 2)


class Visibility(NamedTuple):
    """Visibility of tokens, beyond causality.

    Attributes:
        real: [batch, columns], false for padding; None if there is none.
        packed: texts that do not see each other, shortest first; empty if each row is one text.
        visible: [batch or 1, 1, rows, columns], true for visible columns, in place of causality,
            ``real`` and ``packed``. None where it is not needed, since it grows with the square of
            the tokens. For other implementations of attention, the mask in their format.
        eager: whether attention maps are computed in full.
    """

    real: Tensor | None = None
    packed: tuple[PackedTexts, ...] = ()
    visible: Tensor | None = None
    eager: bool = False


def find_packed_texts(position_ids: Tensor, batch: int, *, cached: bool) -> tuple[PackedTexts, ...]:
    """Find texts that are packed into the rows of a batch; none if each row is one text.

    Lengths within a group differ by less than a factor of two, which limits padding.

    Args:
        position_ids: [batch or 1, rows]; a text begins wherever they do not increase by one.
        batch: number of rows.
        cached: whether there is a cache, which takes one text per row.

    Raises:
        ValueError: there are several texts, which would attend to each other in a cache.
    """
    numbers = find_packed_sequence_indices(position_ids)
    if numbers is None or not bool(numbers.any()):
        return ()
    if cached:
        if bool(position_ids.diff(dim=-1).le(0).any()):
            raise ValueError(
                "position_ids restart inside a sequence; a cache cannot keep packed documents "
                "apart, so pass use_cache=False and no cache, or pad the documents, with an "
                "attention_mask"
            )
        return ()
    rows = numbers.shape[1]
    numbers = numbers.expand(batch, -1) + rows * torch.arange(batch, device=numbers.device)[:, None]
    _, lengths = numbers.flatten().unique_consecutive(return_counts=True)
    firsts = lengths.cumsum(0) - lengths
    groups = lengths.log2().floor()
    packed = []
    for group in groups.unique().tolist():
        chosen = groups == group
        length, first = lengths[chosen, None], firsts[chosen, None]
        steps = torch.arange(int(length.max()), device=length.device)
        real = steps < length
        packed.append(PackedTexts(torch.where(real, first + steps, 0), real))
    return tuple(packed)


def repack(packed: Sequence[PackedTexts], parts: Sequence[Tensor], batch: int) -> Tensor:
    """Heads of every group, [texts, heads, longest, width], to [batch, heads, rows, width]."""
    tokens = [part.transpose(1, 2)[texts.real] for texts, part in zip(packed, parts, strict=True)]
    order = torch.cat([texts.indices[texts.real] for texts in packed]).argsort()
    heads = torch.cat(tokens)[order]
    return heads.view(batch, -1, *heads.shape[1:]).transpose(1, 2)


def find_visibility(
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    packed: tuple[PackedTexts, ...],
    *,
    paged: bool,
    averaged: bool,
    eager: bool,
) -> Visibility:
    """Determine which tokens see which in a forward pass.

    Args:
        hidden_states: [batch, rows, hidden].
        attention_mask: [batch, columns], [batch or 1, 1, rows, columns] or None.
        position_ids: position ids as passed by the caller.
        cache: cache of earlier tokens; None for no cache.
        packed: see ``Visibility``.
        paged: whether the columns of a mask are all tokens of continuous batching.
        averaged: whether maps are averaged over rows, of which padding must be none.
        eager: whether attention maps are computed in full.

    Raises:
        ValueError: the mask does not fit.
    """
    batch, rows = hidden_states.shape[:2]
    past = cache.get_seq_length() if cache is not None else 0
    columns = columns_of(cache, rows, hidden_states.device) if cache is not None else rows
    own = torch.arange(rows, device=hidden_states.device)[:, None] + past
    real = None
    if masked := attention_mask is not None and attention_mask.dim() == 4:
        assert attention_mask is not None
        columns = attention_mask.shape[3] if paged else columns
        visible = _visible_of(attention_mask, batch, rows, columns)
    else:
        unknown = isinstance(past, Tensor) and is_tracing()
        real = _real_tokens(attention_mask, None if unknown else int(past) + rows, averaged)
        # A traced graph cannot loop over rows or texts.
        exporting = torch.compiler.is_exporting() and (averaged or cache is not None)
        unmasked = attention_mask is None and cache is None
        texts = position_ids if packed or (is_tracing() and unmasked) else None
        if not (eager or unknown or exporting or (is_tracing() and texts is not None)):
            return Visibility(real, packed)
        visible = (torch.arange(columns, device=own.device) <= own)[None, None]
        if real is not None:
            visible = visible & functional.pad(real, (0, columns - real.shape[1]))[:, None, None]
        if texts is not None:
            numbers = find_packed_sequence_indices(texts)
            assert numbers is not None
            visible = visible & (numbers[:, None, :, None] == numbers[:, None, None, :])
    if averaged:  # padding, whose rows do not see themselves, sees nothing
        visible = visible & visible.gather(-1, own.expand(visible.shape[0], 1, -1, -1))
        real = visible[:, 0].any(-2).expand(batch, -1) if masked else real
    return Visibility(real, visible=visible, eager=eager)


def _real_tokens(
    attention_mask: Tensor | None, columns: int | None, averaged: bool
) -> Tensor | None:
    """[batch, columns], false for padding; None if padding affects no token.

    Args:
        attention_mask: the mask as passed by the caller.
        columns: number of cached and new tokens; None while tracing, if that is a tensor.
        averaged: whether maps are averaged over rows, of which padding must be none.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or (columns is not None and attention_mask.shape[1] != columns):
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; [batch, {columns}] was "
            "expected, with 0 for padding, cached tokens included"
        )
    real = attention_mask.bool()
    if is_tracing():
        return real
    on_the_right = bool((real[:, :-1] | ~real[:, 1:]).all())  # no token sees such padding
    return None if bool(real.all()) or (on_the_right and not averaged) else real


def _visible_of(mask: Tensor, batch: int, rows: int, columns: int) -> Tensor:
    """A mask of four dimensions as [batch or 1, 1, rows, columns], true for visible columns."""
    shape = list(mask.shape)
    fits = shape[0] in (1, batch) and shape[1:] == [1, rows, columns]
    added = mask if mask.dtype != torch.bool else None
    if fits and added is not None and not is_tracing():
        fits = added.is_floating_point() and bool(((added == 0) | (added < MASKED)).all())
    if not fits:
        raise ValueError(
            f"attention_mask has shape {shape}; [batch, {columns}] was expected, with 0 for "
            f"padding, cached tokens included, or [batch, 1, {rows}, {columns}], true or 0 for "
            "visible columns, false or far below 0 for hidden ones"
        )
    return mask if added is None else added == 0
