"""What people give in the place of a model folder, and what would make one of it."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

HUB_NAME = re.compile(r"(?!.*(--|\.\.|\.git$))\w([\w.-]*\w)?/\w([\w.-]*\w)?", re.ASCII)
"""What the Hub accepts as the name of a model."""

HUB_ADDRESS = re.compile(
    r"(?:https?:/+)?(?:huggingface\.co|hf\.co)/([^/]+/[^/]+)(?:/.*)?", re.ASCII
)

STORE = re.compile(r"[a-z][a-z0-9+.-]+:/+[^/].*")
"""``s3://BUCKET/MODEL`` and the like; a path has one slash where two were written."""

COPY_CONFIG = "the weights are there, so copy it from the model that they are of"

GGUF = "is GGUF, for llama.cpp; give the folder of the model that it was made from"
SAVE = "save the model with transformers' save_pretrained, and give that folder"

SINGLE = ("model.safetensors", "pytorch_model.bin")
"""Files with all weights, in the order in which they are preferred; each before its own index."""

LIST = ".metadata"
"""What says where the weights lie in a folder of torch.distributed.checkpoint."""

IN_THE_PLACE_OF_WEIGHTS = (
    ("adapter_config.json", "is that of an adapter; merge it into its base model first"),
    ("*.gguf", GGUF),
    (
        "model-*-of-*.safetensors",
        "is there, but no model.safetensors.index.json; copy that as well",
    ),
    (
        "pytorch_model-*-of-*.bin",
        "is there, but no pytorch_model.bin.index.json; copy that as well",
    ),
    ("consolidated*", f"is the maker's own format; {SAVE}"),
    ("*.safetensors", "is not a name that transformers looks for; call it model.safetensors"),
    ("zero_to_fp32.py", "is DeepSpeed's; run it, and give the folder that it makes"),
    ("*.distcp", "is part of a distributed checkpoint, but has no .metadata; copy that as well"),
    (
        "pytorch_model_fsdp*",
        "is a distributed checkpoint; copy config.json into it, and give that folder",
    ),
    ("*.h5", f"is of TensorFlow; {SAVE}"),
    ("*.msgpack", f"is of Flax; {SAVE}"),
    ("*.onnx", f"is ONNX; {SAVE}"),
    ("*.pth", f"is not read; {SAVE}"),
    ("*.pt", f"is not read; {SAVE}"),
    ("*.bin", f"is not read; {SAVE}"),
    ("*.ckpt", f"is not read; {SAVE}"),
    (
        "growkit.json",
        "is a proof whose weights were not kept; growkit.load makes them of the source while it "
        "loads, and growkit run writes them again",
    ),
)
"""Names, and what their files are and ask for; the first that fits is told."""


def address_in(path: Path | str) -> str:
    """An address with the slashes that a path has lost."""
    slashes = "///" if re.match("(file|local):/", str(path)) else "//"
    return re.sub(r"^([a-z][a-z0-9+.-]+):/+", rf"\1:{slashes}", str(path))


def index_of(single: str) -> str:
    """The file that says which shard holds what, where no single file holds all weights."""
    return f"{single}.index.json"


def no_folder(path: Path) -> str:
    """Why something that is no folder is no model, and what to give."""
    text = str(path)
    address = HUB_ADDRESS.fullmatch(text)
    name = address[1] if address else text
    if address or (HUB_NAME.fullmatch(name) and not os.path.lexists(path.parent)):
        local = name.partition("/")[2]
        return (
            f"{text} is not a folder; if it is a model on the Hub, download it first "
            f"(hf download {name} --local-dir {local}), and give that folder"
        )
    if STORE.fullmatch(text):
        return (
            f"{address_in(text)} is not a folder on this machine; download the model, and give "
            "that folder"
        )
    if os.path.isfile(path) and path.suffix == ".gguf":
        return f"{text} {GGUF}"
    if os.path.lexists(path.parent / "config.json") and os.path.lexists(path):
        return f"{text} is not a folder; give the one that it lies in, {path.parent}"
    return f"{text} is not a folder; give a model folder with config.json and weights"


def no_model(folder: Path) -> str:
    """Why a folder without ``config.json`` is no model, and what to give."""
    missing = f"{folder / 'config.json'} does not exist"
    weights = (*SINGLE, *map(index_of, SINGLE), LIST)
    if any(os.path.lexists(folder / name) for name in weights):
        adapter = os.path.lexists(folder / "adapter_config.json")
        return f"{missing}; {told_of_weights(folder) if adapter else COPY_CONFIG}"
    inside = [file.parent for file in (*folder.glob("*/config.json"), *_snapshots(folder))]
    if inside:
        return f"{missing}; give one of the folders in there, such as {max(inside, key=_steps)}"
    return f"{missing}; {told_of_weights(folder) or f'is {folder} a model folder?'}"


def told_of_weights(folder: Path) -> str | None:
    """What a folder holds in the place of weights that are read, and what to do about that."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return None
    return next(
        (
            f"{name} {told}"
            for pattern, told in IN_THE_PLACE_OF_WEIGHTS
            for name in names
            if fnmatchcase(name, pattern)
        ),
        None,
    )


def _snapshots(folder: Path) -> list[Path]:
    """Of a model in the cache of the Hub."""
    return [*folder.glob("snapshots/*/config.json")]


def _steps(folder: Path) -> tuple[int, str]:
    """By how many steps a checkpoint was trained, as its name says."""
    found = re.search(r"(\d{1,18})$", folder.name)
    return (int(found[1]) if found else -1, folder.name)
