"""Run a model one layer at a time from its files, with one or two layers in memory.

The model is built without weights, by its transformers class. Each layer in turn runs all calls,
and is lent its weights only meanwhile. The only assumption about the class is the location of the
embedding, the layers and the head.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, foreign, reason
from growkit.base.torch_internals import buffers_of, parameters_of
from growkit.engine.calls import Call, CallError, Extras, NoStackError
from growkit.engine.class_weights import Extended, empty_model, persistent_buffers
from growkit.engine.forward import Forward
from growkit.engine.kernels import with_kernel
from growkit.engine.lending import Copies, Lender
from growkit.engine.long_text_settings import Changed
from growkit.engine.strict import choose_kernels
from growkit.model.model import Model


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


class Layerwise:
    """A model that is never entirely in memory: its embedding, layers and head are lent weights.

    Args:
        weights: the checkpoint.
        dtype: dtype of the weights after casting.
        device: device that the model runs on.
        tokens: compute logits only for this many tokens, from the start of the vocabulary; None
            for all.
        copies: stored tensors that the device keeps; see ``growkit.engine.lending.copies_on``.
        depth: number of layers to run, from the first on; None for all.

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
        calls: all calls, which may choose attention kernels and settings.
        ran: names of the fused kernels that ran, by the name in the call.

    Raises:
        InputError: transformers does not know the model, or the tensors do not fit the class.
    """

    def __init__(
        self,
        weights: Model,
        dtype: torch.dtype,
        device: torch.device,
        tokens: int | None = None,
        copies: Copies | None = None,
        depth: int | None = None,
    ) -> None:
        choose_kernels()
        self.model, self._weights, self.stored = empty_model(weights, dtype)
        self.lender = Lender(self._weights, self.stored, dtype, device, copies)
        # Modules added to a class may use its parameters in other ways than the class does.
        self.lender.stays = not isinstance(self._weights, Extended)
        self.device, self.tokens = device, tokens
        self._title = f"{type(self.model).__name__} of {weights.where()}"
        ends = _blocks(self.model, self._title)
        if depth is not None:
            stack: Any = self.model.get_submodule(ends[1][0].rpartition(".")[0])
            del stack[depth:]
            ends = [*ends[: depth + 1], ends[-1]]
        self.embedding, *self.layers, self.output = (_inside(*end) for end in ends)
        self._wrapped = self.embedding[0] != ends[0][0]
        self.returned: Extras | None = None
        self.calls: Sequence[Call] = ()
        self._changed: dict[str, Changed] = {}
        self.ran: dict[str, set[str]] = {}
        self._unreached = self._watch()
        # Stored buffers keep the values of the files; the class computes all other buffers.
        stored = {n for n in persistent_buffers(self.model) if n in self._weights.tensors}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for key, buffer in buffers_of(module).items():
                name = f"{path}.{key}".removeprefix(".")
                if name in stored and buffer is not None:
                    buffers_of(module)[key] = self.lender.whole(name, buffer.dtype)
                elif buffer is not None:
                    buffers_of(module)[key] = buffer.to(device)

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
                states = forward.record_calls(calls)
            nothing: list[Extras] = [()] * len(calls)
            yield Stage(
                self.embedding[0], None, self.embedding[1], states, nothing, forward, loaded
            )
        for index, (name, layer) in enumerate(self.layers):
            with ExitStack() as loaded:
                loaded.enter_context(self.layer(index))
                states, extras = forward.run_layer_in_all_calls(index, states)
                self.fetch(index + 1)
                yield Stage(name, index, layer, states, extras, forward, loaded)
            forward.finish_layer(index, extras)

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
            patch.dict(parameters_of(embedding), weight=parameter),
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
                self.as_in(call),
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

    @contextmanager
    def as_in(self, call: int | None) -> Iterator[None]:
        """Run modules with the kernel and the settings of a call; None outside of calls."""
        if call is None:
            yield
            return
        settings = self.calls[call].settings
        with with_kernel(self.calls[call].kernel, self.model, self.ran):
            if not settings:
                yield
                return
            with self.changed_by(settings).applied():
                yield

    def changed_by(self, settings: Mapping[str, Any]) -> Changed:
        """What differs in the modules with other values of keys of the config.

        Raises:
            InputError: the class cannot have them.
        """
        key = str(sorted(settings.items()))
        if key not in self._changed:
            self._changed[key] = Changed(self.model, self._weights, settings)
        return self._changed[key]

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
            if parameters_of(module) and not f"{name}.".startswith(within)
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
    path = next((wrapper for wrapper in WRAPPED if wrapper in inside), None)
    return (f"{name}.{path}", inside[path]) if path else (name, module)
