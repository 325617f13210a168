"""Whether a description of a family is true: small models of its class, grown and compared."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from growkit.base.errors import InputError, reason
from growkit.checkpoint.scratch import temporary
from growkit.engine.oracle import CPU, load_model, quiet
from growkit.engine.strict import strict_float64
from growkit.inference.classes import ModelClass, not_inferred
from growkit.pipeline.running import grow
from growkit.results.inspection import Trial

GROWTHS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "hidden": ({"hidden": "x2"}, {"hidden": "x4"}),
    "ffn": ({"ffn": "x2"},),
    "heads": ({"heads": "x2"},),
    "kv_heads": ({"heads": "x2", "kv_heads": "x2"},),
    "layers": ({"method": "depth", "layers": "x2"},),
}
"""What is tried, by the axis that it is about, until there is such a model."""


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
        trial = None
        for options in GROWTHS[axis]:
            shown = {name: value for name, value in options.items() if name != "method"}
            try:
                grow(source, out, family=description, verify=False, **options)
                found = _logits(out, ids)
            except InputError as error:
                trial = trial or Trial(axis=axis, options=shown, error=None, why=reason(error))
                continue
            scale = expected.square().mean().sqrt()
            distance = float((expected - found).abs().max() / scale)
            return Trial(axis=axis, options=shown, error=distance, why=None)
        assert trial is not None
        return trial


def _logits(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    with strict_float64(), quiet(), torch.no_grad():
        model: Any = load_model(folder, torch.float64, CPU, "eager")
        logits = model(ids, use_cache=False).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def stored_names(asked: ModelClass) -> dict[str, str]:
    """What files call the tensors of a class, by their names there: they hold the same numbers.

    Raises:
        InputError: files have a tensor that the class has not.
    """
    from safetensors.torch import load_file

    with temporary("inference") as folder:
        model: Any = asked.small_model()
        with quiet():
            model.save_pretrained(folder)
        stored = load_file(folder / "model.safetensors")
    here = model.state_dict()
    found = {}
    for name, tensor in stored.items():
        same = (each for each, of in here.items() if each not in stored and tensor.equal(of))
        own = name if name in here else next(same, None)
        if own is None:
            raise not_inferred(
                f"files of a {asked.name} model have tensor {name}, which its class makes others of"
            )
        found[own] = name
    return found
