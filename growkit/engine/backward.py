"""Backward through a stack of layers: gradients of one layer at a time, none of which are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.engine.calls import Call
from growkit.engine.forward import Forward
from growkit.engine.spool import Spool
from growkit.engine.stack import Stack

STEP = 1e-3
"""A first step of every number of a layer that hands on what it is given: as AdamW takes it."""

Look = Callable[[str, Tensor], None]
"""Takes the name of a parameter and its gradient."""


class Backward:
    """Gradients of a stack, each given to ``look`` as soon as it is made.

    Args:
        stack: the model.
        look: takes the name of a parameter and its gradient; of tied parameters, that of the
            tensor they are stored as, and the gradient of each.
    """

    def __init__(self, stack: Stack, look: Look) -> None:
        self._stack, self._look = stack, look

    def of(self, ids: Tensor, given: Spool, before: Forward, forward: Forward) -> list[str]:
        """Go back from the loss; see ``Layerwise.gradients``.

        Args:
            ids: token ids, [tokens].
            given: what every layer, and then the head, is given on them, each [tokens, hidden].
            before: calls that went through the stack, whose forms the head takes.
            forward: begins with these ids here.

        Returns:
            The names of the layers that hand on what they are given.
        """
        stack, idle = self._stack, list[str]()
        embedding, head = (f"{name}.weight" for name, _ in (stack.embedding, stack.head))
        tied = stack.stored(embedding) == stack.stored(head)
        of_head: list[Tensor] = []
        state = given[-1].to(stack.device).requires_grad_()
        with (
            before.head() as run,
            self._gradient_of_head(ids.unique(), of_head.append),
            _handing_over(stack.outside(), self._look_at_stored),
            torch.enable_grad(),
        ):
            logits = run(state)
            _go_back(functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)))
        del logits
        if not tied:
            self._look(head, of_head.pop())
        call = Call(ids)
        with (
            stack.rows([call]) as rows,
            _handing_over(stack.outside(), self._look_at_stored),
            torch.enable_grad(),
        ):
            (first,) = forward.begin([call])
            for index, (name, _) in reversed(list(enumerate(stack.layers))):
                gradient, state = state.grad, given[index].to(stack.device).requires_grad_()
                first_step = self._through(forward, index, state, gradient, {})
                if first_step is None:
                    continue
                idle.append(name)
                # What is multiplied by zero gets its gradient after the first step, when what the
                # layers before hand on is another as well.
                assert state.grad is not None
                scale = STEP * state.detach().square().mean().sqrt()
                stepped = (state - scale * state.grad.sign()).detach().requires_grad_()
                self._through(forward, index, stepped, gradient, first_step)
            _go_back(first, state.grad)
            assert rows.grad is not None
            self._look(embedding, of_head.pop() + rows.grad if tied else rows.grad)
        return idle[::-1]

    def _look_at_stored(self, name: str, gradient: Tensor) -> None:
        self._look(self._stack.stored(name), gradient)

    def _through(
        self,
        forward: Forward,
        index: int,
        state: Tensor,
        gradient: Tensor | None,
        step: Mapping[str, Tensor],
    ) -> dict[str, Tensor] | None:
        """Run a layer, and go back through it.

        Args:
            forward: the call.
            index: of the layer.
            state: what it is given, [tokens, hidden].
            gradient: of what it hands on, [tokens, hidden].
            step: a first step for some parameters, by name; nobody looks at these any more.

        Returns:
            A first step for some parameters, where the layer hands on what it is given; nobody has
            looked at the others yet. None for all other layers.
        """
        name, layer = self._stack.layers[index]
        first_step: dict[str, Tensor] = {}
        idle = False

        def take(parameter: str, found: Tensor) -> None:
            if idle and found.any():
                first_step[parameter] = STEP * found.sign()
            if parameter not in step and (not idle or parameter in first_step):
                self._look(parameter, found)

        with self._stack.lender.stepped(step), self._stack.layer(index):
            parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
            with _handing_over(parameters, take):
                output = forward.alone(index, state)
                idle = output.equal(state)
                _go_back(output, gradient)
            del parameters
        return first_step if idle else None

    @contextmanager
    def _gradient_of_head(self, used: Tensor, look: Callable[[Tensor], None]) -> Iterator[None]:
        """Give ``look`` some rows of the gradient of the head's matrix, when it goes backward."""

        def follow(module: nn.Module, args: tuple[Tensor, ...], logits: Tensor) -> None:
            given = args[0].detach().flatten(0, -2)
            logits.register_hook(lambda g: look(g.flatten(0, -2)[:, used.to(g.device)].T @ given))

        hook = self._stack.head[1].register_forward_hook(follow)
        try:
            yield
        finally:
            hook.remove()


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


def _go_back(output: Tensor, gradient: Tensor | None = None) -> None:
    """Go backward from what was computed; ``gradient`` is that of it, where it is no number."""
    torch.autograd.backward([output], [gradient] if gradient is not None else None)
