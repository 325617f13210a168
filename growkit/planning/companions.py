"""Files that grow with a model, such as an optimizer's state.

Each kind of them is a file in the folder ``companions`` of an extra, which defines ``COMPANION``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from growkit.base.lazy import registered
from growkit.model.checkpoint.reading import Checkpoint
from growkit.model.checkpoint.writing import Hashes
from growkit.planning.plan import Lineage
from growkit.planning.updates import Law


class Opened(Protocol):
    """The files of one recipe, and what becomes of them."""

    @property
    def files(self) -> Sequence[Path]:
        """All files that are read."""

    @property
    def bytes(self) -> int:
        """Approximate size of what is written."""

    @property
    def warnings(self) -> Sequence[str]:
        """Warnings for users of the output."""

    def result(self) -> Any:
        """Describe the growth."""

    def write(self, folder: Path, law: Law, hashes: Hashes) -> Any:
        """Write what was grown into the folder of the written target, and describe it."""


@dataclass(frozen=True)
class Companion:
    """A kind of files that grow with a model.

    Attributes:
        key: the key of recipes that names them.
        what: what they are, in messages.
        inputs: from their path, the files and the states that a run must not write to.
        open: reads them: path, source, lineage of the target, and name of the output.
        outputs: patterns of all such files in a model's folder, for ``Folder.names``.
        large: whether they are as large as the weights, and go with these if only the proof stays.
    """

    key: str
    what: str
    inputs: Callable[[Path], tuple[list[Path], list[Path]]]
    open: Callable[[Path, Checkpoint, Lineage, str], Opened]
    outputs: Callable[[], Collection[str]]
    large: bool = False

    def path(self, recipe: object) -> Path | None:
        """The path of the files of a recipe; None if it has none."""
        path = getattr(recipe, self.key)
        return None if path is None else Path(path)


def companions() -> list[Companion]:
    """All kinds of files that grow with a model."""
    return [*registered("companions", "COMPANION").values()]
