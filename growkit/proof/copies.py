"""What a target copies of its source, as the classes have them, by the maps of the plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from growkit.algebra.expansion import NOTHING
from growkit.base.tensors import Config, Weights
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.class_weights import ClassWeights
from growkit.engine.loader import loading
from growkit.engine.oracle import lacks_class
from growkit.planning.layouts import as_diff_transformer, read_layout
from growkit.planning.lineage import Lineage, Places, traced
from growkit.planning.plan import Plan, Planned


@dataclass(frozen=True)
class Copied:
    """Which coordinate of the source each one of the target copies.

    Attributes:
        source: [coordinates of the target], ``NOTHING`` for zeros.
        factor: what the target's tensor is multiplied by.
    """

    source: Tensor
    factor: float = 1.0

    def expected(self, given: Tensor) -> Tensor:
        """What the target should have of the source's [..., coordinates]."""
        zero = given.new_zeros(*given.shape[:-1], 1)  # where ``NOTHING`` points to
        return torch.cat([given, zero], -1)[..., self.source.to(given.device)]

    def summed(self, found: Tensor, size: int) -> Tensor:
        """The sums of copies in the target's [..., coordinates]; ``size`` is the source's."""
        sums = found.new_zeros(*found.shape[:-1], size + 1)
        return sums.index_add_(-1, self.source.to(found.device) % (size + 1), found)[..., :-1]


def copied_states(expected: Tensor, found: Tensor, copied: Copied | None) -> Copied | None:
    """How the target's hidden states hold the source's; None if they cannot.

    Args:
        expected: states of the source, [tokens, hidden].
        found: those of the target.
        copied: what is known of it; without, whole spaces or single coordinates may be repeated.
    """
    size, grown = expected.shape[-1], found.shape[-1]
    if copied and len(copied.source) == grown:
        return copied
    if grown % size:
        return None
    places = torch.arange(grown)
    orders = Copied(places % size), Copied(places // (grown // size))
    return min(orders, key=lambda order: error_of(found, order.expected(expected)))


def error_of(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the scale of what is expected."""
    scale = expected.square().mean().sqrt().clamp_min(torch.finfo(expected.dtype).tiny)
    return float((found - expected).abs_().max() / scale)


class AsClass:
    """A checkpoint as a model class has it.

    Args:
        checkpoint: the files.
        as_diff: whether to load it as a DIFF Transformer.
    """

    def __init__(self, checkpoint: Checkpoint, *, as_diff: bool = False) -> None:
        self.checkpoint = checkpoint
        self._plan: Plan | None = None
        self.to_be_run: Weights = checkpoint
        if as_diff or lacks_class(checkpoint.config):
            self._plan = read_layout(checkpoint)
            self.to_be_run = Planned(checkpoint, self._plan)

    def config_of(self, config: Config) -> Config:
        """What a config of this family is to the class."""
        return as_diff_transformer(config, self.checkpoint.where()) if self._plan else config

    @cached_property
    def weights(self) -> Weights:
        """Under the names of the class."""
        if self._plan:
            return self.to_be_run
        return ClassWeights(self.checkpoint, loading(self.checkpoint).conversions)

    def stored(self, name: str, dimension: int = 0) -> Places | None:
        """The stored tensor of a parameter, and the places of its coordinates."""
        if self._plan:
            return traced((self._plan,), name, dimension)
        weights = self.weights
        assert isinstance(weights, ClassWeights)
        file = weights.stored_as(name)
        return Places(file) if file else None


class Copies:
    """What the parameters of a target copy of those of its source.

    Args:
        lineage: how the target was made.
        before: the source.
        after: the target.
    """

    def __init__(self, lineage: Lineage, before: AsClass, after: AsClass) -> None:
        self._plans, self._before, self._after = lineage.plans, before, after

    def of(self, name: str, of: str, dimension: int) -> Copied | None:
        """Which coordinates a dimension of a parameter copies; None if that is not known.

        Args:
            name: of the target's parameter.
            of: of the source's.
            dimension: of both.
        """
        after, before = self._origin(name, dimension), self._before.stored(of, dimension)
        if after is None or before is None or after.tensor != before.tensor:
            return None
        source = after.source
        if source is None:
            source = np.arange(self._after.weights.tensors[name].shape[dimension])
        if before.source is not None:
            size = self._before.checkpoint.tensors[before.tensor].shape[dimension]
            place = np.full(max(size, source.max(initial=0) + 1) + 1, NOTHING)
            place[before.source] = np.arange(len(before.source))
            source = place[source]
        grown, size = (
            each.weights.tensors[tensor].shape[dimension]
            for each, tensor in ((self._after, name), (self._before, of))
        )
        if len(source) != grown or source.max(initial=NOTHING) >= size:
            return None  # the manifest does not describe this target
        return Copied(torch.from_numpy(source), after.factor / before.factor)

    def _origin(self, name: str, dimension: int) -> Places | None:
        stored = self._after.stored(name, dimension)
        return traced(self._plans, stored.tensor, dimension, stored) if stored else None
