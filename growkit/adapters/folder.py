"""The folder of an adapter, as PEFT saves it."""

from __future__ import annotations

from copy import copy
from pathlib import Path

from growkit.adapters.methods import method_of
from growkit.base.errors import InputError
from growkit.base.tensors import Config, Weights
from growkit.checkpoint.folder import ADAPTER, ADAPTER_WEIGHTS, Folder
from growkit.checkpoint.weight_file import open_weights


class AdapterFolder:
    """An adapter as PEFT saves it.

    Attributes:
        opened: the folder.
        file: the file with its tensors.
        files: all files that growkit reads.
        tensors: its tensors.
        config: the contents of ``adapter_config.json``.
        method: its method.

    Raises:
        InputError: there is no adapter, it is damaged, or growkit does not grow its method.
    """

    def __init__(self, path: Path) -> None:
        self.opened = Folder(path)
        if not self.opened.has(ADAPTER):
            raise InputError(f"{path} has no {ADAPTER}; give the folder of a PEFT adapter")
        self.config: Config = self.opened.json(ADAPTER)
        self.method = method_of(self.config, str(path / ADAPTER))
        name = next((each for each in ADAPTER_WEIGHTS if self.opened.find(each)), None)
        if name is None:
            raise InputError(f"{path} has no {ADAPTER_WEIGHTS[0]}; copy the adapter again")
        self.file = open_weights(self.opened, name)
        self.files = [self.opened.path / ADAPTER, *self.file.paths]
        self.tensors: Weights = self.file

    def renamed(self, config: Config, tensors: Weights) -> AdapterFolder:
        """The same adapter with other names of modules, in a config and in tensors."""
        found = copy(self)
        found.config, found.tensors = config, tensors
        return found
