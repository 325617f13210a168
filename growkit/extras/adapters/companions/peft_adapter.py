"""An adapter of PEFT as files that grow with a model."""

from pathlib import Path

from growkit.model.checkpoint.folder import ADAPTER, ADAPTER_FOLDER, ADAPTER_WEIGHTS
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.companions import Companion, Opened
from growkit.planning.plan import Lineage


def _inputs(path: Path) -> tuple[list[Path], list[Path]]:
    return [path, *(path / name for name in (ADAPTER, *ADAPTER_WEIGHTS))], []


def _open(path: Path, source: Checkpoint, lineage: Lineage, output: str) -> Opened:
    from growkit.extras.adapters.grow_adapter import Adapter  # imports torch

    return Adapter(path, source, lineage, output)


COMPANION = Companion("adapter", "adapter", _inputs, _open, outputs=lambda: [ADAPTER_FOLDER])
