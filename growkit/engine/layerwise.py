"""Run a model one layer at a time from its files, in memory for a layer or two.

The class's own ``forward`` runs first, while the layers do nothing but record their arguments. Then
each layer in turn runs all calls, and has its weights only while it does. At last ``forward`` runs
again, from the last layer to the logits. Gradients go back in the same way, a layer at a time. All
arithmetic is that of the transformers class; nothing is assumed of it but where its layers are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.tensors import Weights
from growkit.engine.calls import (
    Arguments,
    Call,
    CallError,
    Form,
    LayerOutput,
    NoStackError,
    RecordedCall,
    alike,
)
from growkit.engine.lending import scaled
from growkit.engine.spool import Spool
from growkit.engine.stack import Stack
from growkit.engine.strict import choose_kernels

STEP = 1e-3
"""A first step of every number of a layer that returns what it is given: as AdamW takes it."""

Look = Callable[[str, Tensor], None]
"""Takes the name of a parameter and its gradient."""


@dataclass(frozen=True)
class Stage:
    """The embedding or a layer, while its weights are loaded.

    Attributes:
        name: of the module.
        layer: index of the layer; None for the embedding.
        module: the module itself.
        given: what it is given in the call that is watched, [tokens, hidden]; None for no call, and
            for the embedding.
        after: what it returns in every call, each [tokens, hidden], until the next is asked for.
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


class Layerwise(Stack):
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
        choose_kernels()
        super().__init__(weights, dtype, device, attention)
        self._tokens = tokens
        self._forward = Forward(self)

    def stages(self, calls: Sequence[Call], watched: int | None = None) -> Iterator[Stage]:
        """The embedding and every layer, in order; each is given back when the next is asked for.

        Args:
            calls: what to run.
            watched: index of the call whose inputs stages keep.

        Raises:
            InputError: the class cannot run with its config, or a tensor cannot be used.
        """
        forward = self._forward = Forward(self)
        with ExitStack() as loaded:
            loaded.enter_context(self.rows(calls))
            with torch.no_grad():
                states = forward.begin(calls)
            name, embedding = self.embedding
            yield Stage(name, None, embedding, None, states, _never, _never, loaded.close)
        for index, (name, layer) in enumerate(self.layers):
            with ExitStack() as loaded:
                loaded.enter_context(self.layer(index))
                again = partial(forward.again, index)
                given = None if watched is None else states[watched]
                states, extras = forward.through(index, states)
                self.fetch(index + 1)
                change = partial(scaled, layer)
                yield Stage(name, index, layer, given, states, again, change, loaded.close)
            forward.leave(index, extras)

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """From what the last layer returns, [tokens, hidden], to logits, [tokens, vocabulary]."""
        with self._forward.head() as run:
            yield torch.no_grad()(lambda hidden: run(hidden)[:, : self._tokens])

    def others(self, hidden: Tensor) -> float:
        """The part of the softmax that goes to tokens whose logits are not wanted.

        Args:
            hidden: what the last layer returns, [tokens, hidden]; logits of all of these are in
                memory at once.

        Returns:
            The mean over these tokens.
        """
        with self._forward.head() as run, torch.no_grad():
            return float(run(hidden).softmax(-1)[:, self._tokens :].sum(-1).mean())

    def gradients(self, ids: Tensor, given: Spool, look: Look) -> list[str]:
        """The gradient of every parameter, from the last layer to the first, one at a time.

        A layer that returns what it is given has parameters that are multiplied by zero. Theirs is
        the gradient after a first step of the rest.

        Of the embedding and of the head, only the rows of tokens that occur, in the order of their
        ids: the whole may be larger than any layer.

        Args:
            ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
            given: what every layer, and then the head, is given on them, each [tokens, hidden].
            look: takes the name of a parameter and its gradient; of tied parameters, that of the
                tensor they are stored as, and the gradient of each.

        Returns:
            The names of the layers that return what they are given.
        """
        before, self._forward = self._forward, Forward(self)
        return _backward(self, ids, given, before, self._forward, look)


def _never(*args: Any) -> Any:
    raise AssertionError("an embedding is neither run again nor changed")


class _ArrivedError(Exception):
    """The last layer is called; what comes behind it has no weights yet."""


class Forward:
    """Some calls of a model, whose parts have weights whenever they run here.

    Args:
        stack: the model.

    Attributes:
        batches: for calls that run together, as large products are faster: by the index of the
            first, their number and the arguments of every layer.
        caches: of the calls that have one: keys, values and recurrent states.
    """

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._recorded: list[RecordedCall] = []
        self.batches: dict[int, tuple[int, list[Arguments]]] = {}
        self._length = 1  # tokens of the first call
        self.caches: list[Any] = []
        self._extras: list[tuple[Any, ...]] = []  # from the last layer, by call

    def begin(self, calls: Sequence[Call]) -> list[Tensor]:
        """Run every call up to the first layer, and record what the layers are called with.

        Returns:
            What the first layer is given in each, [tokens, hidden].

        Raises:
            InputError: the class cannot run with its config, or is no stack of layers.
        """
        from transformers import DynamicCache

        self._length = len(calls[0].ids)
        self._extras = [()] * len(calls)
        caches: list[tuple[Any, Any]] = []
        states = []
        for index, call in enumerate(calls):
            shadow, real = caches[call.continues] if call.continues is not None else (None, None)
            with self._stack.guarded(index):
                if call.cached and shadow is None:
                    shadow = DynamicCache(config=self._stack.model.config)
                state, recorded = self._record(index, call, shadow)
                if call.cached:
                    # The class may have prepared the empty cache for itself.
                    if real is None:
                        real = deepcopy(shadow)
                        self.caches.append(real)
                    lengthen(shadow, len(self._stack.layers), len(call.ids))
                    arguments = [each.replaced((shadow,), (real,)) for each in recorded.arguments]
                    recorded = RecordedCall(recorded.form, arguments, recorded.placeholders)
            caches.append((shadow, real))
            states.append(state)
            self._recorded.append(recorded)
        if self._stack.returned.alone:
            self._record_batches(calls)
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
            The states that it returns in each call, and the extras.
        """
        states: list[Tensor] = []
        extras: list[tuple[Any, ...]] = []
        with torch.no_grad():
            while before:
                call = len(states)
                if call not in self.batches:
                    state, more = self._call(index, call, before.pop(0))
                    states.append(state)
                    extras.append(more)
                    continue
                count, arguments = self.batches[call]
                form = self._recorded[call].form
                together = torch.cat([form.formed(state) for state in before[:count]])
                del before[:count]
                with self._stack.guarded(call):
                    output, _ = self._output(index, arguments[index], together)
                states += [form.flat(state) for state in output.split(1)]
                extras += [()] * count
        return states, extras

    def leave(self, index: int, extras: list[tuple[Any, ...]]) -> None:
        """Continue after a layer, which is not run again: its extras are now known."""
        self._extras = extras
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
        (recorded,) = self._recorded
        # Only hidden states are passed on here; placeholders stay in the place of extras.
        self._extras = [recorded.placeholders]
        output, _ = self._call(index, 0, state)
        if recorded.uses_extras:
            raise self._stack.refusal("layers hand on more than hidden states")
        return output

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """From what the last layer returns, [tokens, hidden], to logits, [tokens, vocabulary]."""

        def run(hidden: Tensor) -> Tensor:
            # No more tokens at a time than in the first call: a class may have no more positions.
            whole = len(hidden) - len(hidden) % self._length if self.batches else 0
            form, parts = self._recorded[0].form, []
            if whole:
                prompts = hidden[:whole].split(self._length)
                batch = torch.cat([form.formed(each) for each in prompts])
                parts.append(logits_of(batch, (len(prompts), self._length)))
            for rest in hidden[whole:].split(self._length):
                if len(rest):
                    parts.append(logits_of(form.formed(rest), (1, len(rest))))
            return torch.cat(parts)

        def logits_of(formed: Tensor, tokens: Sequence[int]) -> Tensor:
            def given(*args: Any, **kwargs: Any) -> Any:
                return self._stack.returned.with_state(formed)

            ids = torch.zeros(*tokens, dtype=torch.long, device=self._stack.device)
            with self._stack.replaced_layers(given), self._stack.guarded():
                logits = self._stack.model(input_ids=ids, use_cache=False).logits
            assert isinstance(logits, Tensor)
            return logits.flatten(0, 1)

        with self._stack.behind():
            yield run

    def _record_batches(self, calls: Sequence[Call]) -> None:
        for first, count in alike(calls):
            form, batch = self._recorded[first].form, calls[first : first + count]
            ids = torch.stack([call.ids for call in batch])
            inputs = {
                key: torch.cat([call.inputs[key] for call in batch]) for key in batch[0].inputs
            }
            try:
                with self._stack.guarded(first):
                    state, arguments = self._arguments(Call(ids, inputs), None)
            except CallError:  # a class may take one prompt at a time
                return
            if form.axis == 1 and state.shape == (count, *form.shape[1:]):
                self.batches[first] = count, arguments

    def _record(self, index: int, call: Call, cache: Any) -> tuple[Tensor, RecordedCall]:
        """What the first layer is given, and what all of them are called with."""
        try:
            state, arguments = self._arguments(call, cache)
        except Exception:  # a class may do anything with a tensor where it unpacks a tuple, say
            if index or not self._stack.returned.alone:
                raise
            # The class, then, expects more of its layers than a tensor.
            self._stack.returned = self._returned_by_the_first(call)
            state, arguments = self._arguments(call, cache)
        form = Form.of(state, len(call.ids))
        return form.flat(state), RecordedCall(form, arguments, self._stack.returned.extras)

    def _arguments(self, call: Call, cache: Any) -> tuple[Tensor, list[Arguments]]:
        """The same, from a run in which layers return what they are given."""
        given: list[tuple[Tensor, int]] = []
        arguments: list[Arguments] = []
        count = len(self._stack.layers)

        def record(*args: Any, **kwargs: Any) -> Any:
            state, rest = Arguments.of(args, kwargs)
            if given and not _untouched(state, *given[0]):
                raise NoStackError("something is computed between layers")
            given.append((state, state._version))
            arguments.append(rest)
            if len(arguments) == count:
                raise _ArrivedError
            return self._stack.returned.with_state(state)

        self._run_class(record, call, cache)
        if len(arguments) < count:
            raise NoStackError(f"{len(arguments)} of {count} layers are called")
        return given[0][0], arguments

    def _returned_by_the_first(self, call: Call) -> LayerOutput:
        """What the first layer returns in a call, as placeholders."""
        recorded: list[tuple[Tensor, Arguments]] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            recorded.append(Arguments.of(args, kwargs))
            raise _ArrivedError

        self._run_class(stop, Call(call.ids, call.inputs), None)
        if not recorded:
            raise NoStackError("no layer is called")
        ((state, arguments),) = recorded
        with self._stack.layer(0):
            args, kwargs = arguments.apart().call(state)
            return LayerOutput.of(self._stack.layers[0][1](*args, **kwargs))[1].unknown()

    def _run_class(self, forward: Callable[..., Any], call: Call, cache: Any) -> None:
        """Run the class's own ``forward`` with this function as layers, until it has arrived."""
        device = self._stack.device
        inputs: dict[str, Any] = {key: each.to(device) for key, each in call.inputs.items()}
        if cache is not None:
            inputs["cache"] = cache
        ids = torch.atleast_2d(call.ids).to(device)
        with self._stack.replaced_layers(forward), suppress(_ArrivedError):
            self._stack.model(input_ids=ids, use_cache=call.cached, **inputs)

    def _call(
        self, index: int, call: int, state: Tensor, *, apart: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Run a layer: hidden states, [tokens, hidden], and extras."""
        recorded = self._recorded[call]
        arguments = recorded.arguments[index]
        if index and recorded.placeholders:
            arguments = arguments.replaced(recorded.placeholders, self._extras[call])
        if apart:
            arguments = arguments.apart()
        with self._stack.guarded(call):
            output, returned = self._output(index, arguments, recorded.form.formed(state))
            if (
                index
                and recorded.placeholders
                and len(recorded.placeholders) != len(returned.extras)
            ):
                raise NoStackError("layers hand on different things")
            return recorded.form.flat(output), returned.extras

    def _output(
        self, index: int, arguments: Arguments, state: Tensor
    ) -> tuple[Tensor, LayerOutput]:
        args, kwargs = arguments.call(state)
        output, returned = LayerOutput.of(self._stack.layers[index][1](*args, **kwargs))
        if returned.alone != self._stack.returned.alone:
            self._stack.returned = returned.unknown()  # a single layer: nothing has shown it yet
        return output, returned


def _untouched(state: Tensor, handed: Tensor, version: int) -> bool:
    """Whether a layer is given the very tensor that the one before returned, unchanged since."""
    same = state is handed or (
        state.shape == handed.shape
        and state.stride() == handed.stride()
        and state.data_ptr() == handed.data_ptr()
    )
    return same and handed._version == version


def lengthen(cache: Any, layers: int, tokens: int) -> None:
    """Add empty tokens to a cache, so that a class finds its masks and positions.

    Args:
        cache: of transformers.
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
    """Replace what a layer remembers by NaN of the same shape, which takes no memory."""

    def unknown(tensor: Tensor) -> Tensor:
        return tensor.new_full((), torch.nan).expand(tensor.shape)

    for layer in cache.layers[index : index + 1]:
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), Tensor):
                setattr(layer, name, unknown(getattr(layer, name)))
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name, None) or {}
            states.update({at: unknown(each) for at, each in states.items() if each is not None})


def _backward(
    stack: Stack, ids: Tensor, given: Spool, before: Forward, forward: Forward, look: Look
) -> list[str]:
    """Go back from the loss; see ``Layerwise.gradients``.

    Args:
        stack: the model.
        ids: token ids, [tokens].
        given: what every layer, and then the head, is given on them, each [tokens, hidden].
        before: calls that went through the stack, whose forms the head takes.
        forward: begins with these ids here.
        look: takes the name of a parameter and its gradient.

    Returns:
        The names of the layers that return what they are given.
    """

    def look_at_stored(name: str, gradient: Tensor) -> None:
        look(stack.stored(name), gradient)

    idle: list[str] = []
    embedding, head = (f"{name}.weight" for name, _ in (stack.embedding, stack.output))
    tied = stack.stored(embedding) == stack.stored(head)
    of_head: list[Tensor] = []
    used = ids.unique().to(stack.device)

    def follow(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
        hidden = args[0].detach().flatten(0, -2)
        logits.register_hook(lambda g: of_head.append(g.flatten(0, -2)[:, used].T @ hidden))

    state = given[-1].to(stack.device).requires_grad_()
    hook = stack.output[1].register_forward_hook(follow)
    with (
        before.head() as run,
        _handing_over(stack.outside(), look_at_stored),
        torch.enable_grad(),
    ):
        logits = run(state)
        functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)).backward()
    hook.remove()
    del logits
    if not tied:
        look(head, of_head.pop())
    call = Call(ids)
    with (
        stack.rows([call]) as rows,
        _handing_over(stack.outside(), look_at_stored),
        torch.enable_grad(),
    ):
        (first,) = forward.begin([call])
        for index, (name, _) in reversed(list(enumerate(stack.layers))):
            gradient, state = state.grad, given[index].to(stack.device).requires_grad_()
            assert gradient is not None
            first_step = _back_through(stack, forward, index, state, gradient, {}, look)
            if first_step is None:
                continue
            idle.append(name)
            # What is multiplied by zero gets its gradient after the first step, when the layers
            # before return something else as well.
            assert state.grad is not None
            scale = STEP * state.detach().square().mean().sqrt()
            stepped = (state - scale * state.grad.sign()).detach().requires_grad_()
            _back_through(stack, forward, index, stepped, gradient, first_step, look)
        torch.autograd.backward([first], [state.grad])
        assert rows.grad is not None
        look(embedding, of_head.pop() + rows.grad if tied else rows.grad)
    return idle[::-1]


def _back_through(
    stack: Stack,
    forward: Forward,
    index: int,
    state: Tensor,
    gradient: Tensor,
    step: Mapping[str, Tensor],
    look: Look,
) -> dict[str, Tensor] | None:
    """Run a layer, and go back through it.

    Args:
        stack: the model.
        forward: the call.
        index: of the layer.
        state: what it is given, [tokens, hidden].
        gradient: of what it returns, [tokens, hidden].
        step: a first step for some parameters, by name; ``look`` has taken their gradients.
        look: takes the name of a parameter and its gradient.

    Returns:
        A first step for some parameters, where the layer returns what it is given; ``look`` has not
        taken the gradients of the rest yet. None for all other layers.
    """
    name, layer = stack.layers[index]
    first_step: dict[str, Tensor] = {}
    idle = False

    def take(parameter: str, found: Tensor) -> None:
        if idle and found.any():
            first_step[parameter] = STEP * found.sign()
        if parameter not in step and (not idle or parameter in first_step):
            look(parameter, found)

    with stack.lender.stepped(step), stack.layer(index):
        parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
        with _handing_over(parameters, take):
            output = forward.alone(index, state)
            idle = output.equal(state)
            torch.autograd.backward([output], [gradient])
        del parameters
    return first_step if idle else None


@contextmanager
def _handing_over(parameters: Mapping[str, nn.Parameter], look: Look) -> Iterator[None]:
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
