"""Run a model one layer at a time from its files, with one or two layers in memory.

The model is built without weights, by its transformers class. Each layer in turn runs all calls,
and is lent its weights only meanwhile.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from growkit.engine.calls import Call, Extras
from growkit.engine.forward import Forward
from growkit.engine.layered_model import LayeredModel


@dataclass(frozen=True)
class Stage:
    """The embedding or a layer, while its weights are loaded.

    Attributes:
        name: name of the module.
        layer: index of the layer; None for the embedding.
        module: the module itself.
        after: output of the module in every call, each [tokens, hidden]; valid until the next
            stage.
        extras: other outputs of the module in every call.
        forward: the run that the stage belongs to.
        loaded: the loaded weights; close it to free them early.
    """

    name: str
    layer: int | None
    module: nn.Module
    after: list[Tensor]
    extras: list[Extras]
    forward: Forward
    loaded: ExitStack

    def again(self, call: int, state: Tensor) -> Tensor:
        """Rerun the layer with another input, [tokens, hidden], in a call without cache."""
        assert self.layer is not None
        with torch.no_grad():
            return self.forward.run_layer(self.layer, call, state, copied=True)[0]


def last_state(stages: Iterator[Stage]) -> Tensor:
    """Run all stages; return the output of the last layer in the first call, [tokens, hidden]."""
    for stage in stages:
        state = stage.after[0]
    return state


class Layerwise(LayeredModel):
    """A model that runs one layer at a time; see ``LayeredModel``."""

    _forward: Forward  # the run of the last stages

    def stages(self, calls: Sequence[Call]) -> Iterator[Stage]:
        """Run the embedding and every layer, in order; weights are freed before the next stage.

        Args:
            calls: calls to run.

        Raises:
            InputError: the class cannot run with its config, or a tensor cannot be used.
        """
        forward = self._forward = Forward(self)
        with ExitStack() as loaded:
            loaded.enter_context(self.rows(calls))
            with torch.no_grad():
                states = forward.begin(calls)
            nothing: list[Extras] = [()] * len(calls)
            yield Stage(
                self.embedding[0], None, self.embedding[1], states, nothing, forward, loaded
            )
        for index, (name, layer) in enumerate(self.layers):
            with ExitStack() as loaded:
                loaded.enter_context(self.layer(index))
                states, extras = forward.through(index, states)
                self.fetch(index + 1)
                yield Stage(name, index, layer, states, extras, forward, loaded)
            forward.leave(index, extras)

    @property
    def altering(self) -> list[str]:
        """See ``Forward``: the names of these layers in the last run of all stages."""
        return [self.layers[index][0] for index in self._forward.altering]

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Load the head: a function from [tokens, hidden] to logits, [tokens, vocabulary]."""
        with self._forward.head() as run:
            yield torch.no_grad()(lambda hidden: run(hidden)[:, : self.tokens])

    def logits(self, call: Call) -> Tensor:
        """Run all stages in one call; return its logits, [tokens, vocabulary]."""
        state = last_state(self.stages([call]))
        with self.head() as head:
            return head(state)

    def share(self, hidden: Tensor, tokens: Sequence[int]) -> float:
        """Mean probability mass of some tokens, over all rows.

        Args:
            hidden: output of the last layer, [tokens, hidden]; all its logits are in memory at
                once.
            tokens: their ids.
        """
        with self._forward.head() as run, torch.no_grad():
            return float(run(hidden).softmax(-1)[:, list(tokens)].sum(-1).mean())
