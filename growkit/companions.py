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


def write_documents(manifest: Mapping[str, Any], hashes: Mapping[str, str], folder: Path) -> None:
    """Write the model card and, last of all, the manifest."""
    card = model_card(manifest, tokenizer=(folder / "tokenizer_config.json").is_file())
    (folder / "README.md").write_bytes(card.encode("utf-8", "backslashreplace"))
    write_manifest(folder, manifest, hashes)
