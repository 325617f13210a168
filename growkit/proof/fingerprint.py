"""A few logits that identify a model in memory, even if its shards are on many ranks.

The proof asks the source for them in strict float64, on the same tokens for every model with so
many of them. What rounding to the storage dtype does to the source is measured on the way, and
limits for other dtypes follow from their spacing.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from growkit.base.limits import fingerprint_limits
from growkit.base.tensors import TORCH_NAMES, TensorInfo, main_dtype
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.calls import Call
from growkit.engine.layerwise import Layerwise
from growkit.engine.oracle import longest_context
from growkit.engine.strict import CPU, reproducible, strict_float64
from growkit.results.proof import Fingerprint

TOKENS = 32
"""Of the sequence, spread over the vocabulary: rows of an embedding may lie in as many shards."""

LOGITS = 8
"""Of each token, so that rows of a head may lie in 256 shards."""

STRIDE = 13
"""In which order tokens are asked: one after the other would be like no text."""


@dataclass(frozen=True)
class Question:
    """What a model is asked.

    Attributes:
        call: the sequence.
        places: the tokens whose logits are wanted, [tokens, ``LOGITS``].
    """

    call: Call
    places: Tensor

    def of(self, logits: Tensor) -> Tensor:
        """These logits out of all, [tokens, vocabulary or more]; in float64 on the CPU."""
        return logits.gather(-1, self.places.to(logits.device)).cpu().double()


def question(checkpoint: Checkpoint, longest: int = TOKENS) -> Question:
    """What is asked of the models that answer with all tokens of one.

    Args:
        checkpoint: the one.
        longest: tokens that it takes for sure, where its config does not say how many it takes.
    """
    vocabulary = checkpoint.config["vocab_size"]
    tokens = min(TOKENS, longest_context(checkpoint.config) or longest)
    ids = (2 * (STRIDE * torch.arange(tokens) % tokens) + 1) * vocabulary // (2 * tokens)
    places = torch.arange(LOGITS * tokens).view(LOGITS, tokens).T * vocabulary // (LOGITS * tokens)
    return Question(Call(ids), places)


def fingerprint(
    of: str, asked: Question, exact: Tensor, rounded: Tensor, dtype: str, widest: int
) -> Fingerprint | None:
    """What is written down of a model; None if it computes nothing usable.

    Args:
        of: whose logits these are.
        asked: what it was asked.
        exact: the answer in strict float64.
        rounded: the answer in another dtype.
        dtype: that dtype.
        widest: the most numbers that are summed up in it.
    """
    scale = float(exact.square().mean().sqrt())
    rounding = apart(exact, rounded, scale)
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


def apart(expected: Tensor, found: Tensor, scale: float) -> float:
    """How far answers are apart, as a root mean square, relative to the scale of the logits."""
    return float((expected - found).square().mean().sqrt()) / scale if scale else math.nan


def computed_in(tensors: Mapping[str, TensorInfo]) -> str:
    """The torch name of the dtype in which a stored model is computed."""
    name = TORCH_NAMES[main_dtype(tensors)]
    return "bfloat16" if name.startswith("float8") else name


def fingerprint_of(checkpoint: Checkpoint) -> Fingerprint | None:
    """The fingerprint of the model in a folder, which is run one layer at a time.

    Raises:
        InputError: it cannot be run.
    """
    asked, dtype = question(checkpoint), computed_in(checkpoint.tensors)
    with reproducible(CPU):
        with strict_float64():
            exact = _answer(checkpoint, torch.float64, asked)
        rounded = _answer(checkpoint, getattr(torch, dtype), asked)
    return fingerprint("target", asked, exact, rounded, dtype, widest(checkpoint))


def widest(checkpoint: Checkpoint) -> int:
    """The largest dimension of a tensor."""
    return max(max(info.shape, default=1) for info in checkpoint.tensors.values())


def _answer(checkpoint: Checkpoint, dtype: torch.dtype, asked: Question) -> Tensor:
    model = Layerwise(checkpoint, dtype, CPU, None)
    state = None
    for stage in model.stages([asked.call]):
        state = stage.after[0]
    assert state is not None
    with model.head() as head:
        return asked.of(head(state))
