"""A model to which PEFT itself has applied an adapter; nothing else needs PEFT."""

from __future__ import annotations

import re
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from growkit.adapters.folder import AdapterFolder
from growkit.adapters.tensors import PREFIX
from growkit.base.errors import InputError, foreign
from growkit.base.tensors import ANYWHERE, TensorInfo, cut
from growkit.checkpoint.reading import Checkpoint
from growkit.engine.class_weights import Extended, class_weights
from growkit.engine.oracle import quiet

AROUND = re.compile(r"\.(base_layer|token_adapter|original_module|modules_to_save\.\w+)(?=\.)")
"""Parts of names that PEFT inserts for a model's own parameters."""


class AdaptedWeights(Extended):
    """A checkpoint with an adapter, with the names of its class as PEFT changes them.

    Only known settings of the adapter's config are used. The adapter is entirely in memory.

    Args:
        checkpoint: the model.
        adapter: the adapter.
    """

    def __init__(self, checkpoint: Checkpoint, adapter: AdapterFolder) -> None:
        self.config, self._base = checkpoint.config, class_weights(checkpoint)
        self._adapter = adapter
        self._own: dict[str, Tensor] = {}
        self._names: dict[str, str] = {}
        self.tensors: dict[str, TensorInfo] = {}

    def where(self, name: str | None = None) -> str:
        """See ``Weights``."""
        if name in self._own:
            return str(self._adapter.file.path)
        return self._base.where(self._names[name] if name else None)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return ANYWHERE if name in self._own else self._base.cuts(self._names[name])

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``."""
        if name in self._own:
            return cut(self._own[name], where)
        return self._base.read(self._names[name], *where)

    def extend(self, model: Any) -> None:
        """See ``Extended``.

        Raises:
            InputError: PEFT does not accept the adapter.
        """
        adapter, ties = self._adapter, getattr(model, "all_tied_weights_keys", None) or {}
        loaded = self._loaded(model)
        named = [*model.named_parameters(remove_duplicate=False)]
        own = {id(parameter): loaded[name] for name, parameter in named if name in loaded}
        for name, parameter in named:
            if id(parameter) in own:
                self._own[name] = own[id(parameter)]
                path, _, last = name.rpartition(".")
                self.tensors[name] = TensorInfo.of_torch(parameter.shape, self._own[name].dtype)
                empty = torch.empty(parameter.shape, dtype=model.dtype, device="meta")
                model.get_submodule(path)._parameters[last] = nn.Parameter(empty)
                continue
            plain = AROUND.sub("", name)
            alike = (plain, ties.get(plain), *(one for one, of in ties.items() if of == plain))
            held = next((each for each in alike if each in self._base.tensors), None)
            if held is None:
                raise InputError(
                    f"{adapter.file.path} has nothing for {name} of a {type(model).__name__}; give "
                    "the adapter of this model"
                )
            self._names[name], self.tensors[name] = held, self._base.tensors[held]
        for module in model.modules():  # buffers with which PEFT would unload an adapter
            for key, buffer in module._buffers.items():
                if buffer is not None and buffer.is_meta:
                    module._buffers[key] = torch.zeros_like(buffer, device="cpu")

    def _loaded(self, model: Any) -> dict[str, Tensor]:
        """Apply the adapter to a model without weights; return its tensors by parameter name.

        Raises:
            InputError: PEFT does not accept the adapter.
        """
        adapter, loaded = self._adapter, dict[str, Tensor]()

        def load(state: dict[str, Tensor], **options: Any) -> None:
            loaded.update(state)

        with quiet(), foreign(f"PEFT cannot load {adapter.opened}", "save it again with PEFT"):
            import peft

            settings = {k: v for k, v in adapter.config.items() if k in adapter.method.settings}
            kind: Any = peft.PEFT_TYPE_TO_CONFIG_MAPPING[adapter.config["peft_type"]]
            peft.inject_adapter_in_model(kind(**settings), model, low_cpu_mem_usage=True)
            held = adapter.tensors
            tensors = {n.removeprefix(PREFIX): held.read(n) for n in held.tensors}
            with patch.object(model, "load_state_dict", load):
                peft.set_peft_model_state_dict(model, tensors)
        known = dict(model.named_parameters(remove_duplicate=False))
        for name, tensor in loaded.items():
            if name not in known or known[name].shape != tensor.shape:
                raise InputError(
                    f"{adapter.file.path} has {name} of shape {list(tensor.shape)}, which does not "
                    f"fit a {type(model).__name__}; give the adapter of this model"
                )
        return loaded
