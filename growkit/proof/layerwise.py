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
from growkit.proof.in_blocks import InBlocks
from growkit.proof.lending import Lender
from growkit.proof.oracle import blocks, empty_model
from growkit.proof.reproducible import choose_kernels
from growkit.proof.spool import Spool

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
        choose_kernels()
        self.model, self._weights, self._stored = empty_model(weights, dtype, attention)
        self._lender = Lender(self._weights, self._stored, dtype, device)
        self.device = device
        self._embedding, *self._layers, self._head = blocks(self.model)
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(device)
        self._noted: list[Noted] = []
        self._caches: list[Any] = []
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
            _, places = loaded.enter_context(self._rows(calls))
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
                scaled = partial(_scaled, layer)
                yield Stage(name, index, layer, given, states, again, scaled, loaded.close)
            self._forget(index)

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """From what the last layer hands on, [tokens, hidden], to logits, [tokens, vocabulary]."""
        with self._behind_the_layers() as run:
            yield torch.no_grad()(run)

    def gradients(self, ids: Tensor, given: Spool, look: Callable[[str, Tensor], None]) -> None:
        """The gradient of every parameter, from the last layer to the first, one at a time.

        Of the embedding and of the head, only the rows of tokens that occur, in the order of their
        ids: the whole may be larger than any layer.

        Args:
            ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
            given: what every layer, and then the head, is given on them, each [tokens, hidden].
            look: takes the name of a parameter and its gradient.
        """
        call = Call(ids)
        embedding, head = (f"{name}.weight" for name, _ in (self._embedding, self._head))
        tied = self._stored(embedding) == self._stored(head)
        of_head: list[Tensor] = []
        state = given[-1].to(self.device).requires_grad_()
        with (
            self._behind_the_layers() as run,
            self._gradient_of_head(ids.unique(), of_head.append),
            _handing_over(self._outside(), look),
            torch.enable_grad(),
        ):
            logits = run(state)
            _backward(functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)))
        del logits
        if not tied:
            look(head, of_head.pop())
        with (
            self._rows([call]) as (rows, places),
            _handing_over(self._outside(), look),
            torch.enable_grad(),
        ):
            first = self._begin([call], places)[0]
            for index, (name, layer) in reversed(list(enumerate(self._layers))):
                gradient, state = state.grad, given[index].to(self.device).requires_grad_()
                with self._loaded(name, layer):
                    parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
                    with _handing_over(parameters, look):
                        _backward(self._call(index, 0, state), gradient)
                    del parameters
            _backward(first, state.grad)
            assert rows.grad is not None
            look(embedding, of_head.pop() + rows.grad if tied else rows.grad)

    @contextmanager
    def _behind_the_layers(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """What comes behind the layers, loaded; the matrix of the head has no gradient."""
        name, head = self._head

        def run(hidden: Tensor) -> Tensor:
            def stand_in(*args: Any, **kwargs: Any) -> Any:
                return (hidden[None],) if self._tuples else hidden[None]

            with self._standing_aside(stand_in):
                output = self._guarded(self.model, inputs_embeds=hidden[None], use_cache=False)
            logits = output.logits[0]
            assert isinstance(logits, Tensor)
            return logits

        matrix = self._lender.lent(head, {"weight": f"{name}.weight"}, head=True)
        with self._around_the_layers(), matrix:
            dict(head.named_parameters())["weight"].requires_grad = False
            yield run

    @contextmanager
    def _gradient_of_head(self, used: Tensor, look: Callable[[Tensor], None]) -> Iterator[None]:
        """Give ``look`` some rows of the gradient of the head's matrix, when it goes backward."""

        def follow(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
            given = args[0].detach().flatten(0, -2)
            logits.register_hook(lambda g: look(g.flatten(0, -2)[:, used.to(g.device)].T @ given))

        hook = self._head[1].register_forward_hook(follow)
        try:
            yield
        finally:
            hook.remove()

    def _outside(self) -> dict[str, nn.Parameter]:
        """Parameters that belong to no layer, nor to the embedding, but for the head's matrix."""
        within = tuple(f"{name}." for name, _ in (self._embedding, *self._layers))
        head = f"{self._head[0]}.weight"
        named = self.model.named_parameters(remove_duplicate=False)
        return {key: p for key, p in named if not key.startswith(within) and key != head}

    @contextmanager
    def _rows(self, calls: Sequence[Call]) -> Iterator[tuple[nn.Parameter, list[Tensor]]]:
        """The embedding with only the rows that are used: these, and the places of ids in them."""
        name, embedding = self._embedding
        ids = torch.cat([call.ids.cpu() for call in calls])
        used, places = ids.unique(return_inverse=True)
        rows = nn.Parameter(self._lender.rows(f"{name}.weight", used))
        whole, padding = embedding._parameters["weight"], getattr(embedding, "padding_idx", None)
        embedding._parameters["weight"] = rows
        vars(embedding)["padding_idx"] = None  # rows have other numbers now
        try:
            with self._around_the_layers():  # embeddings of positions, say
                yield rows, list(places.split([len(call.ids) for call in calls]))
        finally:
            embedding._parameters["weight"] = whole
            vars(embedding)["padding_idx"] = padding

    def _begin(self, calls: Sequence[Call], places: Sequence[Tensor]) -> list[Tensor]:
        """Run every call up to the first layer, and note what the layers are called with."""
        self._noted = []
        self._caches = []
        caches: list[tuple[Any, Any]] = []
        states = []
        for call, place in zip(calls, places, strict=True):
            shadow, real = caches[call.continues] if call.continues is not None else (None, None)
            if call.cached and shadow is None:
                shadow = self._new_cache()
            state, noted = self._note(call, place, shadow)
            if call.cached:
                # The class may have prepared the empty cache for itself.
                if real is None:
                    real = deepcopy(shadow)
                    self._caches.append(real)
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
        if given[0].shape[:2] != place[None].shape:
            raise self._no_stack(f"layers hand on {list(given[0].shape)}")
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
        # A recurrent state has no keys, and some layers read those of others.
        except (AttributeError, NotImplementedError) as error:
            raise InputError(
                f"{type(self.model).__name__} of {self._weights.where()} remembers something else "
                "than keys and values of every layer; such models cannot be proved"
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
        except InputError:
            raise
        except (TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            raise InputError(
                f"{type(self.model).__name__} of {self._weights.where()} cannot run "
                f"({type(error).__name__}: {reason(error)}); correct its config.json"
            ) from error
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what is no stack of layers between embedding and head
            raise self._no_stack(f"{type(error).__name__}: {reason(error)}") from error

    def _no_stack(self, why: str) -> InputError:
        return InputError(
            f"{type(self.model).__name__} of {self._weights.where()} cannot be run one layer at a "
            f"time ({why}); such models cannot be proved"
        )

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
        return self._lender.lent(layer, _parameters(name, layer))

    def _fetch(self, index: int) -> None:
        """Begin to load the weights of a layer, if there is one."""
        for name, layer in self._layers[index : index + 1]:
            self._lender.fetch(layer, _parameters(name, layer))

    def _forget(self, index: int) -> None:
        """Keep the shape of a layer's keys and values alone: who reads them again will notice."""
        for cache in self._caches:
            for layer in cache.layers[index : index + 1]:
                layer.keys, layer.values = map(_unknown, (layer.keys, layer.values))


def _unknown(tensor: Tensor) -> Tensor:
    return tensor.new_full((), torch.nan).expand(tensor.shape)


def _parameters(name: str, layer: nn.Module) -> dict[str, str]:
    """The parameters of a layer, by their names in the model."""
    return {key: f"{name}.{key}" for key, _ in layer.named_parameters()}


@contextmanager
def _scaled(layer: nn.Module, key: str, factor: float) -> Iterator[None]:
    """A layer with one of its parameters multiplied."""
    path, _, last = key.rpartition(".")
    owner = layer.get_submodule(path)
    if isinstance(owner, InBlocks) and last == "weight":
        owner.factor = factor
        yield
        owner.factor = 1.0
    else:
        parameter = layer.get_parameter(key)
        unscaled, parameter.data = parameter.data, parameter.data * factor
        yield
        parameter.data = unscaled


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


def _never(*args: Any) -> Any:
    raise AssertionError("an embedding is neither run again nor changed")
