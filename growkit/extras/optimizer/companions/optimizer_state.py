"""The optimizer's state as files that grow with a model."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from growkit.base.lazy import members
from growkit.model.checkpoint.reading import Checkpoint
from growkit.planning.companions import Companion, Opened
from growkit.planning.plan import Lineage


def _inputs(path: Path) -> tuple[list[Path], list[Path]]:
    formats: Any = members("growkit.extras.optimizer.formats", "FORMAT").values()
    # Any other folder is refused later. It is not listed, since it may be very large.
    return ([], [path]) if any(format_.holds(path) for format_ in formats) else ([path], [])


def _open(path: Path, source: Checkpoint, lineage: Lineage, output: str) -> Opened:
    from growkit.extras.optimizer.grow_state import Optimizer  # imports torch

    return Optimizer(path, source, lineage)


def _outputs() -> Collection[str]:
    from growkit.extras.optimizer.state import outputs  # imports torch

    return outputs()


COMPANION = Companion("optimizer", "optimizer's state", _inputs, _open, _outputs, large=True)
