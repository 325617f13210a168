"""What torch computes: nothing narrower in strict float64, whatever a process has chosen."""

import subprocess
import sys
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import growkit
from growkit.engine import layerwise
from growkit.engine.device import CPU, choose_device, reproducible, settings
from growkit.engine.forward import Forward
from growkit.engine.strict import MKL_FUNCTIONS, choose_kernels, strict_float64
from tests.architectures import config_of
from tests.models import KINDS, Make

NARROW = {torch.float32, torch.float16, torch.bfloat16}


class Seen(TorchDispatchMode):
    """Records the names of all operations, and the float dtypes of what they compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op._overloadpacket.__name__)
        output = op(*args, **(kwargs or {}))
        for value in output if isinstance(output, tuple | list) else (output,):
            if isinstance(value, Tensor) and value.is_floating_point():
                self.dtypes.add(value.dtype)
        return output


@pytest.mark.parametrize("strictly", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_narrower_is_computed(kind: str, strictly: bool) -> None:
    """Without strict float64, models in float64 compute in float32 as well: the control."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with strict_float64() if strictly else nullcontext():
        config = CONFIG_MAPPING[kind](vocab_size=11, **sizes, **heads)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        with Seen() as seen, torch.no_grad():
            model(torch.arange(5)[None])
    assert bool(seen.dtypes & NARROW) is not strictly
    assert torch.float64 in seen.dtypes


def test_the_default_dtype_comes_back() -> None:
    with pytest.raises(RuntimeError, match="inside"), strict_float64():
        raise RuntimeError("inside")
    assert torch.get_default_dtype() is torch.float32
    assert torch.zeros(1).float().dtype is torch.float32


@pytest.mark.parametrize("sequential", ["", "1"])
def test_stored_bits_are_read_as_they_were_stored(
    sequential: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers reads in its own threads, or in this one, where the mode is."""
    monkeypatch.setenv("HF_DEACTIVATE_ASYNC_LOAD", sequential)
    model = AutoModelForCausalLM.from_config(config_of("llama"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    with strict_float64():
        found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).state_dict()
    assert all(each.bfloat16().equal(model.state_dict()[name]) for name, each in found.items())


CUDA, DEVICE = torch.device("cuda"), choose_device("auto")
AMOUNT = {"prompts": 2, "length": 16}


@pytest.fixture(autouse=True)
def as_it_was() -> Any:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


@pytest.fixture
def pair(make: Make, tmp_path: Path) -> tuple[Path, Path]:
    source = make("llama")
    growkit.grow(source, tmp_path / "out", hidden="x2", verify=None)
    return source, tmp_path / "out"


def test_every_product_is_a_full_one(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[str] = set()
    call = Forward.run_layer

    def noted(self: Forward, *args: Any, **kwargs: Any) -> Any:
        found.add(torch.backends.cuda.matmul.fp32_precision)
        found.add(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Forward, "run_layer", noted)
    torch.set_float32_matmul_precision("medium")
    assert growkit.verify(*pair, **AMOUNT)["kept"]
    assert found == {"ieee"}
    assert torch.get_float32_matmul_precision() == "medium"


@pytest.mark.parametrize("strictly", [False, True])
def test_what_was_chosen_comes_back(strictly: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    torch.use_deterministic_algorithms(strictly)
    torch.set_float32_matmul_precision("high")
    before = [getattr(owner, name) for owner, name, _ in settings()]
    with suppress(KeyError), reproducible(CUDA):
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert {getattr(owner, name) for owner, name, _ in settings()} == {"ieee", False, True}
        raise KeyError
    assert torch.are_deterministic_algorithms_enabled() == strictly
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.get_float32_matmul_precision() == "high"
    assert [getattr(owner, name) for owner, name, _ in settings()] == before
    with reproducible(CPU):
        assert torch.are_deterministic_algorithms_enabled() == strictly


def test_operations_without_a_deterministic_form_are_named() -> None:
    place = torch.zeros(1, dtype=torch.long)
    with reproducible(CUDA) as varying:
        for _ in range(2):
            torch.zeros(2).put_(place, torch.ones(1))
    assert varying == ["put_"]
    with reproducible(CUDA) as varying:
        torch.zeros(2).add_(1)
    assert varying == []


@pytest.mark.sampled(0)
def test_settings_of_either_kind_are_taken() -> None:
    """torch refuses to name the precision of a process that chose it in the new way."""
    code = "torch.backends.fp32_precision = 'tf32'"
    code += "\nwith reproducible(CPU): print(torch.backends.cuda.matmul.fp32_precision)"
    code += "\nprint(torch.backends.cuda.matmul.fp32_precision)"
    start = "import torch\nfrom growkit.engine.device import CPU, reproducible\n"
    done = subprocess.run(
        [sys.executable, "-c", start + code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["ieee", "tf32"]


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
@pytest.mark.skipif(DEVICE == CPU, reason="needs an accelerator")
def test_on_a_device_two_proofs_are_the_same(pair: tuple[Path, Path]) -> None:
    torch.set_float32_matmul_precision("medium")
    first, second = (growkit.verify(*pair, device=DEVICE.type, **AMOUNT) for _ in range(2))
    for each in (first, second):
        assert each.pop("created")  # type: ignore[misc]
        assert each.pop("seconds") > 0  # type: ignore[misc]
    assert first == second
    assert first["kept"]
