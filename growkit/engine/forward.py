"""Forward through a stack of layers: all calls through one layer, then all through the next.

The class's own ``forward`` runs first; the layers do nothing but note their arguments. Then each
layer in turn runs all calls. At last ``forward`` runs again, from the last layer to the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from growkit.engine.calls import Batch, Call, CallError, RecordedCall, alike
from growkit.engine.passing import Arguments, Form, Handed, NoStackError, untouched
from growkit.engine.stack import Stack


def new_cache(model: Any) -> Any:
    """An empty cache that fits all layers."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def lengthen(cache: Any, layers: int, tokens: int) -> None:
    """Add tokens that hold nothing, so that a class finds its masks and positions.

    Args:
        cache: of ``new_cache``.
        layers: number of layers of the model.
        tokens: how many.
    """
    nothing = torch.zeros(1, 1, tokens, 1)
    for index in range(len(cache.layers) or layers):
        layer = cache.layers[index] if cache.layers else None
        recurrent = getattr(layer, "has_previous_state", None)
        if recurrent is not None:
            recurrent.update(dict.fromkeys(recurrent, True))
        # Layers that remember nothing have a place in the cache, too.
        if layer is None or (hasattr(layer, "update") and hasattr(layer, "lazy_initialization")):
            cache.update(nothing, nothing, index)


def keep_shapes(cache: Any, index: int) -> None:
    """Keep the shape of what a layer remembers alone: who reads it again will notice."""
    for layer in cache.layers[index : index + 1]:
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), Tensor):
                setattr(layer, name, _unknown(getattr(layer, name)))
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None) or {}
            states.update({at: _unknown(each) for at, each in states.items() if each is not None})


def _unknown(tensor: Tensor) -> Tensor:
    return tensor.new_full((), torch.nan).expand(tensor.shape)


class _ArrivedError(Exception):
    """The last layer is called; what comes behind it has no weights yet."""


class Forward:
    """Some calls of a model, whose parts are lent weights by whoever runs them here.

    Args:
        stack: the model.

    Attributes:
        batches: calls that run together, by the index of the first.
        caches: of the calls that have one: keys, values and recurrent states.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._noted: list[RecordedCall] = []
        self.batches: dict[int, Batch] = {}
        self._length = 1  # tokens of the first call
        self.caches: list[Any] = []
        self._along: list[tuple[Any, ...]] = []  # beside states, from the last layer, by call

    def begin(self, calls: Sequence[Call]) -> list[Tensor]:
        """Run every call up to the first layer, and note what the layers are called with.

        Returns:
            What the first layer is given in each, [tokens, hidden].

        Raises:
            InputError: the class cannot run with its config, or is no stack of layers.
        """
        self._length = len(calls[0].ids)
        self._along = [()] * len(calls)
        caches: list[tuple[Any, Any]] = []
        states = []
        for index, call in enumerate(calls):
            shadow, real = caches[call.continues] if call.continues is not None else (None, None)
            with self._stack.guarded(index):
                if call.cached and shadow is None:
                    shadow = new_cache(self._stack.model)
                state, noted = self._note(index, call, shadow)
                if call.cached:
                    # The class may have prepared the empty cache for itself.
                    if real is None:
                        real = deepcopy(shadow)
                        self.caches.append(real)
                    lengthen(shadow, len(self._stack.layers), len(call.ids))
                    arguments = [each.replaced((shadow,), (real,)) for each in noted.arguments]
                    noted = RecordedCall(noted.form, arguments, noted.stand_ins)
            caches.append((shadow, real))
            states.append(state)
            self._noted.append(noted)
        if self._stack.handed.alone:
            self.batches = dict(self._note_batches(calls))
        return states

    def through(
        self, index: int, before: list[Tensor]
    ) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
        """Run a layer in all calls.

        Args:
            index: of the layer.
            before: what it is given in each call, [tokens, hidden]; taken off the list one after
                the other, since states of many prompts are large and are needed once.

        Returns:
            What it hands on in each call, and what goes along with that.
        """
        states: list[Tensor] = []
        along: list[tuple[Any, ...]] = []
        while before:
            for state, others in self._run(index, len(states), before):
                states.append(state)
                along.append(others)
        return states, along

    def leave(self, index: int, along: list[tuple[Any, ...]]) -> None:
        """Go on from a layer, which is not run again: what it hands on along is now known."""
        self._along = along
        for cache in self.caches:
            keep_shapes(cache, index)

    @torch.no_grad()
    def again(self, index: int, call: int, state: Tensor) -> Tensor:
        """What a layer makes of another [tokens, hidden], in the place of a call without cache."""
        return self._call(index, call, state, apart=True)[0]

    def alone(self, index: int, state: Tensor) -> Tensor:
        """What a layer makes of another [tokens, hidden] in the only call, with gradients.

        Raises:
            InputError: it needs more of the layer before than hidden states.
        """
        (noted,) = self._noted
        # Only hidden states are handed on here: whatever else there may be stays what it is.
        self._along = [noted.stand_ins]
        output, _ = self._call(index, 0, state)
        if noted.uses_along:
            raise self._stack.refusal("layers hand on more than hidden states")
        return output

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """From what the last layer hands on, [tokens, hidden], to logits, [tokens, vocabulary]."""

        def run(hidden: Tensor) -> Tensor:
            # No more tokens at a time than in the first call: a class may have no more positions.
            whole = len(hidden) - len(hidden) % self._length if self.batches else 0
            form, parts = self._noted[0].form, []
            if whole:
                prompts = hidden[:whole].split(self._length)
                batch = torch.cat([form.formed(each) for each in prompts])
                parts.append(logits_of(batch, (len(prompts), self._length)))
            for rest in hidden[whole:].split(self._length):
                if len(rest):
                    parts.append(logits_of(form.formed(rest), (1, len(rest))))
            return torch.cat(parts)

        def logits_of(formed: Tensor, tokens: Sequence[int]) -> Tensor:
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                return self._stack.handed.with_state(formed)

            ids = torch.zeros(*tokens, dtype=torch.long, device=self._stack.device)
            with self._stack.standing_aside(stand_in), self._stack.guarded():
                logits = self._stack.model(input_ids=ids, use_cache=False).logits
            assert isinstance(logits, Tensor)
            return logits.flatten(0, 1)

        with self._stack.behind():
            yield run

    def _note_batches(self, calls: Sequence[Call]) -> Iterator[tuple[int, Batch]]:
        """The calls that can run together, by the index of the first of each batch."""
        for first, count in alike(calls):
            form = self._noted[first].form
            batch = calls[first : first + count]
            ids = torch.stack([call.ids for call in batch])
            inputs = {
                key: torch.cat([call.inputs[key] for call in batch]) for key in batch[0].inputs
            }
            try:
                with self._stack.guarded(first):
                    state, arguments = self._noting(Call(ids, inputs), None)
            except CallError:  # a class may take one prompt at a time
                return
            if form.axis == 1 and state.shape == (count, *form.shape[1:]):
                yield first, Batch(count, arguments)

    def _note(self, index: int, call: Call, cache: Any) -> tuple[Tensor, RecordedCall]:
        """What the first layer is given, and what all of them are called with."""
        try:
            state, arguments = self._noting(call, cache)
        except Exception:  # a class may do anything with a tensor where it unpacks a tuple, say
            if index or not self._stack.handed.alone:
                raise
            # The class, then, wants more of its layers than a tensor.
            self._stack.handed = self._handed_by_the_first(call)
            state, arguments = self._noting(call, cache)
        form = Form.of(state, len(call.ids))
        return form.flat(state), RecordedCall(form, arguments, self._stack.handed.along)

    def _noting(self, call: Call, cache: Any) -> tuple[Tensor, list[Arguments]]:
        given: list[tuple[Tensor, int]] = []
        arguments: list[Arguments] = []
        count = len(self._stack.layers)

        def stand_aside(*args: Any, **kwargs: Any) -> Any:
            state, others = Arguments.of(args, kwargs)
            if given and not untouched(state, *given[0]):
                raise NoStackError("something is computed between layers")
            given.append((state, state._version))
            arguments.append(others)
            if len(arguments) == count:
                raise _ArrivedError
            return self._stack.handed.with_state(state)

        with self._stack.standing_aside(stand_aside), suppress(_ArrivedError):
            self._model(call, cache)
        if len(arguments) < count:
            raise NoStackError(f"{len(arguments)} of {count} layers are called")
        return given[0][0], arguments

    def _handed_by_the_first(self, call: Call) -> Handed:
        """What the first layer hands on in a call; stand-ins for it."""
        noted: list[tuple[Tensor, Arguments]] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            noted.append(Arguments.of(args, kwargs))
            raise _ArrivedError

        with self._stack.standing_aside(stop), suppress(_ArrivedError):
            self._model(Call(call.ids, call.inputs), None)
        if not noted:
            raise NoStackError("no layer is called")
        ((state, arguments),) = noted
        with self._stack.layer(0):
            args, kwargs = arguments.apart().call(state)
            return Handed.of(self._stack.layers[0][1](*args, **kwargs))[1].unknown()

    def _model(self, call: Call, cache: Any) -> None:
        """Run the class's own ``forward``."""
        device = self._stack.device
        inputs: dict[str, Any] = {key: each.to(device) for key, each in call.inputs.items()}
        if cache is not None:
            inputs["past_key_values"] = cache
        ids = torch.atleast_2d(call.ids).to(device)
        self._stack.model(input_ids=ids, use_cache=call.cached, **inputs)

    @torch.no_grad()
    def _run(
        self, index: int, call: int, before: list[Tensor]
    ) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        """Run a layer in a call, or in a batch of them, and take what it is given off ``before``.

        Yields:
            What ``_call`` returns, for each.
        """
        batch = self.batches.get(call)
        if not batch:
            yield self._call(index, call, before.pop(0))
            return
        form = self._noted[call].form
        together = torch.cat([form.formed(state) for state in before[: batch.count]])
        del before[: batch.count]
        args, kwargs = batch.arguments[index].call(together)
        with self._stack.guarded(call):
            output = self._output(index, args, kwargs)[0]
        yield from ((form.flat(state), ()) for state in output.split(1))

    def _call(
        self, index: int, call: int, state: Tensor, *, apart: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Run a layer: hidden states, [tokens, hidden], and what it hands on along with them."""
        noted = self._noted[call]
        arguments = noted.arguments[index]
        if index and noted.stand_ins:
            arguments = arguments.replaced(noted.stand_ins, self._along[call])
        args, kwargs = (arguments.apart() if apart else arguments).call(noted.form.formed(state))
        with self._stack.guarded(call):
            output, handed = self._output(index, args, kwargs)
            if index and noted.stand_ins and len(noted.stand_ins) != len(handed.along):
                raise NoStackError("layers hand on different things")
            return noted.form.flat(output), handed.along

    def _output(
        self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Handed]:
        """What a layer hands on."""
        output, handed = Handed.of(self._stack.layers[index][1](*args, **kwargs))
        if handed.alone != self._stack.handed.alone:
            self._stack.handed = handed.unknown()  # a single layer: nobody has looked yet
        return output, handed
