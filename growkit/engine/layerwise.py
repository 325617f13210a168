"""Run a model one layer at a time from its files, with one or two layers in memory.

The model is built without weights, by its transformers class. Each layer in turn runs all calls,
and is lent its weights only meanwhile. Backpropagation also takes one layer at a time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.limits import is_identity
from growkit.engine.calls import Call, Extras, Spool
from growkit.engine.forward import Forward, PassedOn
from growkit.engine.layered_model import LayeredModel

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

    def gradients(
        self, ids: Tensor, states: Spool, extras: Sequence[Extras], look: Look
    ) -> list[str]:
        """Compute the gradient of every parameter, one at a time, from the last layer to the first.

        A layer that returns its input multiplies some parameters by zero. Their gradient is taken
        after a first step of the other parameters.

        Gradients of the embedding and the head cover only the rows of tokens that occur, in the
        order of their ids, since the whole matrix may be larger than any layer.

        Args:
            ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
            states: input of every layer, then of the head, each [tokens, hidden].
            extras: extras of the input of every layer.
            look: called with the name of each parameter and its gradient; tied parameters use the
                name of their stored tensor, with one call for each.

        Returns:
            The names of the layers that return their input.
        """

        def look_at_stored(name: str, gradient: Tensor) -> None:
            look(self.stored(name), gradient)

        embedding, head = (f"{name}.weight" for name, _ in (self.embedding, self.output))
        state = states[-1].to(self.device).requires_grad_()
        of_head = self._back_through_head(ids, state, look_at_stored)
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
            passed = self._passed_on(states, extras)
            for index in reversed(range(len(self.layers))):
                gradient, state = state.grad, states[index].to(self.device).requires_grad_()
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
            reached = [pair for pair in computed if pair[1].grad is not None]
            torch.autograd.backward(
                [first, *(tensor for tensor, _ in reached)],
                [state.grad, *(cut.grad for _, cut in reached)],
            )
            assert rows.grad is not None
            look(embedding, of_head.pop() + rows.grad if tied else rows.grad)
        return idle[::-1]

    def _back_through_head(self, ids: Tensor, state: Tensor, look: Look) -> list[Tensor]:
        """Backpropagate the loss to the input of the head; the gradient of its rows in use."""
        used, gradients = ids.unique().to(self.device), list[Tensor]()

        def follow(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
            hidden = args[0].detach().flatten(0, -2)
            logits.register_hook(lambda g: gradients.append(g.flatten(0, -2)[:, used].T @ hidden))

        with (
            self.output[1].register_forward_hook(follow),
            self._forward.head() as run,
            _taking_gradients(self.outside(), look),
            torch.enable_grad(),
        ):
            logits = run(state)
            functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)).backward()
        return gradients

    def _passed_on(self, states: Spool, extras: Sequence[Extras]) -> PassedOn:
        """Run the layers once more if they fill containers for later layers."""
        passed = PassedOn(self._forward.containers())
        for index in range(len(self.layers)) if passed.containers else ():
            with self.layer(index), torch.no_grad():
                self._forward.alone(index, states[index].to(self.device), extras[index])
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

        def take(parameter: str, computed: Tensor) -> None:
            if idle and computed.any():
                first_step[parameter] = STEP * computed.sign()
            if parameter not in step and (not idle or parameter in first_step):
                look(parameter, computed)

        with patch.object(self.lender, "steps", step), self.layer(index):
            parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
            with _taking_gradients(parameters, take):
                passed.rewind(index, with_gradients=not step)
                output = self._forward.alone(index, state, extras)
                idle = is_identity(state, output)
                tensors, gradients = passed.additions(index)
                torch.autograd.backward([output, *tensors], [gradient, *gradients])
            del parameters
        return first_step if idle else None


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
