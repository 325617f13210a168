"""Whatever a process has chosen for speed, the proof computes with full precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import growkit
from growkit.proof.layerwise import Layerwise
from growkit.proof.reproducible import reproducible

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AMOUNT = {"prompts": 2, "length": 16}


@pytest.fixture(autouse=True)
def as_it_was() -> Any:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def pair(make: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    source = make("llama")
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    return source, tmp_path / "out"


def test_every_product_is_a_full_one(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()
    call = Layerwise._call

    def noted(self: Layerwise, *args: Any) -> Any:
        found.add(torch.get_float32_matmul_precision())
        return call(self, *args)

    monkeypatch.setattr(Layerwise, "_call", noted)
    torch.set_float32_matmul_precision("medium")
    assert growkit.verify(*pair, **AMOUNT)["kept"]
    assert found == {"highest"}
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("strictly", [False, True])
def test_what_was_chosen_comes_back(strictly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    torch.use_deterministic_algorithms(strictly)
    torch.set_float32_matmul_precision("high")
    with suppress(KeyError), reproducible(CUDA):
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert torch.get_float32_matmul_precision() == "highest"
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == strictly
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    with reproducible(CPU):
        assert torch.are_deterministic_algorithms_enabled() == strictly


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_two_proofs_are_the_same(pair: tuple[Path, Path]) -> None:
    torch.set_float32_matmul_precision("medium")
    first, second = (growkit.verify(*pair, device="cuda", **AMOUNT) for _ in range(2))
    assert first == second
    assert first["kept"]
