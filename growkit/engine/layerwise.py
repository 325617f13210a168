"""Run a model one layer at a time from its files, in memory for a layer or two.

The model is built without weights (``stack.py``). Each layer runs all calls, and has its weights
only while it does (``forward.py``); gradients go back in the same way (``backward.py``). All
arithmetic is that of the transformers class. Nothing is assumed of it but where its layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growkit.checkpoint.tensors import Weights
from growkit.engine.backward import Backward
from growkit.engine.calls import Call
from growkit.engine.forward import Forward
from growkit.engine.lending import scaled
from growkit.engine.reproducible import choose_kernels
from growkit.engine.spool import Spool
from growkit.engine.stack import Stack


@dataclass(frozen=True)
class Stage:
    """The embedding or a layer, while its weights are loaded.

    Attributes:
        name: of the module.
        layer: index of the layer; None for the embedding.
        module: the module itself.
        given: what it is given in the call that is watched, [tokens, hidden]; None for no call, and
            for the embedding.
        after: what it hands on in every call, each [tokens, hidden], until the next is asked for.
        again: runs the layer on another [tokens, hidden], in the place of a call without cache.
        scaled: multiplies a parameter of the module, for as long as the context lasts.
        let_go: gives the weights back early.
    """

    name: str
    layer: int | None
    module: nn.Module
    given: Tensor | None
    after: list[Tensor]
    again: Callable[[int, Tensor], Tensor]
    scaled: Callable[[str, float], AbstractContextManager[None]]
    let_go: Callable[[], None]


class Layerwise:
    """A model that is never in memory as a whole.

    Args:
        weights: its checkpoint.
        dtype: what its weights are cast to.
        device: where it runs.
        attention: transformers' attention implementation; None for the class's own choice.
        tokens: number of tokens, the first of the vocabulary, whose logits are wanted; None for
            all.

    Raises:
        InputError: transformers does not know the model, or the tensors do not fit the class.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        attention: str | None,
        tokens: int | None = None,
    ) -> None:
        self._tokens = tokens
        choose_kernels()
        self._stack = Stack(weights, dtype, device, attention)
        self._forward = Forward(self._stack)

    @property
    def model(self) -> Any:
        """The model of transformers, without its weights."""
        return self._stack.model

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._stack.device

    @property
    def names(self) -> list[str]:
        """The embedding, every layer, and the output head."""
        return self._stack.names

    def stores(self, name: str) -> bool:
        """Whether a tensor of this name is in the files, not tied to another."""
        return self._stack.stores(name)

    def stages(self, calls: Sequence[Call], watched: int | None = None) -> Iterator[Stage]:
        """The embedding and every layer, in order; each is given back when the next is asked for.

        Args:
            calls: what to run.
            watched: index of the call of which stages keep what they are given.

        Raises:
            InputError: the class cannot run with its config, or a tensor cannot be used.
        """
        stack = self._stack
        forward = self._forward = Forward(stack)
        with ExitStack() as loaded:
            loaded.enter_context(stack.rows(calls))
            with torch.no_grad():
                states = forward.begin(calls)
            name, embedding = stack.embedding
            yield Stage(name, None, embedding, None, states, _never, _never, loaded.close)
        for index, (name, layer) in enumerate(stack.layers):
            with ExitStack() as loaded:
                loaded.enter_context(stack.layer(index))
                again = partial(forward.again, index)
                given = None if watched is None else states[watched]
                states, along = forward.through(index, states)
                stack.fetch(index + 1)
                change = partial(scaled, layer)
                yield Stage(name, index, layer, given, states, again, change, loaded.close)
            forward.leave(index, along)

    def check_reach(self) -> None:
        """See ``Stack``."""
        self._stack.check_reach()

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """From what the last layer hands on, [tokens, hidden], to logits, [tokens, vocabulary]."""
        with self._forward.head() as run:
            yield torch.no_grad()(lambda hidden: run(hidden)[:, : self._tokens])

    def others(self, hidden: Tensor) -> float:
        """The part of the softmax that goes to tokens whose logits are not wanted.

        Args:
            hidden: what the last layer hands on, [tokens, hidden]; logits of all of these are in
                memory at once.

        Returns:
            The mean over these tokens.
        """
        with self._forward.head() as run, torch.no_grad():
            return float(run(hidden).softmax(-1)[:, self._tokens :].sum(-1).mean())

    def gradients(
        self, ids: Tensor, given: Spool, look: Callable[[str, Tensor], None]
    ) -> list[str]:
        """The gradient of every parameter, from the last layer to the first, one at a time.

        A layer that hands on what it is given has parameters that are multiplied by zero. Theirs is
        the gradient after a first step of the others.

        Of the embedding and of the head, only the rows of tokens that occur, in the order of their
        ids: the whole may be larger than any layer.

        Args:
            ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
            given: what every layer, and then the head, is given on them, each [tokens, hidden].
            look: takes the name of a parameter and its gradient; of tied parameters, that of the
                tensor they are stored as, and the gradient of each.

        Returns:
            The names of the layers that hand on what they are given.
        """
        before, self._forward = self._forward, Forward(self._stack)
        return Backward(self._stack, look).of(ids, given, before, self._forward)


def _never(*args: Any) -> Any:
    raise AssertionError("an embedding is neither run again nor changed")
