"""Models without weights: their headers, as their configs imply them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from growkit.base.errors import InputError
from growkit.base.tensors import ANYWHERE, TORCH_NAMES, Config, TensorInfo, Weights
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.reading import MOST_DIGITS
from growkit.families.family import Family, family_of

if TYPE_CHECKING:
    from torch import Tensor


class Headers(Weights):
    """A model of which there are no numbers: every tensor that its family expects.

    Args:
        family: of the model.
        config: its ``config.json``.
        where: what messages call it.
    """

    def __init__(self, family: Family, config: Config, where: str) -> None:
        self.config = config
        self._family, self._where = family, where

    @cached_property
    def tensors(self) -> Mapping[str, TensorInfo]:  # type: ignore[override]
        """See ``growkit.base.tensors.Weights``; all in the dtype of the config."""
        dtypes = {torch_name: name for name, torch_name in TORCH_NAMES.items()}
        said = self.config.get("dtype") or self.config.get("torch_dtype") or "float32"
        if said not in dtypes:
            raise InputError(
                f"dtype in {self._where} is {said!r}; one of {', '.join(dtypes)} was expected"
            )
        sizes = self._family.sizes(self.config)
        patterns = self._family.patterns(self.config)
        return {
            name: TensorInfo(each.shape(sizes), dtypes[said]) for name, each in patterns.items()
        }

    def where(self, name: str | None = None) -> str:
        """What messages call it."""
        return self._where

    def read(self, name: str, *where: slice | None) -> Tensor:
        """There are no numbers."""
        raise self.lacking(name)

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return ANYWHERE

    def lacking(self, name: str) -> Exception:
        """What is said where a tensor is asked for its numbers."""
        return InputError(
            f"this recipe is planned with the numbers of {name}, and {self._where} lies there "
            "without weights; plan it where they are"
        )


def headers_of(folder: Folder) -> Headers:
    """A model folder without its weights.

    Raises:
        InputError: it has no ``config.json``, or no family knows it.
    """
    where = str(folder.path / "config.json")
    config: Config = folder.json("config.json", MOST_DIGITS)
    return Headers(family_of(config, where), config, where)
