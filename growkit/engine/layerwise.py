"""Run a model one layer at a time from its files, with one or two layers in memory.

The model is built without weights. The class's own ``forward`` runs first, while the layers only
record their arguments. Then each layer in turn runs all calls, and holds its weights only
meanwhile. Finally ``forward`` runs again, from the last layer to the logits. Backpropagation also
takes one layer at a time. The transformers class does all arithmetic; the only assumption is the
location of its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.errors import InputError, foreign, reason
from growkit.base.tensors import Weights
from growkit.engine.calls import (
    Arguments,
    Call,
    CallError,
    Extras,
    Form,
    NoStackError,
    RecordedCall,
    Spool,
    batches,
    nan_like,
)
from growkit.engine.class_weights import Extended, empty_model, persistent_buffers
from growkit.engine.lending import Lender
from growkit.engine.strict import choose_kernels

STEP = 1e-3
"""Size of the first AdamW step of every parameter, in a layer that returns its input."""

Look = Callable[[str, Tensor], None]
"""Callback for the name of a parameter and its gradient."""


@dataclass(frozen=True)
class Stage:
    """The embedding or a layer, while its weights are loaded.

    Attributes:
        name: name of the module.
        layer: index of the layer; None for the embedding.
        module: the module itself.
        after: output of the module in every call, each [tokens, hidden]; valid until the next
            stage.
        extras: what the module passes on besides in every call.
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
            return self.forward.run_layer(self.layer, call, state, apart=True)[0]


class Layerwise:
    """A model that is never entirely in memory: embedding, decoder layers and output head.

    Args:
        weights: the checkpoint.
        dtype: dtype of the weights after casting.
        device: device that the model runs on.
        attention: transformers' attention implementation; None for the class's own choice.
        tokens: compute logits only for this many tokens, from the start of the vocabulary; None
            for all.

    Attributes:
        model: the transformers model, without weights.
        device: device that the model runs on.
        embedding: name and module of the embedding.
        layers: name and module of every layer, in order.
        output: name and module of the output head.
        stored: maps the name of a parameter to the name of its stored tensor.
        lender: lends the weights to the modules.
        returned: placeholders for the extras of a layer's output; None if no layer is known to
            return more than hidden states.

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
        self.model, self._weights, self.stored = empty_model(weights, dtype, attention)
        self.lender = Lender(self._weights, self.stored, dtype, device)
        # What is added to a class may use its parameters in other ways than the class does.
        self.lender.stays = not isinstance(self._weights, Extended)
        self.device = device
        self._tokens = tokens
        self._title = f"{type(self.model).__name__} of {weights.where()}"
        ends = _blocks(self.model, self._title)
        self.embedding, *self.layers, self.output = (_inside(*each) for each in ends)
        self._wrapped = self.embedding[0] != ends[0][0]
        self.returned: Extras | None = None
        self._unreached = self._watch()
        self._forward = Forward(self)
        # Stored buffers keep the values of the files; the class computes the others.
        stored = {n for n in persistent_buffers(self.model) if n in self._weights.tensors}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                name = f"{path}.{key}".removeprefix(".")
                if name in stored and buffer is not None:
                    module._buffers[key] = self.lender.whole(name, buffer.dtype)
                elif buffer is not None:
                    module._buffers[key] = buffer.to(device)

    def stores(self, name: str) -> bool:
        """Whether the files hold a tensor of this name, rather than one that it is tied to."""
        return self.stored(name) == name and name in self._weights.tensors

    def stages(self, calls: Sequence[Call]) -> Iterator[Stage]:
        """Run the embedding and every layer, in order; weights are freed before the next stage.

        Args:
            calls: calls to run.

        Raises:
            InputError: the class cannot run with its config, or a tensor cannot be used.
        """
        forward = self._forward = Forward(self)
        with ExitStack() as loaded:
            loaded.enter_context(self._rows(calls))
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
                for following, module in self.layers[index + 1 : index + 2]:
                    self.lender.fetch(module, _parameters(following, module))
                yield Stage(name, index, layer, states, extras, forward, loaded)
            forward.leave(index, extras)

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Load the head: a function from [tokens, hidden] to logits, [tokens, vocabulary]."""
        with self._forward.head() as run:
            yield torch.no_grad()(lambda hidden: run(hidden)[:, : self._tokens])

    def others(self, hidden: Tensor) -> float:
        """Mean probability mass of the vocabulary beyond the first ``tokens``, over all rows.

        Args:
            hidden: output of the last layer, [tokens, hidden]; all its logits are in memory at
                once.
        """
        with self._forward.head() as run, torch.no_grad():
            return float(run(hidden).softmax(-1)[:, self._tokens :].sum(-1).mean())

    def gradients(
        self, ids: Tensor, given: Spool, extras: Sequence[Extras], look: Look
    ) -> list[str]:
        """Compute the gradient of every parameter, one at a time, from the last layer to the first.

        A layer that returns its input multiplies some parameters by zero. Their gradient is taken
        after a first step of the other parameters.

        Gradients of the embedding and the head cover only the rows of tokens that occur, in the
        order of their ids, since the whole matrix may be larger than any layer.

        Args:
            ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
            given: input of every layer, then of the head, each [tokens, hidden].
            extras: what comes with every input.
            look: called with the name of each parameter and its gradient; tied parameters use the
                name of their stored tensor, with one call for each.

        Returns:
            The names of the layers that return their input.
        """

        def look_at_stored(name: str, gradient: Tensor) -> None:
            look(self.stored(name), gradient)

        embedding, head = (f"{name}.weight" for name, _ in (self.embedding, self.output))
        used = ids.unique().to(self.device)
        of_head: list[Tensor] = []

        def follow(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
            hidden = args[0].detach().flatten(0, -2)
            logits.register_hook(lambda g: of_head.append(g.flatten(0, -2)[:, used].T @ hidden))

        state = given[-1].to(self.device).requires_grad_()
        with (
            self.output[1].register_forward_hook(follow),
            self._forward.head() as run,
            _taking_gradients(self._outside(), look_at_stored),
            torch.enable_grad(),
        ):
            logits = run(state)
            functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)).backward()
        del logits
        tied = self.stored(embedding) == self.stored(head)
        if not tied:
            look(head, of_head.pop())
        call, idle = Call(ids), []
        forward = self._forward = Forward(self)
        with (
            self._rows([call]) as rows,
            _taking_gradients(self._outside(), look_at_stored),
            torch.enable_grad(),
        ):
            (first,) = forward.begin([call])
            computed = forward.cut()
            for index in reversed(range(len(self.layers))):
                gradient, state = state.grad, given[index].to(self.device).requires_grad_()
                assert gradient is not None
                step = self._back_through(index, state, extras[index], gradient, {}, look)
                if step is None:
                    continue
                idle.append(self.layers[index][0])
                # Parameters multiplied by zero get their gradient after the first step, which has
                # changed the output of the earlier layers as well.
                assert state.grad is not None
                scale = STEP * state.detach().square().mean().sqrt()
                stepped = (state - scale * state.grad.sign()).detach().requires_grad_()
                self._back_through(index, stepped, extras[index], gradient, step, look)
            reached = [each for each in computed if each[1].grad is not None]
            torch.autograd.backward(
                [first, *(whole for whole, _ in reached)],
                [state.grad, *(cut.grad for _, cut in reached)],
            )
            assert rows.grad is not None
            look(embedding, of_head.pop() + rows.grad if tied else rows.grad)
        return idle[::-1]

    def _back_through(
        self,
        index: int,
        state: Tensor,
        extras: Extras,
        gradient: Tensor,
        step: Mapping[str, Tensor],
        look: Look,
    ) -> dict[str, Tensor] | None:
        """Run a layer in the only call, and backpropagate through it.

        Args:
            index: index of the layer.
            state: input of the layer, [tokens, hidden].
            extras: what comes with it.
            gradient: gradient of the output, [tokens, hidden].
            step: first step of some parameters, by name; ``look`` already has their gradients.
            look: called with the name of each parameter and its gradient.

        Returns:
            First step of some parameters, if the layer returns its input; ``look`` does not have
            the gradients of the others yet. None for all other layers.
        """
        name, layer = self.layers[index]
        first_step: dict[str, Tensor] = {}
        idle = False

        def take(parameter: str, found: Tensor) -> None:
            if idle and found.any():
                first_step[parameter] = STEP * found.sign()
            if parameter not in step and (not idle or parameter in first_step):
                look(parameter, found)

        with patch.object(self.lender, "steps", step), self.layer(index):
            parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
            with _taking_gradients(parameters, take):
                output = self._forward.alone(index, state, extras)
                idle = output.equal(state)
                torch.autograd.backward([output], [gradient])
            del parameters
        return first_step if idle else None

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Lend a layer its weights."""
        name, layer = self.layers[index]
        return self.lender.lent(layer, _parameters(name, layer))

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Lend weights to all modules after the layers; the head's matrix needs no gradient."""
        name, head = self.output
        matrix = self.lender.lent(head, {"weight": f"{name}.weight"}, head=True)
        with self._rows([]), matrix:
            dict(head.named_parameters())["weight"].requires_grad = False
            yield

    @contextmanager
    def _rows(self, calls: Sequence[Call]) -> Iterator[nn.Parameter]:
        """Lend weights to all modules before the layers; yield the embedding rows in use.

        Of an embedding with something around it, that may be all.
        """
        count, columns = dict(self.embedding[1].named_parameters())["weight"].shape
        used, rows = torch.zeros(1, dtype=torch.long), None
        if calls:
            used = torch.cat([call.ids.cpu() for call in calls]).unique()
        if self._wrapped:
            used = torch.arange(count)
        if calls or self._wrapped:
            rows = self.lender.rows(f"{self.embedding[0]}.weight", used)
        else:
            rows = torch.zeros(1, columns, dtype=self.lender.dtype, device=self.device)
        with self._embedding_of(rows, used) as parameter:
            yield parameter

    def _outside(self) -> dict[str, nn.Parameter]:
        """Parameters outside the layers, except the matrices of the embedding and the head."""
        within = tuple(f"{name}." for name, _ in self.layers)
        ends = {f"{name}.weight" for name, _ in (self.embedding, self.output)}
        named = self.model.named_parameters(remove_duplicate=False)
        return {key: p for key, p in named if not key.startswith(within) and key not in ends}

    @contextmanager
    def _embedding_of(self, rows: Tensor, used: Tensor) -> Iterator[nn.Parameter]:
        """Lend the weights outside the layers; the embedding has only rows of these sorted ids."""
        embedding, used = self.embedding[1], used.to(self.device)

        def find(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            places = torch.searchsorted(used, args[0].contiguous()).clamp_max(len(used) - 1)
            if not used[places].equal(args[0]):
                raise NoStackError("it embeds tokens that are not in the prompt")
            return (places, *args[1:])

        parameter = nn.Parameter(rows)
        with (
            patch.dict(embedding._parameters, weight=parameter),
            patch.dict(vars(embedding), padding_idx=None),  # rows are renumbered
            embedding.register_forward_pre_hook(find),
            # For example embeddings of positions.
            self.lender.lent(self.model, {key: key for key in self._outside()}),
        ):
            yield parameter

    @contextmanager
    def replaced_layers(self, forward: Callable[..., Any]) -> Iterator[None]:
        """Replace the ``forward`` of every layer."""
        with ExitStack() as replaced:
            for _, layer in self.layers:
                replaced.enter_context(patch.object(layer, "forward", forward))
            yield

    @contextmanager
    def guarded(self, call: int | None = None) -> Iterator[None]:
        """Turn exceptions of the model class into errors for the user.

        Args:
            call: index of the current call; None outside of calls.

        Raises:
            CallError: the class failed in this call.
            InputError: the class failed outside of calls.
        """
        failure = f"{self._title} cannot be run one layer at a time"
        try:
            with foreign(failure, "correct its config.json, or such models cannot be proved"):
                yield
        except InputError as error:
            cause, sentence = error.__cause__, str(error)
            why = f"{type(cause).__name__}: {reason(cause)}" if cause else sentence
            if isinstance(error, NoStackError):
                sentence = f"{failure} ({error}); such models cannot be proved"
            if call is None:
                raise InputError(sentence) from error
            why = f"{type(self.model).__name__} cannot run in this mode ({why})"
            raise CallError(sentence, call, why) from error

    def check_reach(self) -> None:
        """Check that text reaches every weight; call it after the logits are computed.

        Raises:
            InputError: text does not reach some weights, for example of an image encoder.
        """
        if self._unreached:
            raise InputError(
                f"{self._title} holds weights that text does not reach ({min(self._unreached)}); "
                "such models cannot be proved"
            )

    def _watch(self) -> dict[str, nn.Module]:
        """Modules with parameters outside the layers; each is removed when it first runs."""
        within = tuple(f"{name}." for name, _ in self.layers)
        outside = {
            name: module
            for name, module in self.model.named_modules()
            if module._parameters and not f"{name}.".startswith(within)
        }

        def reach(name: str, module: nn.Module, args: Any) -> None:
            outside.pop(name, None)

        for name, module in outside.items():
            module.register_forward_pre_hook(partial(reach, name))
        return outside


def _parameters(name: str, layer: nn.Module) -> dict[str, str]:
    """Map the names of a layer's parameters to their names in the model."""
    return {key: f"{name}.{key}" for key, _ in layer.named_parameters()}


def _blocks(model: Any, title: str) -> list[tuple[str, nn.Module]]:
    """Name and module of the embedding, of every decoder layer, and of the output head.

    Raises:
        InputError: the model has no such parts.
    """
    named = dict(model.named_modules())
    config = model.config.get_text_config(decoder=True)
    # Some count encoder layers, or halves of layers, as ``num_hidden_layers``.
    keys = ("decoder_layers", "num_decoder_layers", "num_hidden_layers", "num_layers")
    counts = [count for key in keys if (count := getattr(config, key, None))]
    stacks = [
        name
        for count in counts
        for name, module in named.items()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    name_of = {id(module): name for name, module in named.items()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if not stacks or not all(id(end) in name_of for end in ends):
        raise InputError(
            f"{title} is no stack of layers between an embedding and a head; such models cannot "
            "be proved"
        )
    layers = min(stacks, key=lambda name: name.count("."))  # other lists are deeper
    embedding, head = ((name_of[id(end)], end) for end in ends)
    numbered = [f"{layers}.{index}" for index in range(len(named[layers]))]
    return [embedding, *((name, named[name]) for name in numbered), head]


WRAPPED = ("modules_to_save.default", "token_adapter.base_layer", "base_layer")
"""Where PEFT has the module that it wraps, or that takes its place."""


def _inside(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The module in use where something is around it, and its name."""
    inside = dict(module.named_modules())
    path = next((each for each in WRAPPED if each in inside), None)
    return (f"{name}.{path}", inside[path]) if path else (name, module)


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
    """

    def __init__(self, model: Layerwise) -> None:
        self._model = model
        self._recorded: list[RecordedCall] = []
        self.batches: dict[int, tuple[int, list[Arguments]]] = {}
        self._length = 1  # tokens of the first call
        self.caches: list[Any] = []
        self._extras: list[Extras] = []  # from the last layer, by call

    def begin(self, calls: Sequence[Call]) -> list[Tensor]:
        """Run every call up to the first layer, and record the arguments of the layers.

        Returns:
            Input of the first layer in each call, [tokens, hidden].

        Raises:
            InputError: the class cannot run with its config, or is not a stack of layers.
        """
        from transformers import DynamicCache

        self._length = len(calls[0].ids)
        self._extras = [()] * len(calls)
        caches: list[tuple[Any, Any]] = []
        states = []
        for index, call in enumerate(calls):
            shadow, real = caches[call.continues] if call.continues is not None else (None, None)
            with self._model.guarded(index):
                if call.cached and shadow is None:
                    shadow = DynamicCache(config=self._model.model.config)
                state, recorded = self._record(index, call, shadow)
                if call.cached:
                    # Copied only now: the class may have prepared the empty cache.
                    if real is None:
                        real = deepcopy(shadow)
                        self.caches.append(real)
                    lengthen(shadow, len(self._model.layers), len(call.ids))
                    arguments = [each.replaced((shadow,), (real,)) for each in recorded.arguments]
                    recorded = recorded._replace(arguments=arguments)
            caches.append((shadow, real))
            states.append(state)
            self._recorded.append(recorded)
        if self._model.returned is None:
            self._record_batches(calls)
        return states

    def through(self, index: int, before: list[Tensor]) -> tuple[list[Tensor], list[Extras]]:
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
        with torch.no_grad():
            while before:
                call = len(states)
                if call not in self.batches:
                    state, more = self.run_layer(index, call, before.pop(0))
                    states.append(state)
                    extras.append(more)
                    continue
                count, arguments = self.batches[call]
                form = self._recorded[call].form
                together = torch.cat([form.formed(state) for state in before[:count]])
                del before[:count]
                with self._model.guarded(call):
                    output, _ = self._output(index, arguments[index], together)
                states += [form.flat(state) for state in output.split(1)]
                extras += [()] * count
        return states, extras

    def leave(self, index: int, extras: list[Extras]) -> None:
        """Finish a layer, which does not run again: keep its extras, and shrink its caches."""
        self._extras = extras
        for cache in self.caches:
            keep_shapes(cache, index)

    def cut(self) -> list[tuple[Tensor, Tensor]]:
        """Cut the graph between the layers of the only call and what else their arguments need.

        Returns:
            Arguments that are computed from parameters, such as embeddings of each layer, and the
            tensors in their place, which gather the gradients of all layers.
        """
        (recorded,) = self._recorded
        found: dict[int, tuple[Tensor, Tensor]] = {}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.grad_fn is None:
                return value
            return found.setdefault(id(value), (value, value.detach().requires_grad_()))[1]

        arguments = [each.changed(leaf) for each in recorded.arguments]
        self._recorded = [recorded._replace(arguments=arguments)]
        return [*found.values()]

    def alone(self, index: int, state: Tensor, extras: Extras) -> Tensor:
        """Run a layer in the only call for another input, [tokens, hidden], with gradients.

        Args:
            index: index of the layer.
            state: input of the layer.
            extras: what the layer before it passes on besides.

        Raises:
            InputError: a layer needs numbers of the layer before it, which pass on gradients.
        """
        ((_, arguments, placeholders),) = self._recorded
        self._extras = [extras or placeholders]
        output, _ = self.run_layer(index, 0, state)
        numbers = {
            id(each)
            for each in placeholders
            if isinstance(each, Tensor) and each.is_floating_point()
        }
        later = ((*each.positional, *each.named.values()) for each in arguments[1:])
        with self._model.guarded():
            if any(id(value) in numbers for values in later for value in values):
                raise NoStackError("layers pass on more than hidden states")
        return output

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Load the head: a function from [tokens, hidden] to logits, [tokens, vocabulary]."""

        def run(hidden: Tensor) -> Tensor:
            # At most as many tokens as in the first call: the class may not have more positions.
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
                return self._returned(formed)

            ids = torch.zeros(*tokens, dtype=torch.long, device=self._model.device)
            with self._model.replaced_layers(given), self._model.guarded():
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
                _, extras = only.apart().call(self._model.layers[0][1], first)
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
        given: list[tuple[Tensor, int]] = []
        arguments: list[Arguments] = []
        count = layers or len(self._model.layers)

        def record(*args: Any, **kwargs: Any) -> Any:
            state, rest = Arguments.of(args, kwargs)
            if given and not _untouched(state, *given[0]):
                raise NoStackError("something is computed between layers")
            given.append((state, state._version))
            arguments.append(rest)
            if len(arguments) == count:
                raise _ArrivedError
            return self._returned(state)

        device = self._model.device
        inputs: dict[str, Any] = {key: each.to(device) for key, each in call.inputs.items()}
        if cache is not None:
            inputs["cache"] = cache
        ids = torch.atleast_2d(call.ids).to(device)
        with self._model.replaced_layers(record), suppress(_ArrivedError):
            self._model.model(input_ids=ids, use_cache=call.cached, **inputs)
        if len(arguments) < count:
            raise NoStackError(f"{len(arguments)} of {count} layers are called")
        return given[0][0], arguments

    def run_layer(
        self, index: int, call: int, state: Tensor, *, apart: bool = False
    ) -> tuple[Tensor, Extras]:
        """Run a layer in one call.

        Args:
            index: index of the layer.
            call: index of the call.
            state: input of the layer, [tokens, hidden].
            apart: copy the containers among the arguments, to keep the originals unchanged.

        Returns:
            Hidden states, [tokens, hidden], and extras.
        """
        recorded = self._recorded[call]
        arguments, placeholders = recorded.arguments[index], recorded.placeholders
        if index and placeholders:
            arguments = arguments.replaced(placeholders, self._extras[call])
        if apart:
            arguments = arguments.apart()
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


def _untouched(state: Tensor, output: Tensor, version: int) -> bool:
    """Whether the input of a layer is the unchanged output of the layer before it."""
    same = state is output or (
        state.shape == output.shape
        and state.stride() == output.stride()
        and state.data_ptr() == output.data_ptr()
    )
    return same and output._version == version


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
                changed = {key: unknown(each) for key, each in value.items()}
            setattr(layer, name, unknown(changed))


@contextmanager
def _taking_gradients(parameters: Mapping[str, nn.Parameter], look: Look) -> Iterator[None]:
    """Pass each gradient to ``look`` once it is computed, then free it and its parameter."""

    def take(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        parameter.data = parameter.new_empty(0)  # every use of it has been backpropagated
        look(name, gradient)

    with ExitStack() as hooks:
        for name, parameter in parameters.items():
            hook = parameter.register_post_accumulate_grad_hook(partial(take, name))
            hooks.enter_context(hook)
        yield
