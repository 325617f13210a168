"""A model of transformers as a stack of layers, each of which has its weights only while it runs.

The model is built without weights. Whoever runs a part of it borrows the weights of that part. The
layers can be replaced for a while, so that the rest of the class's own ``forward`` runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from growkit.base.errors import InputError, foreign, reason
from growkit.checkpoint.tensors import Weights
from growkit.engine.building import blocks, empty_model, persistent_buffers
from growkit.engine.calls import Call, CallError
from growkit.engine.lending import Lender
from growkit.engine.passing import Handed, NoStackError


class Stack:
    """An embedding, decoder layers and an output head, without their weights.

    Args:
        weights: the checkpoint.
        dtype: what its weights are cast to.
        device: where it runs.
        attention: transformers' attention implementation; None for the class's own choice.

    Attributes:
        model: the whole.
        device: where it runs.
        embedding: its name in the model, and the module.
        layers: the same of every layer, in order.
        head: the same of the output head.
        stored: from the name of a parameter to that of the tensor it is stored as.
        lender: of the weights.
        handed: how layers hand on what they compute, as far as that has been seen.

    Raises:
        InputError: transformers does not know the model, or the tensors do not fit the class.
    """

    def __init__(
        self, weights: Weights, dtype: torch.dtype, device: torch.device, attention: str | None
    ) -> None:
        self.model, self._weights, self.stored = empty_model(weights, dtype, attention)
        self.lender = Lender(self._weights, self.stored, dtype, device)
        self.device = device
        self.embedding, *self.layers, self.head = blocks(self.model, weights.where())
        self._unreached = self._watch()
        self._load_buffers()
        self.handed = Handed()

    @property
    def names(self) -> list[str]:
        """The embedding, every layer, and the output head."""
        return [name for name, _ in (self.embedding, *self.layers, self.head)]

    def stores(self, name: str) -> bool:
        """Whether a tensor of this name is in the files, not tied to another."""
        return self.stored(name) == name and name in self._weights.tensors

    def outside(self) -> dict[str, nn.Parameter]:
        """Parameters that belong to no layer, nor to the embedding, but for the head's matrix."""
        within = tuple(f"{name}." for name, _ in (self.embedding, *self.layers))
        head = f"{self.head[0]}.weight"
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
        """All before the layers, with the rows of the embedding that calls use alone: these."""
        name, _ = self.embedding
        used = torch.cat([call.ids.cpu() for call in calls]).unique()
        with self._embedding_of(self.lender.rows(f"{name}.weight", used), used) as rows:
            yield rows

    @contextmanager
    def behind(self) -> Iterator[None]:
        """All behind the layers, with their weights; the head's matrix has no gradient."""
        name, head = self.head
        matrix = self.lender.lent(head, {"weight": f"{name}.weight"}, head=True)
        matrix_of = dict(self.embedding[1].named_parameters())["weight"]
        nothing = self.lender.cast(torch.zeros(1, matrix_of.shape[1]))
        with self._embedding_of(nothing, torch.zeros(1, dtype=torch.long)), matrix:
            dict(head.named_parameters())["weight"].requires_grad = False
            yield

    @contextmanager
    def _embedding_of(self, rows: Tensor, used: Tensor) -> Iterator[nn.Parameter]:
        """All around the layers, and an embedding that has only the rows of these ids, in order."""
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
    def standing_aside(self, stand_in: Callable[..., Any]) -> Iterator[None]:
        """The model with another function in the place of every layer's ``forward``."""
        for _, layer in self.layers:
            layer.forward = stand_in
        try:
            yield
        finally:
            for _, layer in self.layers:
                del layer.forward

    @contextmanager
    def guarded(self, call: int | None = None) -> Iterator[None]:
        """What goes wrong in a class becomes a sentence.

        Args:
            call: index of the call that runs; None for none.

        Raises:
            CallError: it went wrong in this call.
            InputError: it went wrong in none.
        """
        try:
            with foreign(
                f"{type(self.model).__name__} of {self._weights.where()} cannot be run one layer "
                "at a time",
                "correct its config.json, or such models cannot be proved",
            ):
                try:
                    yield
                except NoStackError as error:
                    raise self.refusal(str(error)) from error
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

    def refusal(self, why: str) -> InputError:
        """What is said of a model that is no stack of layers."""
        return InputError(
            f"{type(self.model).__name__} of {self._weights.where()} cannot be run one layer at a "
            f"time ({why}); such models cannot be proved"
        )

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
                    module._buffers[key] = self.lender.buffer(name, buffer.dtype)
                else:
                    module._buffers[key] = buffer.to(self.device)


def _parameters(name: str, layer: nn.Module) -> dict[str, str]:
    """The parameters of a layer, by their names in the model."""
    return {key: f"{name}.{key}" for key, _ in layer.named_parameters()}
