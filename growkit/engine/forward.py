"""One run of some calls through a model, one layer at a time.

The class's own ``forward`` runs first, while the layers only record their arguments. Then each
layer runs with these in all calls. Finally ``forward`` runs again, from the last layer to the
logits. So the transformers class does all arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from growkit.base.limits import is_identity
from growkit.base.torch_internals import tree_leaves, version_of
from growkit.engine.calls import (
    Arguments,
    Call,
    CallError,
    Extras,
    Form,
    NoStackError,
    RecordedCall,
    batches,
    nan_like,
)


class Layered(Protocol):
    """What a run needs of a model that is lent its weights (``growkit.engine.layerwise``)."""

    model: Any
    device: torch.device
    layers: list[tuple[str, nn.Module]]
    calls: Sequence[Call]
    returned: Extras | None

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Lend a layer its weights."""

    def behind(self) -> AbstractContextManager[None]:
        """Lend weights to all modules after the layers."""

    def replaced_layers(self, forward: Callable[..., Any]) -> AbstractContextManager[None]:
        """Replace the ``forward`` of every layer."""

    def guarded(self, call: int | None = None) -> AbstractContextManager[None]:
        """Turn exceptions of the model class into errors for the user."""


class _ArrivedError(Exception):
    """Stops ``forward`` at the last layer, since the modules after it have no weights yet."""


class Forward:
    """A run of some calls through a model, whose modules have weights only while they compute.

    Args:
        model: the model.

    Attributes:
        batches: calls that run together, since large products are faster: by the index of the
            first call, the number of calls and the arguments of every layer.
        caches: keys, values and recurrent states of the cached calls.
        altering: indices of layers that return their input, but hand on other values than they
            receive, to a layer that does not return its input.
    """

    def __init__(self, model: Layered) -> None:
        self._model = model
        self._recorded: list[RecordedCall] = []
        self.batches: dict[int, tuple[int, list[Arguments]]] = {}
        self._length = 1  # tokens of the first call
        self.caches: list[Any] = []
        self._extras: list[Extras] = []  # from the last layer, by call
        self.altering: list[int] = []
        self._waiting: list[int] = []  # layers that may be altering

    def record_calls(self, calls: Sequence[Call]) -> list[Tensor]:
        """Run every call up to the first layer, and record the arguments of the layers.

        Returns:
            Input of the first layer in each call, [tokens, hidden].

        Raises:
            InputError: the class cannot run with its config, or is not a stack of layers.
        """
        from transformers import DynamicCache

        self._length = len(calls[0].ids)
        self._model.calls = calls
        self._extras = [()] * len(calls)
        caches: dict[int, Any] = {}  # by the identity of the call
        empty: list[dict[str, Any]] = []
        states = []
        for index, call in enumerate(calls):
            cache = caches.get(id(call.continues))
            with self._model.guarded(index):
                if call.cached and cache is None:
                    cache = DynamicCache(config=self._model.model.config)
                    self.caches.append(cache)
                state, recorded = self._record(index, call, cache)
                if call.cached:
                    # Copied only now: the class may have prepared the empty cache.
                    if len(empty) < len(self.caches):
                        empty.append(deepcopy(vars(cache)))
                    lengthen(cache, len(self._model.layers), len(call.ids))
            caches[id(call)] = cache
            states.append(state)
            self._recorded.append(recorded)
        for cache, attributes in zip(self.caches, empty, strict=True):
            vars(cache).update(attributes)
        if self._model.returned is None:
            self._record_batches(calls)
        return states

    def run_layer_in_all_calls(
        self, index: int, before: list[Tensor]
    ) -> tuple[list[Tensor], list[Extras]]:
        """Run a layer in all calls.

        Args:
            index: index of the layer.
            before: input of the layer in each call, [tokens, hidden]; the list is emptied on the
                way, since states of many prompts are large and are used once.

        Returns:
            Hidden states and extras of each call.
        """
        states: list[Tensor] = []
        extras: list[Extras] = []
        idle, alters = True, False
        with torch.no_grad():
            while before:
                call = len(states)
                if call not in self.batches:
                    state_before = before.pop(0)
                    handed = self._handed(index, call, self._extras[call])
                    state, more = self.run_layer(index, call, state_before)
                    idle = idle and is_identity(state_before, state)
                    hands = self._handed(index, call, more)
                    alters = alters or not all(_same(of, hands.get(k)) for k, of in handed.items())
                    states.append(state)
                    extras.append(more)
                    continue
                idle = False  # no matter: batches hand on nothing but hidden states
                count, arguments = self.batches[call]
                form = self._recorded[call].form
                together = torch.cat([form.formed(state) for state in before[:count]])
                del before[:count]
                with self._model.guarded(call):
                    output, _ = self._output(index, arguments[index], together)
                states += [form.flat(state) for state in output.split(1)]
                extras += [()] * count
        if not idle:
            self.altering += self._waiting
            self._waiting.clear()
        elif alters:
            self._waiting.append(index)
        return states, extras

    def _handed(self, index: int, call: int, extras: Extras) -> dict[object, Any]:
        """What later layers receive beside hidden states: extras, and entries of containers."""
        _, arguments, placeholders = self._recorded[call]
        later = {id(value) for value in values_in(arguments[index + 1 :]) if value is not None}
        pairs = enumerate(zip(placeholders, extras, strict=False))
        handed: dict[object, Any] = {at: of for at, (known, of) in pairs if id(known) in later}
        for container in values_in(arguments[index : index + 1]):
            if isinstance(container, MutableMapping):
                handed |= {(id(container), key): value for key, value in container.items()}
        return handed

    def finish_layer(self, index: int, extras: list[Extras]) -> None:
        """Finish a layer, which does not run again: keep its extras, and shrink its caches."""
        self._extras = extras
        for cache in self.caches:
            keep_shapes(cache, index)

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Load the head: a function from [tokens, hidden] to logits, [tokens, vocabulary]."""

        def run(hidden: Tensor) -> Tensor:
            # At most as many tokens as in the first call: the class may not have more positions.
            grouped = len(hidden) - len(hidden) % self._length if self.batches else 0
            form, parts = self._recorded[0].form, []
            if grouped:
                prompts = hidden[:grouped].split(self._length)
                batch = torch.cat([form.formed(prompt) for prompt in prompts])
                parts.append(logits_of(batch, (len(prompts), self._length)))
            for rest in hidden[grouped:].split(self._length):
                if len(rest):
                    parts.append(logits_of(form.formed(rest), (1, len(rest))))
            return torch.cat(parts)

        def logits_of(formed: Tensor, tokens: Sequence[int]) -> Tensor:
            def formed_layer(*args: Any, **kwargs: Any) -> Any:
                return self._returned(formed)

            ids = torch.zeros(*tokens, dtype=torch.long, device=self._model.device)
            with self._model.replaced_layers(formed_layer), self._model.guarded():
                logits: Tensor = self._model.model(input_ids=ids, use_cache=False).logits
            return logits.flatten(0, 1)

        with self._model.behind():
            yield run

    def _record_batches(self, calls: Sequence[Call]) -> None:
        for first, batch in batches(calls):
            ids = torch.stack([call.ids for call in batch])
            inputs = {
                key: torch.cat([call.inputs[key] for call in batch]) for key in batch[0].inputs
            }
            try:
                with self._model.guarded(first):
                    state, arguments = self._arguments(Call(ids, inputs), None)
            except CallError:  # a class may take one prompt at a time
                return
            form = self._recorded[first].form
            if containers_in(arguments):  # a call of the batch could not run again on its own
                return
            if form.axis == 1 and state.shape == (len(batch), *form.shape[1:]):
                self.batches[first] = len(batch), arguments

    def _record(self, index: int, call: Call, cache: Any) -> tuple[Tensor, RecordedCall]:
        """Record the input of the first layer and the arguments of all layers."""
        try:
            state, arguments = self._arguments(call, cache)
        except Exception:  # a class that unpacks a tuple, say, may fail in any way on a tensor
            if index or self._model.returned is not None:
                raise
            # The class then expects more than a tensor from its layers.
            first, (only,) = self._arguments(Call(call.ids, call.inputs), None, layers=1)
            with self._model.layer(0):
                _, extras = only.with_copied_containers().call(self._model.layers[0][1], first)
            self._model.returned = tuple(map(nan_like, extras or ()))
            state, arguments = self._arguments(call, cache)
        form = Form.of(state, len(call.ids))
        return form.flat(state), RecordedCall(form, arguments, self._model.returned or ())

    def _returned(self, state: Tensor) -> Any:
        """Form a layer's output from hidden states and the known placeholders."""
        extras = self._model.returned
        return state if extras is None else (state, *extras)

    def _arguments(
        self, call: Call, cache: Any, layers: int | None = None
    ) -> tuple[Tensor, list[Arguments]]:
        """Record the first layer's input and the arguments of the first ``layers`` layers.

        The class's own ``forward`` runs up to the last of these; layers return their input.
        """
        states: list[tuple[Tensor, int]] = []
        arguments: list[Arguments] = []
        count = layers or len(self._model.layers)

        def record(*args: Any, **kwargs: Any) -> Any:
            state, rest = Arguments.of(args, kwargs)
            if states and not _untouched(state, *states[0]):
                raise NoStackError("something is computed between layers")
            states.append((state, version_of(state)))
            arguments.append(rest)
            if len(arguments) == count:
                raise _ArrivedError
            return self._returned(state)

        device = self._model.device
        inputs: dict[str, Any] = {key: tensor.to(device) for key, tensor in call.inputs.items()}
        if cache is not None:
            inputs["cache"] = cache
        ids = torch.atleast_2d(call.ids).to(device)
        with self._model.replaced_layers(record), suppress(_ArrivedError):
            self._model.model(input_ids=ids, use_cache=call.cached, **inputs)
        if len(arguments) < count:
            raise NoStackError(f"{len(arguments)} of {count} layers are called")
        return states[0][0], arguments

    def run_layer(
        self, index: int, call: int, state: Tensor, *, copied: bool = False
    ) -> tuple[Tensor, Extras]:
        """Run a layer in one call.

        Args:
            index: index of the layer.
            call: index of the call.
            state: input of the layer, [tokens, hidden].
            copied: copy the containers among the arguments, to keep the originals unchanged.

        Returns:
            Hidden states, [tokens, hidden], and extras.
        """
        recorded = self._recorded[call]
        arguments, placeholders = recorded.arguments[index], recorded.placeholders
        if index and placeholders:
            arguments = arguments.replaced(placeholders, self._extras[call])
        if copied:
            arguments = arguments.with_copied_containers()
        with self._model.guarded(call):
            output, extras = self._output(index, arguments, recorded.form.formed(state))
            if index and placeholders and len(placeholders) != len(extras):
                raise NoStackError("layers pass on different numbers of outputs")
            return recorded.form.flat(output), extras

    def _output(self, index: int, arguments: Arguments, state: Tensor) -> tuple[Tensor, Extras]:
        output, extras = arguments.call(self._model.layers[index][1], state)
        if (extras is None) != (self._model.returned is None):
            # A single layer: no earlier output has shown whether there are extras.
            self._model.returned = None if extras is None else tuple(map(nan_like, extras))
        return output, extras or ()


def containers_in(arguments: Sequence[Arguments]) -> list[MutableMapping[Any, Any]]:
    """Empty mappings among the arguments of layers, which these fill for later layers."""
    values = values_in(arguments)
    empty = (v for v in values if isinstance(v, MutableMapping) and not v)
    return [*{id(container): container for container in empty}.values()]


def values_in(arguments: Sequence[Arguments]) -> Iterator[Any]:
    """All arguments of layers but the hidden states."""
    return (v for argument in arguments for v in (*argument.positional, *argument.named.values()))


def _same(value: Any, other: Any) -> bool:
    pairs = [tree_leaves(tree) for tree in (value, other)]
    return len(pairs[0]) == len(pairs[1]) and all(
        one is two or (isinstance(one, Tensor) and isinstance(two, Tensor) and one.equal(two))
        for one, two in zip(*pairs, strict=True)
    )


def _untouched(state: Tensor, output: Tensor, version: int) -> bool:
    """Whether the input of a layer is the unchanged output of the layer before it."""
    same = state is output or (
        state.shape == output.shape
        and state.stride() == output.stride()
        and state.data_ptr() == output.data_ptr()
    )
    return same and version_of(output) == version


def lengthen(cache: Any, layers: int, tokens: int) -> None:
    """Add zero entries to a cache, so that a class computes the right masks and positions.

    Args:
        cache: a transformers cache.
        layers: number of layers of the model.
        tokens: number of tokens to add.
    """
    nothing = torch.zeros(1, 1, tokens, 1)
    for index in range(len(cache.layers) or layers):
        layer = cache.layers[index] if cache.layers else None
        recurrent = getattr(layer, "has_previous_state", None)
        if recurrent is not None:
            recurrent.update(dict.fromkeys(recurrent, True))
        # Stateless layers have an entry in the cache, too.
        if layer is None or (hasattr(layer, "update") and hasattr(layer, "lazy_initialization")):
            cache.update(nothing, nothing, index)


def keep_shapes(cache: Any, index: int) -> None:
    """Replace the cached tensors of a layer by NaN of the same shape, which take no memory."""

    def unknown(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.new_full((), torch.nan).expand(value.shape)

    for layer in cache.layers[index : index + 1]:
        for name, value in vars(layer).items():
            changed = value
            if isinstance(value, dict):
                changed = {key: unknown(entry) for key, entry in value.items()}
            setattr(layer, name, unknown(changed))
