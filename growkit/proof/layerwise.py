"""Run a model one layer at a time, out of its files: memory for a layer or two, whatever its size.

The model is built without weights. Its own ``forward`` runs up to the layers, which stand aside and
note what they are called with; then each layer is loaded, runs all calls, and is given back; at
last its own ``forward`` runs from behind the layers to the logits. So all arithmetic is that of the
transformers class, and nothing is known of it here but where its decoder layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.checkpoint import Weights
from growkit.errors import InputError, reason
from growkit.proof.lending import Lender
from growkit.proof.oracle import blocks, empty_model

HEAD_ROWS = 4096
"""Rows of the output head that are cast at once."""

SMALL_HEAD = 1 << 25
"""Elements of an output head that is cast once, and kept."""

Named = tuple[str, nn.Module]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a layer."""

Noted = list[Arguments]
"""The arguments of every layer."""


@dataclass(frozen=True)
class Call:
    """One forward pass.

    Attributes:
        ids: token ids, [tokens].
        inputs: what else the class is called with, e.g. ``attention_mask``; batches of 1.
        cached: whether keys and values are kept, as in generation.
        continues: index of the cached call that this one goes on from.
    """

    ids: Tensor
    inputs: Mapping[str, Any] = field(default_factory=dict)
    cached: bool = False
    continues: int | None = None


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
        reload: reads a parameter of the module again, after it was changed.
        let_go: gives the weights back early.
    """

    name: str
    layer: int | None
    module: nn.Module
    given: Tensor | None
    after: list[Tensor]
    again: Callable[[int, Tensor], Tensor]
    reload: Callable[[str], None]
    let_go: Callable[[], None]


class _ArrivedError(Exception):
    """The last layer is called; what comes behind it has no weights yet."""


class Layerwise:
    """A model that is never in memory as a whole.

    Args:
        weights: its checkpoint.
        dtype: what its weights are cast to.
        device: where it runs.
        attention: transformers' attention implementation; None for the class's own choice.

    Raises:
        InputError: transformers does not know the model, or the tensors do not fit the class.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, attention: str | None
    ) -> None:
        self.model, self._weights, self._stored = empty_model(weights, dtype, attention)
        self._lender = Lender(self._weights, self._stored, dtype, device)
        self.device = device
        self._embedding, *self._layers, self._head = blocks(self.model)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._noted: list[Noted] = []
        self._tuples = False  # whether layers hand on tuples

    @property
    def names(self) -> list[str]:
        """The embedding, every layer, and the output head."""
        return [name for name, _ in (self._embedding, *self._layers, self._head)]

    def stores(self, name: str) -> bool:
        """Whether a tensor of this name is in the files, not tied to another."""
        return self._stored(name) == name and name in self._weights.tensors

    def stages(self, calls: Sequence[Call], watched: int | None = None) -> Iterator[Stage]:
        """The embedding and every layer, in order; each is given back when the next is asked for.

        Args:
            calls: what to run.
            watched: index of the call of which stages keep what they are given.

        Raises:
            InputError: the class cannot run with its config, or a tensor cannot be used.
        """
        with ExitStack() as loaded:
            _, _, places = loaded.enter_context(self._rows(calls))
            with torch.no_grad():
                states = self._begin(calls, places)
            name, embedding = self._embedding
            yield Stage(name, None, embedding, None, states, _never, _never, loaded.close)
        for index, (name, layer) in enumerate(self._layers):
            with ExitStack() as loaded:
                loaded.enter_context(self._loaded(name, layer))
                again = partial(self._run, index)
                given = None if watched is None else states[watched]
                before, states = states, []
                while before:  # states of many prompts are large, and are needed once
                    states.append(again(len(states), before.pop(0)))
                self._fetch(index + 1)
                reload = partial(self._reload, name, layer)
                yield Stage(name, index, layer, given, states, again, reload, loaded.close)

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """From what the last layer hands on, [tokens, hidden], to logits, [tokens, vocabulary]."""
        with self._behind_the_layers(_nothing) as run:
            yield torch.no_grad()(run)

    def gradients(
        self, ids: Tensor, given: Sequence[Tensor], look: Callable[[str, Tensor], None]
    ) -> None:
        """The gradient of every parameter, from the last layer to the first, one at a time.

        Args:
            ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
            given: what every layer, and then the head, is given on them, each [tokens, hidden].
            look: takes the name of a parameter and its gradient.
        """
        call = Call(ids)
        embedding, head = (f"{name}.weight" for name, _ in (self._embedding, self._head))
        tied = self._stored(embedding) == self._stored(head)
        # The gradient of the head is large, and has time: here are what it is a product of.
        of_head: list[tuple[Tensor, Tensor]] = []
        state = given[-1].detach().requires_grad_()
        with (
            self._behind_the_layers(of_head.append) as run,
            _handing_over(self._outside(), look),
            torch.enable_grad(),
        ):
            logits = run(state)
            _backward(functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)))
        del logits
        if not tied:
            look(head, _product(of_head.pop()))
        with (
            self._rows([call]) as (rows, used, places),
            _handing_over(self._outside(), look),
            torch.enable_grad(),
        ):
            first = self._begin([call], places)[0]
            for index, (name, layer) in reversed(list(enumerate(self._layers))):
                gradient, state = state.grad, given[index].detach().requires_grad_()
                with self._loaded(name, layer):
                    parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
                    with _handing_over(parameters, look):
                        _backward(self._call(index, 0, state), gradient)
                    del parameters
            _backward(first, state.grad)
            assert rows.grad is not None
            shape = self._weights.tensors[self._stored(embedding)].shape
            whole = _product(of_head.pop()) if tied else torch.zeros(shape, dtype=rows.dtype)
            look(embedding, whole.index_add_(0, used.to(whole.device), rows.grad.to(whole.device)))

    @contextmanager
    def _behind_the_layers(
        self, look: Callable[[tuple[Tensor, Tensor]], None]
    ) -> Iterator[Callable[[Tensor], Tensor]]:
        """What comes behind the layers, loaded.

        ``look`` takes the gradient of what the head hands on, if there is one, and what the head
        was given: [tokens, vocabulary] and [tokens, hidden].
        """
        name, head = self._head
        weight = self._lender.tensor(f"{name}.weight")
        if weight.numel() <= SMALL_HEAD:
            weight = self._lender.cast(weight)

        def run(hidden: Tensor) -> Tensor:
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                return (hidden[None],) if self._tuples else hidden[None]

            with self._standing_aside(stand_in):
                output = self._guarded(self.model, inputs_embeds=hidden[None], use_cache=False)
            logits = output.logits[0]
            assert isinstance(logits, Tensor)
            return logits

        def in_blocks(hidden: Tensor) -> Tensor:
            logits: Tensor = _InBlocks.apply(hidden, weight, self._lender.cast, look)  # type: ignore[no-untyped-call]
            bias = head._parameters.get("bias")
            return logits if bias is None else logits + bias

        with self._around_the_layers():
            head.forward = in_blocks
            try:
                yield run
            finally:
                del head.forward

    def _outside(self) -> dict[str, nn.Parameter]:
        """Parameters that belong to no layer, nor to the embedding, but for the head's matrix."""
        within = tuple(f"{name}." for name, _ in (self._embedding, *self._layers))
        head = f"{self._head[0]}.weight"
        named = self.model.named_parameters(remove_duplicate=False)
        return {key: p for key, p in named if not key.startswith(within) and key != head}

    @contextmanager
    def _rows(self, calls: Sequence[Call]) -> Iterator[tuple[nn.Parameter, Tensor, list[Tensor]]]:
        """The embedding with only the rows that are used: these, their ids, and places in them."""
        name, embedding = self._embedding
        ids = torch.cat([call.ids.cpu() for call in calls])
        used, places = ids.unique(return_inverse=True)
        rows = nn.Parameter(self._lender.cast(self._lender.tensor(f"{name}.weight")[used]))
        whole, padding = embedding._parameters["weight"], getattr(embedding, "padding_idx", None)
        embedding._parameters["weight"] = rows
        vars(embedding)["padding_idx"] = None  # rows have other numbers now
        try:
            with self._around_the_layers():  # embeddings of positions, say
                yield rows, used, list(places.split([len(call.ids) for call in calls]))
        finally:
            embedding._parameters["weight"] = whole
            vars(embedding)["padding_idx"] = padding

    def _begin(self, calls: Sequence[Call], places: Sequence[Tensor]) -> list[Tensor]:
        """Run every call up to the first layer, and note what the layers are called with."""
        self._noted = []
        caches: list[tuple[Any, Any]] = []
        states = []
        for call, place in zip(calls, places, strict=True):
            shadow, real = caches[call.continues] if call.continues is not None else (None, None)
            if call.cached and shadow is None:
                shadow = self._new_cache()
            state, noted = self._note(call, place, shadow)
            if call.cached:
                # The class may have prepared the empty cache for itself.
                real = real or deepcopy(shadow)
                self._lengthen(shadow, len(call.ids))
            caches.append((shadow, real))
            states.append(state)
            self._noted.append([_replaced(each, shadow, real) for each in noted])
        return states

    def _note(self, call: Call, place: Tensor, cache: Any) -> tuple[Tensor, Noted]:
        given: list[Tensor] = []
        noted: Noted = []

        def stand_aside(state: Tensor, *args: Any, **kwargs: Any) -> Any:
            given.append(state)
            noted.append((args, kwargs))
            if len(noted) == len(self._layers):
                raise _ArrivedError
            return (given[0],) if self._tuples else given[0]

        inputs = {
            key: value.to(self.device) if isinstance(value, Tensor) else value
            for key, value in call.inputs.items()
        }
        if cache is not None:
            inputs["past_key_values"] = cache
        with self._standing_aside(stand_aside), suppress(_ArrivedError):
            ids = place[None].to(self.device)
            self._guarded(self.model, input_ids=ids, use_cache=call.cached, **inputs)
        if given[-1].dim() < given[0].dim():  # it took the first of what was no tuple
            self._tuples = True
            return self._note(call, place, cache)
        return given[0][0], noted

    def _new_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _lengthen(self, cache: Any, tokens: int) -> None:
        """Add tokens that hold nothing, so that the class finds its masks and positions."""
        nothing = torch.zeros(1, 1, tokens, 1)
        try:
            for layer in range(len(self._layers)):
                cache.update(nothing, nothing, layer)
        except AttributeError as error:  # a recurrent state
            raise InputError(
                f"{type(self.model).__name__} of {self._weights.where()} remembers more than keys "
                "and values; such models cannot be proved"
            ) from error

    @torch.no_grad()
    def _run(self, index: int, call: int, state: Tensor) -> Tensor:
        return self._call(index, call, state)

    def _call(self, index: int, call: int, state: Tensor) -> Tensor:
        args, kwargs = self._noted[call][index]
        output = self._guarded(self._layers[index][1], state[None], *args, **kwargs)
        hidden = output[0] if isinstance(output, tuple) else output
        assert isinstance(hidden, Tensor)
        return hidden[0]

    def _guarded(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        try:
            return module(*args, **kwargs)
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise InputError(
                f"{type(self.model).__name__} of {self._weights.where()} cannot run "
                f"({type(error).__name__}: {reason(error)}); correct its config.json"
            ) from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what is no stack of layers between embedding and head
            raise InputError(
                f"{type(self.model).__name__} of {self._weights.where()} cannot be run one layer "
                f"at a time ({type(error).__name__}: {reason(error)}); such models cannot be proved"
            ) from error

    @contextmanager
    def _standing_aside(self, stand_in: Callable[..., Any]) -> Iterator[None]:
        for _, layer in self._layers:
            layer.forward = stand_in
        try:
            yield
        finally:
            for _, layer in self._layers:
                del layer.forward

    def _around_the_layers(self) -> AbstractContextManager[None]:
        return self._lender.lent(self.model, {key: key for key in self._outside()})

    def _loaded(self, name: str, layer: nn.Module) -> AbstractContextManager[None]:
        names = {key: f"{name}.{key}" for key, _ in layer.named_parameters()}
        return self._lender.lent(layer, names)

    def _reload(self, name: str, layer: nn.Module, key: str) -> None:
        parameter = layer.get_parameter(key)
        parameter.data = parameter.new_empty(0)  # before there is another one
        parameter.data = self._lender.cast(self._lender.tensor(f"{name}.{key}"))

    def _fetch(self, index: int) -> None:
        """Begin to load the weights of a layer, if there is one."""
        for name, layer in self._layers[index : index + 1]:
            self._lender.fetch(f"{name}.{key}" for key, _ in layer.named_parameters())


class _InBlocks(torch.autograd.Function):
    """The matrix of the output head, of which only some rows at a time are cast."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, cast: Any, look: Any) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.cast, ctx.look = cast, look
        return torch.cat([hidden @ cast(rows).T for rows in weight.split(HEAD_ROWS)], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        parts = zip(gradient.split(HEAD_ROWS, -1), weight.split(HEAD_ROWS), strict=True)
        of_hidden = sum(part @ ctx.cast(rows) for part, rows in parts)
        ctx.look((gradient.flatten(0, -2), hidden.detach().flatten(0, -2)))
        return of_hidden, None, None, None


def _replaced(arguments: Arguments, shadow: Any, real: Any) -> Arguments:
    """The same arguments, but for the cache."""
    if shadow is None:
        return arguments
    args, kwargs = arguments
    return (
        tuple(real if value is shadow else value for value in args),
        {key: real if value is shadow else value for key, value in kwargs.items()},
    )


@contextmanager
def _handing_over(
    parameters: Mapping[str, nn.Parameter], look: Callable[[str, Tensor], None]
) -> Iterator[None]:
    """Gradients of these parameters go to ``look`` as they are made; neither of them is kept."""

    def hand_over(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.new_empty(0)  # all that needed it went backward before
        look(name, gradient)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(hand_over, name))
        for name, parameter in parameters.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _backward(output: Tensor, gradient: Tensor | None = None) -> None:
    torch.autograd.backward([output], [gradient] if gradient is not None else None)


def _nothing(factors: tuple[Tensor, Tensor]) -> None:
    pass


def _product(factors: tuple[Tensor, Tensor]) -> Tensor:
    """The gradient of a matrix, from that of what it hands on, and what it was given."""
    return factors[0].T @ factors[1]


def _never(*args: Any) -> Any:
    raise AssertionError("an embedding is neither run again nor changed")
