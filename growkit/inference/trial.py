"""Whether a description of a family is true: small models of its class, grown and compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from growkit.checkpoint.scratch import temporary
from growkit.engine.oracle import CPU, load, quiet
from growkit.engine.strict import strict_float64
from growkit.errors import InputError, reason
from growkit.inference.classes import ModelClass
from growkit.results.result import Result
from growkit.surgery import grow

EXACT = 1e-10
"""Of logits, relative to their scale: far above rounding in float64, far below any fault."""

GROWTHS: Mapping[str, Mapping[str, Any]] = {
    "hidden": {"hidden": "x2"},
    "ffn": {"ffn": "x2"},
    "heads": {"heads": "x2"},
    "kv_heads": {"heads": "x2", "kv_heads": "x2"},
    "layers": {"method": "depth", "layers": "x2"},
}
"""What is tried, by the axis that it is about."""


class Trial(Result):
    """A growth of a small random model of a class.

    Attributes:
        axis: what it is about.
        options: of the growth.
        error: the largest difference of its logits in strict float64, relative to their scale; null
            where there is no such model.
        why: why there is none; null where there is one.
    """

    axis: str
    options: dict[str, str]
    error: float | None
    why: str | None

    @property
    def exact(self) -> bool:
        """Whether the larger model computes the same."""
        return self["error"] is not None and self["error"] < EXACT

    @property
    def wrong(self) -> bool:
        """Whether it computes something else."""
        return self["error"] is not None and not self.exact


class Trials:
    """A small random model of a class, on which descriptions are tried."""

    def __init__(self, asked: ModelClass) -> None:
        self._asked = asked

    def all(self, description: Mapping[str, Any]) -> list[Trial]:
        """Every growth of an axis that the description has."""
        with temporary("inference") as folder:
            source = self._save(folder / "source")
            ids = torch.arange(12)[None] * 5 % self._asked.small["vocab"]
            expected = _logits(source, ids)
            axes = {*description["sizes"].values()}
            return [
                self._one(axis, description, source, folder / axis, ids, expected)
                for axis in GROWTHS
                if axis in axes
            ]

    def _save(self, folder: Path) -> Path:
        model: Any = self._asked.small_model()
        with quiet():
            model.save_pretrained(folder)
        return folder

    def _one(
        self,
        axis: str,
        description: Mapping[str, Any],
        source: Path,
        out: Path,
        ids: torch.Tensor,
        expected: torch.Tensor,
    ) -> Trial:
        options = dict(GROWTHS[axis])
        shown = {name: value for name, value in options.items() if name != "method"}
        try:
            grow(source, out, family=description, verify=False, **options)
            found = _logits(out, ids)
        except InputError as error:
            return Trial(axis=axis, options=shown, error=None, why=reason(error))
        scale = expected.square().mean().sqrt()
        error = float((expected - found).abs().max() / scale)
        return Trial(axis=axis, options=shown, error=error, why=None)


def _logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with strict_float64(), quiet(), torch.no_grad():
        model: Any = load(folder, torch.float64, CPU, "eager")
        logits = model(ids, use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def stored_names(asked: ModelClass) -> set[str]:
    """Names of the tensors in files of a small model."""
    from safetensors import safe_open

    with temporary("inference") as folder:
        model: Any = asked.small_model()
        with quiet():
            model.save_pretrained(folder)
        index = folder / "model.safetensors.index.json"
        assert not index.exists(), json.loads(index.read_text())
        with safe_open(folder / "model.safetensors", "pt") as file:
            return set(file.keys())
