"""A model of transformers as a stack of layers that have their weights only while they run.

The model is built without weights, and the weights of a part are lent to it while that part runs.
The layers can be replaced for a while, so that the rest of the class's own ``forward`` runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, foreign, reason
from growkit.base.tensors import Weights
from growkit.engine.calls import Call, CallError, LayerOutput, NoStackError
from growkit.engine.class_weights import empty_model, persistent_buffers
from growkit.engine.lending import Lender


class Stack:
    """An embedding, decoder layers and an output head, without their weights.

    Args:
        weights: the checkpoint.
        dtype: what its weights are cast to.
        device: where it runs.
        attention: transformers' attention implementation; None for the class's own choice.

    Attributes:
        model: the model of transformers.
        device: where it runs.
        embedding: its name in the model, and the module.
        layers: the same of every layer, in order.
        output: the same of the output head.
        stored: from the name of a parameter to that of the tensor it is stored as.
        lender: of the weights.
        returned: what layers return, as far as that has been seen.

    Raises:
        InputError: transformers does not know the model, or the tensors do not fit the class.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, attention: str | None
    ) -> None:
        self.model, self._weights, self.stored = empty_model(weights, dtype, attention)
        self.lender = Lender(self._weights, self.stored, dtype, device)
        self.device = device
        self._title = f"{type(self.model).__name__} of {weights.where()}"
        self.embedding, *self.layers, self.output = _blocks(self.model, self._title)
        self.returned = LayerOutput()
        self._unreached = self._watch()
        # Buffers that are in the files are as they are there; the class makes the rest.
        in_files = {n for n in persistent_buffers(self.model) if n in self._weights.tensors}
        for path, module in self.model.named_modules(remove_duplicate=False):
            for key, buffer in module._buffers.items():
                name = f"{path}.{key}".removeprefix(".")
                if name in in_files and buffer is not None:
                    module._buffers[key] = self.lender.whole(name, buffer.dtype)
                elif buffer is not None:
                    module._buffers[key] = buffer.to(device)

    @property
    def names(self) -> list[str]:
        """The embedding, every layer, and the output head."""
        return [name for name, _ in (self.embedding, *self.layers, self.output)]

    def stores(self, name: str) -> bool:
        """Whether a tensor of this name is in the files, not tied to another."""
        return self.stored(name) == name and name in self._weights.tensors

    def outside(self) -> dict[str, nn.Parameter]:
        """Parameters that belong to no layer, nor to the embedding, but for the head's matrix."""
        within = tuple(f"{name}." for name, _ in (self.embedding, *self.layers))
        head = f"{self.output[0]}.weight"
        named = self.model.named_parameters(remove_duplicate=False)
        return {key: p for key, p in named if not key.startswith(within) and key != head}

    def layer(self, index: int) -> AbstractContextManager[None]:
        """A layer with its weights."""
        name, layer = self.layers[index]
        return self.lender.lent(layer, _parameters(name, layer))

    def fetch(self, index: int) -> None:
        """Begin to load the weights of a layer, if there is one."""
        for name, layer in self.layers[index : index + 1]:
            self.lender.fetch(layer, _parameters(name, layer))

    @contextmanager
    def rows(self, calls: Sequence[Call]) -> Iterator[nn.Parameter]:
        """All before the layers; of the embedding, only the rows that calls use: these."""
        name, _ = self.embedding
        used = torch.cat([call.ids.cpu() for call in calls]).unique()
        with self._embedding_of(self.lender.rows(f"{name}.weight", used), used) as rows:
            yield rows

    @contextmanager
    def behind(self) -> Iterator[None]:
        """All behind the layers, with their weights; the head's matrix has no gradient."""
        name, head = self.output
        matrix = self.lender.lent(head, {"weight": f"{name}.weight"}, head=True)
        columns = dict(self.embedding[1].named_parameters())["weight"].shape[1]
        nothing = torch.zeros(1, columns, dtype=self.lender.dtype, device=self.device)
        with self._embedding_of(nothing, torch.zeros(1, dtype=torch.long)), matrix:
            dict(head.named_parameters())["weight"].requires_grad = False
            yield

    @contextmanager
    def _embedding_of(self, rows: Tensor, used: Tensor) -> Iterator[nn.Parameter]:
        """All around the layers, and an embedding with only the rows of these sorted ids."""
        embedding, used = self.embedding[1], used.to(self.device)

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
            # Embeddings of positions, say.
            with self.lender.lent(self.model, {key: key for key in self.outside()}):
                yield parameter
        finally:
            hook.remove()
            embedding._parameters["weight"] = whole
            vars(embedding)["padding_idx"] = padding

    @contextmanager
    def replaced_layers(self, forward: Callable[..., Any]) -> Iterator[None]:
        """The model with another function in the place of every layer's ``forward``."""
        for _, layer in self.layers:
            layer.forward = forward
        try:
            yield
        finally:
            for _, layer in self.layers:
                del layer.forward

    @contextmanager
    def guarded(self, call: int | None = None) -> Iterator[None]:
        """Turn what goes wrong in a class into a sentence.

        Args:
            call: index of the call that runs; None for none.

        Raises:
            CallError: it went wrong in this call.
            InputError: it went wrong in none.
        """
        failure = f"{self._title} cannot be run one layer at a time"
        remedy = "correct its config.json, or such models cannot be proved"
        try:
            with foreign(failure, remedy):
                try:
                    yield
                except NoStackError as error:
                    raise self.refusal(str(error)) from error
        except InputError as error:
            if call is None:
                raise
            cause, why = error.__cause__, str(error)
            if cause:
                kind = "" if isinstance(cause, NoStackError) else f"{type(cause).__name__}: "
                why = kind + (reason(cause) if kind else str(cause))
            why = f"{type(self.model).__name__} cannot be asked so ({why})"
            raise CallError(str(error), call, why) from error

    def refusal(self, why: str) -> InputError:
        """The error for a model that is no stack of layers."""
        return InputError(
            f"{self._title} cannot be run one layer at a time ({why}); such models cannot be proved"
        )

    def check_reach(self) -> None:
        """Call it after logits were computed.

        Raises:
            InputError: the model holds weights that text does not reach, of an image encoder, say.
        """
        if self._unreached:
            raise InputError(
                f"{self._title} holds weights that text does not reach ({min(self._unreached)}); "
                "such models cannot be proved"
            )

    def _watch(self) -> dict[str, nn.Module]:
        """Modules outside of the layers that have parameters; they leave once they run."""
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
    """The parameters of a layer, by their names in the model."""
    return {key: f"{name}.{key}" for key, _ in layer.named_parameters()}


def _blocks(model: Any, title: str) -> list[tuple[str, nn.Module]]:
    """Name and module of the embedding, of every decoder layer, and of the output head.

    Raises:
        InputError: it has no such parts.
    """
    named = dict(model.named_modules())
    config = model.config.get_text_config(decoder=True)
    # Some count encoder layers as ``num_hidden_layers``.
    keys = ("decoder_layers", "num_decoder_layers", "num_hidden_layers")
    count = next((getattr(config, key) for key in keys if getattr(config, key, None)), 0)
    stacks = [
        name
        for name, module in named.items()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    name_of = {id(module): name for name, module in named.items()}
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    if not count or not stacks or not all(id(end) in name_of for end in ends):
        raise InputError(
            f"{title} is no stack of layers between an embedding and a head; such models cannot "
            "be proved"
        )
    layers = min(stacks, key=lambda name: name.count("."))  # what else it has is deeper
    embedding, head = ((name_of[id(end)], end) for end in ends)
    return [
        embedding,
        *((f"{layers}.{index}", named[f"{layers}.{index}"]) for index in range(count)),
        head,
    ]
