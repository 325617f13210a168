"""A few logits that identify a model in memory, even if its shards are on many ranks.

The proof computes them with the source in strict float64, on tokens that depend only on the size of
the vocabulary. It also measures how rounding to the storage dtype changes them; the limits for
other dtypes follow from their spacing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.base.limits import fingerprint_limits
from growkit.base.tensors import TORCH_NAMES, TensorInfo, main_dtype
from growkit.engine.calls import Call
from growkit.engine.transformers_class import longest_context, tokens_of
from growkit.model.checkpoint.reading import Checkpoint
from growkit.results.proof_result import Fingerprint

TOKENS = 32
"""Number of tokens, spread over the vocabulary: an embedding may be in as many shards."""

LOGITS = 8
"""Number of logits of each token, so that a head may be in 256 shards."""

STRIDE = 13
"""Step between consecutive tokens of the sequence; ascending ids would not resemble a text."""


@dataclass(frozen=True)
class Question:
    """A sequence, and the logits of it that identify a model.

    Attributes:
        call: the sequence.
        places: token ids of the requested logits, [tokens, ``LOGITS``].
    """

    call: Call
    places: Tensor

    def of(self, logits: Tensor) -> Tensor:
        """Select the requested ones of all logits, [tokens, vocabulary], in float64 on the CPU."""
        return logits.gather(-1, self.places.to(logits.device)).cpu().double()


def question(checkpoint: Checkpoint, longest: int = TOKENS) -> Question:
    """Make the question for models with the vocabulary of a checkpoint.

    Args:
        checkpoint: the checkpoint.
        longest: length of the sequence if the config has no longest context.
    """
    vocabulary = tokens_of(checkpoint.config)
    tokens = min(TOKENS, longest_context(checkpoint.config) or longest)
    ids = (2 * (STRIDE * torch.arange(tokens) % tokens) + 1) * vocabulary // (2 * tokens)
    places = torch.arange(LOGITS * tokens).view(LOGITS, tokens).T * vocabulary // (LOGITS * tokens)
    return Question(Call(ids), places)


def fingerprint(
    of: str, asked: Question, exact: Tensor, rounded: Tensor, dtype: str, widest: int
) -> Fingerprint | None:
    """The fingerprint of a model; None if it computes no usable logits.

    Args:
        of: the model, ``source`` or ``target``.
        asked: the question.
        exact: the answer in strict float64.
        rounded: the answer in the storage dtype.
        dtype: torch name of the storage dtype.
        widest: largest number of terms in a sum.
    """
    scale = float(exact.square().mean().sqrt())
    rounding = distance(exact, rounded, scale)
    if not (math.isfinite(scale) and scale > 0 and math.isfinite(rounding)):
        return None
    return Fingerprint(
        of=of,
        ids=asked.call.ids.tolist(),
        places=asked.places.tolist(),
        logits=[[float(f"{value:.9g}") for value in row] for row in exact.tolist()],
        scale=scale,
        dtype=dtype,
        rounding=rounding,
        limits=fingerprint_limits(rounding, dtype, widest),
    )


def distance(expected: Tensor, computed: Tensor, scale: float) -> float:
    """Root mean square difference of answers, relative to the scale of the logits."""
    return float((expected - computed).square().mean().sqrt()) / scale if scale else math.nan


def computed_in(tensors: Mapping[str, TensorInfo]) -> str:
    """The torch name of the dtype in which a stored model computes."""
    name = TORCH_NAMES[main_dtype(tensors)]
    return "bfloat16" if name.startswith("float8") else name


def widest(checkpoint: Checkpoint) -> int:
    """The largest dimension of any tensor."""
    return max(max(info.shape, default=1) for info in checkpoint.tensors.values())
