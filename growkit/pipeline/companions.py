"""What is written beside the weights: config, the model's code, the model card, the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from growkit.checkpoint.carrying import carry_code
from growkit.checkpoint.made import write_json, write_manifest
from growkit.checkpoint.reading import Checkpoint
from growkit.checkpoint.tensors import Weights
from growkit.families.family import family_of
from growkit.report.card import model_card


def write_config(source: Checkpoint, grown: Weights, folder: Path) -> None:
    """Write the config, and the model's code beside it where transformers has no class for it."""
    family = family_of(grown.config, str(folder))
    write_json(folder / "config.json", family.named(grown.config))
    if family.write_code:
        family.write_code(folder)
    elif grown.config.get("auto_map") and grown.config["auto_map"] == source.config.get("auto_map"):
        carry_code(source.opened, folder)


def without_weights(folder: Path, hashes: Mapping[str, str]) -> dict[str, list[Any]]:
    """Delete the weights of a folder that is proved, and a state of an optimizer beside them.

    Args:
        folder: the folder.
        hashes: the SHA-256 of its files, by name.

    Returns:
        Size in bytes and SHA-256 of every file that was deleted.
    """
    from growkit.optimizer.optimizer import outputs  # takes a second

    checkpoint = Checkpoint(folder)
    paths = {file.relative_to(folder).as_posix() for file in checkpoint.files}
    paths |= {*checkpoint.opened.names("*.index.json", *outputs())}
    found: dict[str, list[Any]] = {}
    for name in sorted(paths):
        found[name] = [(folder / name).stat().st_size, hashes[name]]
        (folder / name).unlink()
    return found


def write_documents(manifest: Mapping[str, Any], hashes: Mapping[str, str], folder: Path) -> None:
    """Write the model card and, last of all, the manifest."""
    card = model_card(manifest, tokenizer=(folder / "tokenizer_config.json").is_file())
    (folder / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
    write_manifest(folder, manifest, hashes)
