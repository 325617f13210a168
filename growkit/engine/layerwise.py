"""Run a model one layer at a time from its files, with one or two layers in memory.

The model is built without weights, by its transformers class. Each layer in turn runs all calls,
and is lent its weights only meanwhile. Backpropagation also takes one layer at a time. The only
assumption about the class is the location of its embedding, its layers and its head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.errors import InputError, foreign, reason
from growkit.base.tensors import Weights
from growkit.engine.calls import Call, CallError, Extras, NoStackError, Spool
from growkit.engine.class_weights import Extended, empty_model, persistent_buffers
from growkit.engine.forward import Forward, PassedOn
from growkit.engine.kernels import using
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
            return self.forward.run_layer(self.layer, call, state, apart=True)[0]


def last_state(stages: Iterator[Stage]) -> Tensor:
    """Run all stages; return the output of the last layer in the first call, [tokens, hidden]."""
    for stage in stages:
        state = stage.after[0]
    return state


class Layerwise:
    """A model that is never entirely in memory: its embedding, layers and head are lent weights.

    Args:
        weights: the checkpoint.
        dtype: dtype of the weights after casting.
        device: device that the model runs on.
        tokens: compute logits only for this many tokens, from the start of the vocabulary; None
            for all.

    Attributes:
        model: the transformers model, without weights.
        device: see above.
        tokens: see above.
        embedding: name and module of the embedding.
        layers: name and module of every layer, in order.
        output: name and module of the output head.
        stored: maps the name of a parameter to the name of its stored tensor.
        lender: lends the weights to the modules.
        returned: placeholders for the extras of a layer's output; None if no layer is known to
            return more than hidden states.
        kernels: names of the attention kernels of all calls.
        ran: names of the fused kernels that ran, by the name in the call.

    Raises:
        InputError: transformers does not know the model, or the tensors do not fit the class.
    """

    def __init__(
        self,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int | None = None,
    ) -> None:
        choose_kernels()
        self.model, self._weights, self.stored = empty_model(weights, dtype)
        self.lender = Lender(self._weights, self.stored, dtype, device)
        # Modules added to a class may use its parameters in other ways than the class does.
        self.lender.stays = not isinstance(self._weights, Extended)
        self.device, self.tokens = device, tokens
        self._title = f"{type(self.model).__name__} of {weights.where()}"
        ends = _blocks(self.model, self._title)
        self.embedding, *self.layers, self.output = (_inside(*each) for each in ends)
        self._wrapped = self.embedding[0] != ends[0][0]
        self.returned: Extras | None = None
        self._forward: Forward  # the run of the last stages
        self.kernels: Sequence[str] = ()
        self.ran: dict[str, set[str]] = {}
        self._unreached = self._watch()
        # Stored buffers keep the values of the files; the class computes all other buffers.
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

    def layer(self, index: int) -> AbstractContextManager[None]:
        """Lend a layer its weights."""
        name, layer = self.layers[index]
        return self.lender.lent(layer, _parameters(name, layer))

    def fetch(self, index: int) -> None:
        """Prefetch the weights of a layer, if there is one; see ``Lender.fetch``."""
        for name, layer in self.layers[index : index + 1]:
            self.lender.fetch(layer, _parameters(name, layer))

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Lend weights to all modules after the layers; the head's matrix needs no gradient."""
        name, head = self.output
        matrix = self.lender.lent(head, {"weight": f"{name}.weight"}, head=True)
        with self.rows([]), matrix:
            dict(head.named_parameters())["weight"].requires_grad = False
            yield

    @contextmanager
    def rows(self, calls: Sequence[Call]) -> Iterator[nn.Parameter]:
        """Lend weights to all modules before the layers; yield the embedding rows in use.

        These are all rows if a wrapper of PEFT is around the embedding.

        Args:
            calls: the calls that look up rows.
        """
        count, columns = dict(self.embedding[1].named_parameters())["weight"].shape
        used = torch.zeros(1, dtype=torch.long)
        if calls:
            used = torch.cat([call.ids.cpu() for call in calls]).unique()
        if self._wrapped:
            used = torch.arange(count)
        if calls or self._wrapped:
            rows = self.lender.rows(f"{self.embedding[0]}.weight", used)
        else:
            rows = torch.zeros(1, columns, dtype=self.lender.dtype, device=self.device)
        embedding, used, parameter = self.embedding[1], used.to(self.device), nn.Parameter(rows)

        def find(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            places = torch.searchsorted(used, args[0].contiguous()).clamp_max(len(used) - 1)
            if not used[places].equal(args[0]):
                raise NoStackError("it embeds tokens that are not in the prompt")
            return (places, *args[1:])

        with (
            patch.dict(embedding._parameters, weight=parameter),
            patch.dict(vars(embedding), padding_idx=None),  # rows are renumbered
            embedding.register_forward_pre_hook(find),
            # For example embeddings of positions.
            self.lender.lent(self.model, {key: key for key in self.outside()}),
        ):
            yield parameter

    def outside(self) -> dict[str, nn.Parameter]:
        """Parameters outside the layers, except the matrices of the embedding and the head."""
        within = tuple(f"{name}." for name, _ in self.layers)
        ends = {f"{name}.weight" for name, _ in (self.embedding, self.output)}
        named = self.model.named_parameters(remove_duplicate=False)
        return {key: p for key, p in named if not key.startswith(within) and key not in ends}

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
            with (
                foreign(failure, "correct its config.json, or such models cannot be proved"),
                using("" if call is None else self.kernels[call], self.model, self.ran),
            ):
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

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """Load the head: a function from [tokens, hidden] to logits, [tokens, vocabulary]."""
        with self._forward.head() as run:
            yield torch.no_grad()(lambda hidden: run(hidden)[:, : self.tokens])

    def others(self, hidden: Tensor) -> float:
        """Mean probability mass of the vocabulary beyond the first ``tokens``, over all rows.

        Args:
            hidden: output of the last layer, [tokens, hidden]; all its logits are in memory at
                once.
        """
        with self._forward.head() as run, torch.no_grad():
            return float(run(hidden).softmax(-1)[:, self.tokens :].sum(-1).mean())

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
            extras: extras of the input of every layer.
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
            _taking_gradients(self.outside(), look_at_stored),
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
            self.rows([call]) as rows,
            _taking_gradients(self.outside(), look_at_stored),
            torch.enable_grad(),
        ):
            (first,) = forward.begin([call])
            computed = forward.cut()
            passed = self._passed_on(given, extras)
            for index in reversed(range(len(self.layers))):
                gradient, state = state.grad, given[index].to(self.device).requires_grad_()
                assert gradient is not None
                step = self._back_through(index, state, extras[index], gradient, {}, look, passed)
                if step is None:
                    continue
                idle.append(self.layers[index][0])
                # Parameters multiplied by zero get their gradient after the first step, which has
                # changed the output of the earlier layers as well.
                assert state.grad is not None
                scale = STEP * state.detach().square().mean().sqrt()
                stepped = (state - scale * state.grad.sign()).detach().requires_grad_()
                self._back_through(index, stepped, extras[index], gradient, step, look, passed)
            reached = [each for each in computed if each[1].grad is not None]
            torch.autograd.backward(
                [first, *(whole for whole, _ in reached)],
                [state.grad, *(cut.grad for _, cut in reached)],
            )
            assert rows.grad is not None
            look(embedding, of_head.pop() + rows.grad if tied else rows.grad)
        return idle[::-1]

    def _passed_on(self, given: Spool, extras: Sequence[Extras]) -> PassedOn:
        """Run the layers once more if they fill containers for later layers."""
        passed = PassedOn(self._forward.containers())
        for index in range(len(self.layers)) if passed.containers else ():
            with self.layer(index), torch.no_grad():
                self._forward.alone(index, given[index].to(self.device), extras[index])
            passed.note()
        return passed

    def _back_through(
        self,
        index: int,
        state: Tensor,
        extras: Extras,
        gradient: Tensor,
        step: Mapping[str, Tensor],
        look: Look,
        passed: PassedOn,
    ) -> dict[str, Tensor] | None:
        """Run a layer in the only call, and backpropagate through it.

        Args:
            index: index of the layer.
            state: input of the layer, [tokens, hidden].
            extras: extras of the input.
            gradient: gradient of the output, [tokens, hidden].
            step: first step of some parameters, by name; ``look`` already has their gradients.
            look: called with the name of each parameter and its gradient.
            passed: what layers pass on to later ones.

        Returns:
            First step of some parameters, if the layer returns its input; ``look`` does not have
            the gradients of its other parameters yet. None for all other layers.
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
                passed.rewind(index, with_gradients=not step)
                output = self._forward.alone(index, state, extras)
                idle = output.equal(state)
                made, gradients = passed.made(index)
                torch.autograd.backward([output, *made], [gradient, *gradients])
            del parameters
        return first_step if idle else None


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
            f"{title} is not a stack of layers between an embedding and a head; such models cannot "
            "be proved"
        )
    layers = min(stacks, key=lambda name: name.count("."))  # other lists are deeper
    embedding, head = ((name_of[id(end)], end) for end in ends)
    numbered = [f"{layers}.{index}" for index in range(len(named[layers]))]
    return [embedding, *((name, named[name]) for name in numbered), head]


WRAPPED = ("modules_to_save.default", "token_adapter.base_layer", "base_layer")
"""Paths, inside a wrapper of PEFT, of the module in use."""


def _inside(name: str, module: nn.Module) -> tuple[str, nn.Module]:
    """The name of the module in use, and the module, inside a wrapper of PEFT if there is one."""
    inside = dict(module.named_modules())
    path = next((each for each in WRAPPED if each in inside), None)
    return (f"{name}.{path}", inside[path]) if path else (name, module)


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
