"""Whatever a process has chosen for speed, the proof computes with full precision."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import growkit
from growkit.engine import layerwise
from growkit.engine.layerwise import Forward
from growkit.engine.strict import MKL_FUNCTIONS, choose_kernels, reproducible

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
    call = Forward.run_layer

    def noted(self: Forward, *args: Any, **kwargs: Any) -> Any:
        found.add(torch.get_float32_matmul_precision())
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Forward, "run_layer", noted)
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


@pytest.mark.parametrize("chosen", [True, False])
def test_mkl_chooses_its_kernels_before_threads_share_a_call(
    chosen: bool, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each function is first called with a single element."""
    if not chosen:
        monkeypatch.setattr(layerwise, "choose_kernels", lambda: None)
    choose_kernels.cache_clear()
    first: dict[tuple[str, torch.dtype], int] = {}

    class FirstCalls(TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if args and isinstance(args[0], Tensor):
                name = op.overloadpacket.__name__.removesuffix("_")
                first.setdefault((name, args[0].dtype), args[0].numel())
            return op(*args, **(kwargs or {}))

    with FirstCalls():
        assert growkit.verify(*pair, **AMOUNT)["kept"]
    for dtype in (torch.float32, torch.float64):
        assert (first["cos", dtype] == 1) == chosen
        for function in MKL_FUNCTIONS if chosen else ():
            assert first[function.__name__, dtype] == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_the_gpu_two_proofs_are_the_same(pair: tuple[Path, Path]) -> None:
    torch.set_float32_matmul_precision("medium")
    first, second = (growkit.verify(*pair, device="cuda", **AMOUNT) for _ in range(2))
    for each in (first, second):
        assert each.pop("created")  # type: ignore[misc]
        assert each.pop("seconds") > 0  # type: ignore[misc]
    assert first == second
    assert first["kept"]
