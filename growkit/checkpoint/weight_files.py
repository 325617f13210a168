"""Which files of a folder hold the weights: those that ``from_pretrained`` of transformers loads.

Where there are none of these, those of torch.distributed.checkpoint, which it does not look for.

What else it would follow, growkit does not read; a folder with it is refused, since a model would
be proved that nobody gets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from growkit.base.errors import InputError
from growkit.checkpoint.distributed_list import LIST
from growkit.checkpoint.elsewhere import SINGLE, index_of, told_of_weights
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.tensors import Config

FOLLOWED = {
    "configuration_files": "other configs",
    "transformers_weights": "other files of weights",
    "fusion_config": "other modules",
}
"""Keys of a config by which transformers loads something else than the folder's name says."""

DISTRIBUTED = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors$")
"""Beside one of these, transformers takes every file of safetensors for a part of the model."""

ADAPTER = "adapter_config.json"


def weight_files(folder: Folder, config: Config) -> tuple[list[str], dict[str, str]]:
    """The names of the files with the weights, in order; of DCP, that of its list of entries.

    Returns:
        The names, and where the index (if there is one) says that each tensor is.

    Raises:
        InputError: there are none, one is missing, or transformers would load something else.
    """
    check_config(str(folder), config)
    check_names(str(folder), os.listdir(folder.path))
    for single in SINGLE:
        if folder.find(single):  # transformers as well prefers it to an index
            return [single], {}
        index = index_of(single)
        if folder.find(index):
            ending = single.rpartition(".")[2]
            listed = listed_in(str(folder.path / index), folder.json(index), ending)
            names = sorted(set(listed.values()))
            for name in names:
                if not folder.find(name):
                    raise InputError(
                        f"shard {folder.path / name} is missing, {index} lists it; "
                        "copy it into the folder"
                    )
            return names, listed
    if folder.find(LIST):
        return [LIST], {}
    expected = "model.safetensors, model.safetensors.index.json or pytorch_model.bin was expected"
    raise InputError(f"{folder} has no weights; {told_of_weights(folder.path) or expected}")


def check_config(where: str, config: Config) -> None:
    """Refuse a config by which transformers loads something else than the weights of the model.

    Args:
        where: what the model is called.
        config: its ``config.json``.

    Raises:
        InputError: names the key.
    """
    for key, what in FOLLOWED.items():
        if config.get(key) is not None:
            raise InputError(
                f"config.json in {where} has {key}, by which transformers loads {what}; "
                "load the model with transformers, save it again and take that"
            )


def check_names(where: str, names: Iterable[str]) -> None:
    """Refuse a model beside whose weights there is something that transformers takes for more.

    Args:
        where: what the model is called.
        names: of its files.

    Raises:
        InputError: names the file.
    """
    for name in names:
        if name == ADAPTER:
            raise InputError(
                f"{where} has {ADAPTER}, and transformers would add its adapter to the weights; "
                "merge the adapter, or move its files away"
            )
        if DISTRIBUTED.match(name):
            raise InputError(
                f"{where} has {name}, a part of a distributed checkpoint, and transformers would "
                "load that instead of the other weights; consolidate it, or move it away"
            )


def listed_in(where: str, index: Mapping[str, Any], ending: str) -> dict[str, str]:
    """In which file each tensor is, as an index says.

    Args:
        where: what the index is called.
        index: its contents.
        ending: of files of weights, without the dot.

    Raises:
        InputError: it says nothing, or names what is no file of weights beside it.
    """
    weight_map: Any = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{where} has no weight_map; copy the index again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not re.fullmatch(rf"[^/\\\0]+\.{ending}", name):
            raise InputError(
                f"{where} lists tensor {tensor} in {name!r}; the name of a "
                f".{ending} file beside it was expected, copy the index again"
            )
    return weight_map
