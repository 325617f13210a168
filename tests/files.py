"""Files of folders, read and changed by tests."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import load_file, save_file

from growkit.cli.demo import MODEL

CASES = Path(__file__).with_name("cases")


@cache
def tables(file: str) -> dict[str, Any]:
    return yaml.safe_load((CASES / f"{file}.yaml").read_text("utf-8"))


def listed(file: str, section: str) -> Any:
    """A table of ``tests/cases/FILE.yaml``."""
    return deepcopy(tables(file)[section])


def edit_config(folder: Path, file: str = "config.json", **changes: Any) -> None:
    with edit_json(folder / file) as config:
        config |= changes


@contextmanager
def edit_json(file: Path) -> Iterator[dict[str, Any]]:
    """The contents of a JSON file, to be changed in place; empty if there is none."""
    content = json.loads(file.read_text()) if file.exists() else {}
    yield content
    file.write_text(json.dumps(content))


@contextmanager
def edit_weights(
    folder: Path, name: str = "model.safetensors"
) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of a file, to be changed in place."""
    found = load_file(folder / name)
    yield found
    contiguous = {tensor: each.contiguous() for tensor, each in found.items()}
    save_file(contiguous, folder / name, {"format": "pt"})


def flip_bit(file: Path) -> None:
    """Change the last bit of a file."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    """Everything in a folder, to see that nothing changed."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def with_tokenizer(folder: Path) -> Path:
    """The folder with the demo's tokenizer: 256 bytes."""
    for file in MODEL.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


class Called:
    """A pickle of this calls a function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call
