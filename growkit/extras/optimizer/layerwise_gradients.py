"""Gradients of a model that runs one layer at a time, from the last layer to the first.

The layers first run without gradients, and their inputs are kept on disk. Then each runs again with
gradients, while it has its weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.base.limits import is_identity
from growkit.base.torch_internals import tree_leaves, tree_map
from growkit.engine.calls import Call, Extras, NoStackError
from growkit.engine.forward import Forward, containers_in, values_in
from growkit.engine.layerwise import Layerwise
from growkit.extras.spool import Spool

STEP = 1e-3
"""Size of the first AdamW step of every parameter, in a layer that returns its input."""

Look = Callable[[str, Tensor], None]
"""Callback for the name of a parameter and its gradient."""


def layerwise_gradients(model: Layerwise, ids: Tensor, look: Look) -> list[str]:
    """Compute the gradient of every parameter, one at a time, from the last layer to the first.

    A layer that returns its input multiplies some parameters by zero. Their gradient is taken after
    a first step of the other parameters.

    Gradients of the embedding and the head cover only the rows of tokens that occur, in the order
    of their ids, since the whole matrix may be larger than any layer.

    Args:
        model: the model.
        ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
        look: called with the name of each parameter and its gradient; tied parameters use the name
            of their stored tensor, with one call for each.

    Returns:
        The names of the layers that return their input.

    Raises:
        InputError: the class cannot run with its config, or layers pass on more than hidden states.
    """
    return _Backward(model, look).run(ids)


class _Backward(Forward):
    """A run of one prompt through a model, with gradients."""

    _model: Layerwise

    def __init__(self, model: Layerwise, look: Look) -> None:
        super().__init__(model)
        self._look = look
        self._states = Spool()  # the inputs of every layer and of the head, each [tokens, hidden]
        self._extras_before: list[Extras] = []  # the extras of the layer before

    def run(self, ids: Tensor) -> list[str]:
        """See ``layerwise_gradients``."""
        model, look = self._model, self._look
        for stage in model.stages([Call(ids)]):
            self._states.append(stage.after[0])
            self._extras_before.append(stage.extras[0])
        state = self._state(-1)
        of_head = self._back_through_head(stage.forward, ids, state)
        embedding, head = (f"{name}.weight" for name, _ in (model.embedding, model.output))
        tied = model.stored(embedding) == model.stored(head)
        if not tied:
            look(head, of_head)
        idle = []
        with (
            model.rows([Call(ids)]) as rows,
            _taking_gradients(model.outside(), self._look_at_stored),
            torch.enable_grad(),
        ):
            (first,) = self.record_calls([Call(ids)])
            computed = self._cut_arguments()
            passed_on = self._fill_containers()
            for index in reversed(range(len(model.layers))):
                gradient, state = state.grad, self._state(index)
                assert gradient is not None
                step = self._back_through(index, state, gradient, {}, passed_on)
                if step is None:
                    continue
                idle.append(model.layers[index][0])
                # Parameters multiplied by zero get their gradient after the first step, which has
                # changed the output of the earlier layers as well.
                assert state.grad is not None
                scale = STEP * state.detach().square().mean().sqrt()
                stepped = (state - scale * state.grad.sign()).detach().requires_grad_()
                self._back_through(index, stepped, gradient, step, passed_on)
            reached = [pair for pair in computed if pair[1].grad is not None]
            torch.autograd.backward(
                [first, *(tensor for tensor, _ in reached)],
                [state.grad, *(leaf.grad for _, leaf in reached)],
            )
            assert rows.grad is not None
            look(embedding, of_head + rows.grad if tied else rows.grad)
        return idle[::-1]

    def _state(self, index: int) -> Tensor:
        """The input of a layer, or of the head for -1, as a leaf: [tokens, hidden]."""
        return self._states[index].to(self._model.device).requires_grad_()

    def _look_at_stored(self, name: str, gradient: Tensor) -> None:
        self._look(self._model.stored(name), gradient)

    def _back_through_head(self, forward: Forward, ids: Tensor, state: Tensor) -> Tensor:
        """Backpropagate the loss to the input of the head; the gradient of its rows in use."""
        used, gradients = ids.unique().to(self._model.device), list[Tensor]()

        def follow(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
            hidden = args[0].detach().flatten(0, -2)
            logits.register_hook(lambda g: gradients.append(g.flatten(0, -2)[:, used].T @ hidden))

        with (
            self._model.output[1].register_forward_hook(follow),
            forward.head() as run,
            _taking_gradients(self._model.outside(), self._look_at_stored),
            torch.enable_grad(),
        ):
            logits = run(state)
            functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)).backward()
        return gradients.pop()

    def _cut_arguments(self) -> list[tuple[Tensor, Tensor]]:
        """Detach the layers' arguments from the graph that computes them.

        Returns:
            Arguments that are computed from parameters, such as embeddings for each layer, each
            with the leaf in its place, which collects the gradients of all layers.

        Raises:
            InputError: a layer takes float extras of the layer before it, which have gradients.
        """
        (recorded,) = self._recorded
        extras = {id(extra) for extra in recorded.placeholders if _is_float(extra)}
        with self._model.guarded():
            if any(id(value) in extras for value in values_in(recorded.arguments[1:])):
                raise NoStackError("layers pass on more than hidden states")
        leaves: dict[int, tuple[Tensor, Tensor]] = {}

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.grad_fn is None:
                return value
            return leaves.setdefault(id(value), (value, value.detach().requires_grad_()))[1]

        arguments = [argument.changed(leaf) for argument in recorded.arguments]
        self._recorded = [recorded._replace(arguments=arguments)]
        return [*leaves.values()]

    def _fill_containers(self) -> _PassedOn:
        """Run the layers once more if they fill containers for later layers."""
        passed_on = _PassedOn(containers_in(self._recorded[0].arguments))
        for index in range(len(self._model.layers)) if passed_on.containers else ():
            with self._model.layer(index), torch.no_grad():
                self._output_of(index, self._state(index))
            passed_on.note()
        return passed_on

    def _output_of(self, index: int, state: Tensor) -> Tensor:
        """Run a layer for an input, [tokens, hidden]."""
        self._extras = [self._extras_before[index] or self._recorded[0].placeholders]
        return self.run_layer(index, 0, state)[0]

    def _back_through(
        self,
        index: int,
        state: Tensor,
        gradient: Tensor,
        step: Mapping[str, Tensor],
        passed_on: _PassedOn,
    ) -> dict[str, Tensor] | None:
        """Run a layer, and backpropagate through it.

        Args:
            index: index of the layer.
            state: input of the layer, [tokens, hidden].
            gradient: gradient of the output, [tokens, hidden].
            step: first step of some parameters, by name; ``look`` already has their gradients.
            passed_on: what layers pass on to later ones.

        Returns:
            First step of some parameters, if the layer returns its input; ``look`` does not have
            the gradients of its other parameters yet. None for all other layers.
        """
        name, layer = self._model.layers[index]
        first_step: dict[str, Tensor] = {}
        idle = False

        def take(parameter: str, computed: Tensor) -> None:
            if idle and computed.any():
                first_step[parameter] = STEP * computed.sign()
            if parameter not in step and (not idle or parameter in first_step):
                self._look(parameter, computed)

        # Matrices that stay in their files cannot be changed.
        stays = self._model.lender.stays and not step
        with patch.object(self._model.lender, "stays", stays), self._model.layer(index):
            parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
            for parameter, change in step.items():
                parameters[parameter].data = parameters[parameter].data - change
            with _taking_gradients(parameters, take):
                passed_on.rewind(index, with_gradients=not step)
                output = self._output_of(index, state)
                idle = is_identity(state, output)
                tensors, gradients = passed_on.additions(index)
                torch.autograd.backward([output, *tensors], [gradient, *gradients])
            del parameters
        return first_step if idle else None


class _PassedOn:
    """What layers pass on to later ones in containers, such as keys that several layers share.

    Args:
        containers: the containers, still empty.

    Attributes:
        containers: see above.
    """

    def __init__(self, containers: Sequence[MutableMapping[Any, Any]]) -> None:
        self.containers = containers
        self._before: list[list[dict[Any, Any]]] = [[{} for _ in containers]]  # by layer

    def note(self) -> None:
        """Note what the next layer has put in: as leaves, which collect gradients."""
        before = self._before[-1]
        self._before.append(
            [
                {
                    key: value if value is old.get(key) else tree_map(_leaf, value)
                    for key, value in container.items()
                }
                for container, old in zip(self.containers, before, strict=True)
            ]
        )
        self.rewind(len(self._before) - 1)

    def rewind(self, index: int, *, with_gradients: bool = True) -> None:
        """Give the containers what they held before a layer.

        Args:
            index: index of the layer.
            with_gradients: whether the leaves collect gradients of what follows.
        """
        if not self.containers:
            return
        for container, held in zip(self.containers, self._before[index], strict=True):
            container.clear()
            container.update(held if with_gradients else tree_map(_leaf, held))

    def additions(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        """What a layer has put in since ``rewind``, and the gradients of it that are not zero."""
        if not self.containers:
            return [], []
        before, after = self._before[index : index + 2]
        pairs = [
            pair
            for container, old, leaves in zip(self.containers, before, after, strict=True)
            for key in leaves
            if leaves[key] is not old.get(key)
            for pair in zip(tree_leaves(container[key]), tree_leaves(leaves[key]), strict=True)
        ]
        reached = [
            (tensor, leaf.grad) for tensor, leaf in pairs if getattr(leaf, "grad", None) is not None
        ]
        return [tensor for tensor, _ in reached], [gradient for _, gradient in reached]


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _leaf(value: Any) -> Any:
    return value.detach().requires_grad_() if _is_float(value) else value


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
