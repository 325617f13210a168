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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from growkit.checkpoint.tensors import Weights
from growkit.engine.backward import backward, handing_over
from growkit.engine.building import blocks, empty_model, persistent_buffers
from growkit.engine.caches import keep_shapes, lengthen, new_cache
from growkit.engine.calls import Batch, Call, CallError, Noted, alike
from growkit.engine.lending import Lender, scaled
from growkit.engine.passing import Arguments, Form, Handed, NoStackError, untouched
from growkit.engine.reproducible import choose_kernels
from growkit.engine.spool import Spool
from growkit.errors import InputError, foreign, reason

Named = tuple[str, nn.Module]

STEP = 1e-3
"""A first step of every number of a layer that hands on what it is given: as AdamW takes it."""


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
        self._tokens = tokens
        choose_kernels()
        self.model, self._weights, self._stored = empty_model(weights, dtype, attention)
        self._lender = Lender(self._weights, self._stored, dtype, device)
        self.device = device
        self._embedding, *self._layers, self._head = blocks(self.model, weights.where())
        self._unreached = self._watch()
        self._load_buffers()
        self._noted: list[Noted] = []
        self._batches: dict[int, Batch] = {}  # by the index of the first call
        self._length = 1
        self._caches: list[Any] = []
        self._handed = Handed()  # what layers hand on along with hidden states, or its stand-ins
        self._along: list[tuple[Any, ...]] = []  # the same of the last layer that ran, by call

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
            loaded.enter_context(self._rows(calls))
            with torch.no_grad():
                states = self._begin(calls)
            name, embedding = self._embedding
            yield Stage(name, None, embedding, None, states, _never, _never, loaded.close)
        for index, (name, layer) in enumerate(self._layers):
            with ExitStack() as loaded:
                loaded.enter_context(self._loaded(name, layer))
                again = partial(self._again, index)
                given = None if watched is None else states[watched]
                before, states, along = states, [], []
                while before:  # states of many prompts are large, and are needed once
                    for state, others in self._run(index, len(states), before):
                        states.append(state)
                        along.append(others)
                self._fetch(index + 1)
                change = partial(scaled, layer)
                yield Stage(name, index, layer, given, states, again, change, loaded.close)
            self._along = along
            for cache in self._caches:
                keep_shapes(cache, index)

    def check_reach(self) -> None:
        """Call it after logits were had.

        Raises:
            InputError: the model holds weights that text does not reach, of an image encoder, say.
        """
        if self._unreached:
            raise InputError(
                f"{type(self.model).__name__} of {self._weights.where()} holds weights that text "
                f"does not reach ({min(self._unreached)}); such models cannot be proved"
            )

    @contextmanager
    def head(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """From what the last layer hands on, [tokens, hidden], to logits, [tokens, vocabulary]."""
        with self._behind_the_layers() as run:
            yield torch.no_grad()(lambda hidden: run(hidden)[:, : self._tokens])

    def others(self, hidden: Tensor) -> float:
        """The part of the softmax that goes to tokens whose logits are not wanted.

        Args:
            hidden: what the last layer hands on, [tokens, hidden]; logits of all of these are in
                memory at once.

        Returns:
            The mean over these tokens.
        """
        with self._behind_the_layers() as run, torch.no_grad():
            return float(run(hidden).softmax(-1)[:, self._tokens :].sum(-1).mean())

    def gradients(
        self, ids: Tensor, given: Spool, look: Callable[[str, Tensor], None]
    ) -> list[str]:
        """The gradient of every parameter, from the last layer to the first, one at a time.

        A layer that hands on what it is given has parameters that are multiplied by zero. Theirs is
        the gradient after a first step of the others.

        Of the embedding and of the head, only the rows of tokens that occur, in the order of their
        ids: the whole may be larger than any layer.

        Args:
            ids: token ids, [tokens]; the loss is the cross-entropy of all but the first.
            given: what every layer, and then the head, is given on them, each [tokens, hidden].
            look: takes the name of a parameter and its gradient; of tied parameters, that of the
                tensor they are stored as, and the gradient of each.

        Returns:
            The names of the layers that hand on what they are given.
        """
        idle: list[str] = []

        def tied_look(name: str, gradient: Tensor) -> None:
            look(self._stored(name), gradient)

        call = Call(ids)
        embedding, head = (f"{name}.weight" for name, _ in (self._embedding, self._head))
        tied = self._stored(embedding) == self._stored(head)
        of_head: list[Tensor] = []
        state = given[-1].to(self.device).requires_grad_()
        with (
            self._behind_the_layers() as run,
            self._gradient_of_head(ids.unique(), of_head.append),
            handing_over(self._outside(), tied_look),
            torch.enable_grad(),
        ):
            logits = run(state)
            backward(functional.cross_entropy(logits[:-1], ids[1:].to(logits.device)))
        del logits
        if not tied:
            look(head, of_head.pop())
        with (
            self._rows([call]) as rows,
            handing_over(self._outside(), tied_look),
            torch.enable_grad(),
        ):
            first = self._begin([call])[0]
            # Only hidden states are handed on here: whatever else there may be stays what it is.
            self._along = [self._noted[0].stand_ins]
            for index, (name, _) in reversed(list(enumerate(self._layers))):
                gradient, state = state.grad, given[index].to(self.device).requires_grad_()
                first_step = self._through(index, state, gradient, look, {})
                if first_step is None:
                    continue
                idle.append(name)
                # What is multiplied by zero gets its gradient after the first step, when what the
                # layers before hand on is another as well.
                assert state.grad is not None
                scale = STEP * state.detach().square().mean().sqrt()
                stepped = (state - scale * state.grad.sign()).detach().requires_grad_()
                self._through(index, stepped, gradient, look, first_step)
            backward(first, state.grad)
            assert rows.grad is not None
            look(embedding, of_head.pop() + rows.grad if tied else rows.grad)
        return idle[::-1]

    def _through(
        self,
        index: int,
        state: Tensor,
        gradient: Tensor | None,
        look: Callable[[str, Tensor], None],
        step: Mapping[str, Tensor],
    ) -> dict[str, Tensor] | None:
        """Run a layer, and go back through it.

        Args:
            index: of the layer.
            state: what it is given, [tokens, hidden].
            gradient: of what it hands on, [tokens, hidden].
            look: takes the name of a parameter and its gradient.
            step: a first step for some parameters, by name; nobody looks at these any more.

        Returns:
            A first step for some parameters, where the layer hands on what it is given; nobody has
            looked at the others yet. None for all other layers.
        """
        name, layer = self._layers[index]
        first_step: dict[str, Tensor] = {}
        idle = False

        def take(parameter: str, found: Tensor) -> None:
            if idle and found.any():
                first_step[parameter] = STEP * found.sign()
            if parameter not in step and (not idle or parameter in first_step):
                look(parameter, found)

        with self._lender.stepped(step), self._loaded(name, layer):
            parameters = {f"{name}.{key}": p for key, p in layer.named_parameters()}
            with handing_over(parameters, take):
                output, _ = self._call(index, 0, state)
                if self._noted[0].uses_along:
                    raise self._no_stack("layers hand on more than hidden states")
                idle = output.equal(state)
                backward(output, gradient)
            del parameters
        return first_step if idle else None

    @contextmanager
    def _behind_the_layers(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """What comes behind the layers, loaded; the matrix of the head has no gradient."""
        name, head = self._head

        def run(hidden: Tensor) -> Tensor:
            # No more tokens at a time than in the first call: a class may have no more positions.
            whole = len(hidden) - len(hidden) % self._length if self._batches else 0
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
                return self._handed.with_state(formed)

            ids = torch.zeros(*tokens, dtype=torch.long, device=self.device)
            with self._standing_aside(stand_in), self._guarded():
                logits = self.model(input_ids=ids, use_cache=False).logits
            assert isinstance(logits, Tensor)
            return logits.flatten(0, 1)

        matrix = self._lender.lent(head, {"weight": f"{name}.weight"}, head=True)
        matrix_of = dict(self._embedding[1].named_parameters())["weight"]
        nothing = self._lender.cast(torch.zeros(1, matrix_of.shape[1]))
        with self._embedding_of(nothing, torch.zeros(1, dtype=torch.long)), matrix:
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
    def _rows(self, calls: Sequence[Call]) -> Iterator[nn.Parameter]:
        """The embedding with only the rows that are used: these."""
        name, _ = self._embedding
        used = torch.cat([call.ids.cpu() for call in calls]).unique()
        with self._embedding_of(self._lender.rows(f"{name}.weight", used), used) as rows:
            yield rows

    @contextmanager
    def _embedding_of(self, rows: Tensor, used: Tensor) -> Iterator[nn.Parameter]:
        """All around the layers, and an embedding that has only the rows of these ids, in order."""
        embedding, used = self._embedding[1], used.to(self.device)

        def find(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            places = torch.searchsorted(used, args[0].contiguous()).clamp_max(len(used) - 1)
            if not used[places].equal(args[0]):
                raise NoStackError("tokens are embedded that were not asked")
            return (places, *args[1:])

        parameter = nn.Parameter(rows)
        whole, padding = embedding._parameters["weight"], getattr(embedding, "padding_idx", None)
        embedding._parameters["weight"] = parameter
        vars(embedding)["padding_idx"] = None  # rows have other numbers now
        hook = embedding.register_forward_pre_hook(find)
        try:
            with self._around_the_layers():  # embeddings of positions, say
                yield parameter
        finally:
            hook.remove()
            embedding._parameters["weight"] = whole
            vars(embedding)["padding_idx"] = padding

    def _begin(self, calls: Sequence[Call]) -> list[Tensor]:
        """Run every call up to the first layer, and note what the layers are called with."""
        self._noted = []
        self._caches = []
        self._length = len(calls[0].ids)
        self._along = [()] * len(calls)
        caches: list[tuple[Any, Any]] = []
        states = []
        for index, call in enumerate(calls):
            shadow, real = caches[call.continues] if call.continues is not None else (None, None)
            with self._guarded(index):
                if call.cached and shadow is None:
                    shadow = new_cache(self.model)
                state, noted = self._note(index, call, shadow)
                if call.cached:
                    # The class may have prepared the empty cache for itself.
                    if real is None:
                        real = deepcopy(shadow)
                        self._caches.append(real)
                    lengthen(shadow, len(self._layers), len(call.ids))
                    arguments = [each.replaced((shadow,), (real,)) for each in noted.arguments]
                    noted = Noted(noted.form, arguments, noted.stand_ins)
            caches.append((shadow, real))
            states.append(state)
            self._noted.append(noted)
        self._batches = dict(self._note_batches(calls)) if self._handed.alone else {}
        return states

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
                with self._guarded(first):
                    state, arguments = self._noting(Call(ids, inputs), None)
            except CallError:  # a class may take one prompt at a time
                return
            if form.axis == 1 and state.shape == (count, *form.shape[1:]):
                yield first, Batch(count, arguments)

    def _note(self, index: int, call: Call, cache: Any) -> tuple[Tensor, Noted]:
        """What the first layer is given, and what all of them are called with."""
        try:
            state, arguments = self._noting(call, cache)
        except Exception:  # a class may do anything with a tensor where it unpacks a tuple, say
            if index or not self._handed.alone:
                raise
            # The class, then, wants more of its layers than a tensor.
            self._handed = self._handed_by_the_first(call)
            state, arguments = self._noting(call, cache)
        form = Form.of(state, len(call.ids))
        return form.flat(state), Noted(form, arguments, self._handed.along)

    def _noting(self, call: Call, cache: Any) -> tuple[Tensor, list[Arguments]]:
        given: list[tuple[Tensor, int]] = []
        arguments: list[Arguments] = []

        def stand_aside(*args: Any, **kwargs: Any) -> Any:
            state, others = Arguments.of(args, kwargs)
            if given and not untouched(state, *given[0]):
                raise NoStackError("something is computed between layers")
            given.append((state, state._version))
            arguments.append(others)
            if len(arguments) == len(self._layers):
                raise _ArrivedError
            return self._handed.with_state(state)

        with self._standing_aside(stand_aside), suppress(_ArrivedError):
            self._forward(call, cache)
        if len(arguments) < len(self._layers):
            raise NoStackError(f"{len(arguments)} of {len(self._layers)} layers are called")
        return given[0][0], arguments

    def _handed_by_the_first(self, call: Call) -> Handed:
        """What the first layer hands on in a call; stand-ins for it."""
        noted: list[tuple[Tensor, Arguments]] = []

        def stop(*args: Any, **kwargs: Any) -> Any:
            noted.append(Arguments.of(args, kwargs))
            raise _ArrivedError

        with self._standing_aside(stop), suppress(_ArrivedError):
            self._forward(Call(call.ids, call.inputs), None)
        if not noted:
            raise NoStackError("no layer is called")
        ((state, arguments),) = noted
        name, layer = self._layers[0]
        with self._loaded(name, layer):
            args, kwargs = arguments.apart().call(state)
            return Handed.of(layer(*args, **kwargs))[1].unknown()

    def _forward(self, call: Call, cache: Any) -> None:
        inputs: dict[str, Any] = {key: each.to(self.device) for key, each in call.inputs.items()}
        if cache is not None:
            inputs["past_key_values"] = cache
        ids = torch.atleast_2d(call.ids).to(self.device)
        self.model(input_ids=ids, use_cache=call.cached, **inputs)

    @torch.no_grad()
    def _run(
        self, index: int, call: int, before: list[Tensor]
    ) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
        """Run a layer in a call, or in a batch of them, and take what it is given off ``before``.

        Yields:
            What ``_call`` returns, for each.
        """
        batch = self._batches.get(call)
        if not batch:
            yield self._call(index, call, before.pop(0))
            return
        form = self._noted[call].form
        together = torch.cat([form.formed(state) for state in before[: batch.count]])
        del before[: batch.count]
        args, kwargs = batch.arguments[index].call(together)
        with self._guarded(call):
            output = self._output(index, args, kwargs)[0]
        yield from ((form.flat(state), ()) for state in output.split(1))

    @torch.no_grad()
    def _again(self, index: int, call: int, state: Tensor) -> Tensor:
        return self._call(index, call, state, apart=True)[0]

    def _call(
        self, index: int, call: int, state: Tensor, *, apart: bool = False
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Run a layer: hidden states, [tokens, hidden], and what it hands on along with them."""
        noted = self._noted[call]
        arguments = noted.arguments[index]
        if index and noted.stand_ins:
            arguments = arguments.replaced(noted.stand_ins, self._along[call])
        args, kwargs = (arguments.apart() if apart else arguments).call(noted.form.formed(state))
        with self._guarded(call):
            output, handed = self._output(index, args, kwargs)
            if index and noted.stand_ins and len(noted.stand_ins) != len(handed.along):
                raise NoStackError("layers hand on different things")
            return noted.form.flat(output), handed.along

    def _output(
        self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Tensor, Handed]:
        """What a layer hands on."""
        output, handed = Handed.of(self._layers[index][1](*args, **kwargs))
        if handed.alone != self._handed.alone:
            self._handed = handed.unknown()  # a single layer: nobody has looked yet
        return output, handed

    @contextmanager
    def _guarded(self, call: int | None = None) -> Iterator[None]:
        """What goes wrong in a class becomes a sentence."""
        try:
            with foreign(
                f"{type(self.model).__name__} of {self._weights.where()} cannot be run one layer "
                "at a time",
                "correct its config.json, or such models cannot be proved",
            ):
                try:
                    yield
                except NoStackError as error:
                    raise self._no_stack(str(error)) from error
        except InputError as error:
            if call is None:
                raise
            cause = error.__cause__
            why = str(error)
            if isinstance(cause, NoStackError):
                why = str(cause)
            elif cause:
                why = f"{type(cause).__name__}: {reason(cause)}"
            model = type(self.model).__name__
            raise CallError(str(error), call, f"{model} cannot be asked so ({why})") from error

    def _no_stack(self, why: str) -> InputError:
        return InputError(
            f"{type(self.model).__name__} of {self._weights.where()} cannot be run one layer at a "
            f"time ({why}); such models cannot be proved"
        )

    def _watch(self) -> dict[str, nn.Module]:
        """Modules outside of the layers that have parameters; they leave once they run."""
        within = tuple(f"{name}." for name, _ in self._layers)
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

    def _load_buffers(self) -> None:
        """Buffers that are in the files, as they are there; others, as the class makes them."""
        in_files = {
            name for name in persistent_buffers(self.model) if name in self._weights.tensors
        }
        for path, module in self.model.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                name = f"{path}.{key}".removeprefix(".")
                if buffer is None:
                    continue
                if name in in_files:
                    module._buffers[key] = self._lender.buffer(name, buffer.dtype)
                else:
                    module._buffers[key] = buffer.to(self.device)

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


def _parameters(name: str, layer: nn.Module) -> dict[str, str]:
    """The parameters of a layer, by their names in the model."""
    return {key: f"{name}.{key}" for key, _ in layer.named_parameters()}


def _never(*args: Any) -> Any:
    raise AssertionError("an embedding is neither run again nor changed")
