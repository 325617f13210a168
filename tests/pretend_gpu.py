"""Proofs on a GPU that is only pretended, for machines that have none.

What lies on it is computed on the CPU, but may not meet what does not: torch's own fake tensors,
which go through every operation first, refuse what a real GPU would. Its arithmetic can be wrong in
the ways of ``tests.wrong_arithmetic``. Streams, memory and speed are not pretended. It cannot be
called cuda: a torch for CPUs aborts when such a tensor, fake or not, needs a gradient. To be
imported in a process of its own, as such a device stays for good.
"""

from __future__ import annotations

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import growkit
from growkit.base.errors import InputError
from growkit.engine.device import find_arithmetic_fault
from growkit.engine.lending import Lender
from growkit.proof import logits, mode_results
from tests.files import edit_weights
from tests.models import save_model
from tests.wrong_arithmetic import (
    KINDS,
    PRODUCTS,
    Arithmetic,
    narrow_sums,
    without_float64,
    without_log_softmax,
)

_setup_privateuseone_for_python_backend("pretended")
GPU = torch.device("pretended", 0)
WHERE: Counter[bool] = Counter()
"""Number of products on the GPU, and of those elsewhere."""

WRONG: dict[str, Arithmetic] = {}
"""How the GPU computes, as the only value; empty for the arithmetic of the CPU."""

FAKE = FakeTensorMode()
PLACED: dict[Any, bool] = {}
"""Whether results are on the GPU, by operation, device asked for, and places of the arguments."""


class OnGpu(Tensor):
    """A tensor that says it is on the GPU."""

    values: Tensor

    @staticmethod
    def __new__(cls: type[OnGpu], values: Tensor) -> OnGpu:
        made: OnGpu = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=GPU,
        )
        return made

    def __init__(self, values: Tensor) -> None:
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


class PretendedGpu(TorchDispatchMode):
    """Tensors that are made on the GPU, or moved there, are such tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(func, args, kwargs or {})


def compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation as a GPU would do it, or refuse to."""
    name = func._schema.name
    if name == "aten::record_stream":
        return None
    given: list[Tensor] = []

    def noted(each: Tensor) -> Tensor:
        given.append(each)
        return _values(each)

    plain_args, plain_kwargs = _swapped(args, noted), _swapped(kwargs, noted)
    places = tuple((each.device.type, each.dim() > 0) for each in given)
    asked = func, kwargs.get("device"), places
    if asked not in PLACED:
        PLACED[asked] = _is_placed_on_gpu(func, args, kwargs, {*places})
    on_gpu = PLACED[asked]
    if "device" in kwargs and on_gpu:
        plain_kwargs["device"] = torch.device("cpu")
    if name in PRODUCTS:
        WHERE[on_gpu] += 1
    # GPUs count whole numbers, which CPUs do not.
    if on_gpu and name == "aten::histc" and not plain_args[0].is_floating_point():
        return OnGpu(func(plain_args[0].double(), *plain_args[1:], **plain_kwargs).int())
    compute_wrongly = WRONG.get("arithmetic") if on_gpu else None
    if compute_wrongly:
        found = compute_wrongly(func, plain_args, plain_kwargs)
    else:
        found = func(*plain_args, **plain_kwargs)
    if name == "aten::copy_":
        return given[0]
    if not on_gpu:
        return found
    in_place = {id(_values(each)): each for each in given}
    return _swapped(found, lambda each: in_place.get(id(each), OnGpu(each)))


def _is_placed_on_gpu(func: Any, args: Any, kwargs: Any, places: set[tuple[str, bool]]) -> bool:
    """Whether results are on the GPU: torch's fake tensors know, and refuse to mix devices."""
    name, here = func._schema.name, any(place == GPU.type for place, _ in places)
    if not here and torch.device(kwargs.get("device") or "cpu").type != GPU.type:
        return False
    found: list[str] = []
    try:
        with FAKE:
            made = func(*_swapped(args, _fake), **_swapped(kwargs, _fake))
        _swapped(made, lambda each: found.append(each.device.type) or each)
    except (DataDependentOutputException, DynamicOutputShapeException):  # they know no values
        found.append(GPU.type)
    # Fake tensors do not look at these two.
    takes_indices = name == "aten::index" and isinstance(args[0], OnGpu)
    if name in ("aten::equal", "aten::index") and ("cpu", True) in places and not takes_indices:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device")
    return GPU.type in found


def _fake(each: Tensor) -> Tensor:
    return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device=each.device)


def _values(each: Tensor) -> Tensor:
    return each.values if isinstance(each, OnGpu) else each


def _swapped(nested: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Every tensor in it changed; half of the time would go into torch's own ``tree_map``."""
    if isinstance(nested, Tensor):
        return change(nested)
    if isinstance(nested, tuple | list):
        return type(nested)([_swapped(each, change) for each in nested])
    if isinstance(nested, dict):
        return {key: _swapped(each, change) for key, each in nested.items()}
    return nested


def pretend() -> None:
    """Let the proof take the pretended GPU, and torch make tensors on it from Python's numbers."""
    _device_constructors()  # what ``torch.device`` changes as a context must not be a stand-in
    as_list, tensor = Tensor.tolist, torch.tensor

    def moved(data: Any, *, device: Any = None, **options: Any) -> Tensor:
        made = tensor(data, **options)
        return made if device is None else made.to(device)

    def like(self: Tensor, data: Any, **options: Any) -> Tensor:
        return moved(data, **({"dtype": self.dtype, "device": self.device} | options))

    changes: dict[tuple[Any, str], Callable[..., Any]] = {
        (Tensor, "tolist"): lambda self: as_list(self.cpu()),
        (Tensor, "new_tensor"): like,
        (torch, "tensor"): moved,
        # transformers saves only real tensors
        (mode_results, "run_whole_models"): lambda *args: [],
    }
    for (owner, name), changed in changes.items():
        setattr(owner, name, changed)


def grown(source: Path, target: Path, **sizes: Any) -> Any:
    return growkit.grow(source, target, verify=None, **sizes)


def converted(source: Path, target: Path, **options: Any) -> Any:
    return growkit.convert(source, target, verify=None, **options)


WINDOW = {"sliding_window": 5, "tie_word_embeddings": True}
HALF = {"dtype": torch.bfloat16}  # fake tensors multiply groups of rows in no other
PAIRS: dict[str, tuple[str, dict[str, Any], Callable[..., Any], dict[str, Any]]] = {
    "llama": ("llama", {}, grown, {"hidden": "x2"}),
    "window": ("mistral", WINDOW, grown, {"hidden": "x2"}),
    "grouped": ("diffllama", {}, grown, {"method": "group-diff", "signal_heads": "x4"}),
    "dint": ("diffllama", {}, converted, {"to": "dint"}),
    "shared": ("diffllama", {"head_dim": 8}, converted, {"to": "shared-diff", "rank": 2}),
    "experts": ("llama", HALF, grown, {"method": "upcycle", "experts": 4, "top_k": 2}),
}


LACKING = {"there is no float64": without_float64, "log_softmax is missing": without_log_softmax}
"""Arithmetic that lacks an operation, by what the proof says of it."""


def prove_pairs(folder: Path, count: int) -> dict[str, Any]:
    """Prove pairs, sound and spoiled; what was found.

    Args:
        folder: an empty folder.
        count: number of cases with wrong arithmetic; 0 for all, with all pairs, with an operation
            too few, and with the control.
    """
    results: dict[str, Any] = {}
    pretend()
    for name in () if count else PAIRS:
        kind, options, make, sizes = PAIRS[name]
        source, target = save_model(folder / name, kind, **options), folder / f"{name}-target"
        make(source, target, **sizes)
        # Backward and in training as well, which other tensors take part in.
        more: dict[str, Any] = {"prompts": 1, "length": 10}
        more |= {"trainability": True, "steps": 2} if name == "llama" else {}
        results[f"{name}, sound"] = proved(source, target, **more)
        if name in ("grouped", "llama"):
            with trusted():
                WHERE.clear()
                proved(source, target, **more)
                results[f"{name}, sound"]["products"] = WHERE[True], WHERE[False]
            spoil(target, 1.01)
            results[f"{name}, spoiled"] = proved(source, target, **more)
    if not count:
        with patch.object(Lender, "rows", rows_on_the_cpu):  # the embedding's are left behind
            results["left behind"] = proved(folder / "llama", folder / "llama-target")
        results["sums"] = [*narrow_sums_doubted()]
    results["wrong"] = [*wrongly_proved(folder, count)]
    return results


def rows_on_the_cpu(*arguments: Any, rows: Any = Lender.rows) -> Tensor:
    return rows(*arguments).cpu()


@contextmanager
def trusted() -> Iterator[None]:
    """Believe the device, without a look at the CPU."""
    with (
        patch.object(logits, "find_arithmetic_fault", lambda *args: ""),
        patch.object(logits, "unlike_cpu", lambda strict: ""),
    ):
        yield


def proved(source: Path, target: Path, **options: Any) -> dict[str, Any]:
    with PretendedGpu():
        try:
            found = growkit.verify(source, target, **({"prompts": 1, "length": 12} | options))
        except InputError as error:
            return {"kept": False, "reason": str(error), "fault": None, "modes": [], "device": ""}
    device = next(each["sentence"] for each in found.findings if each["name"] == "device")
    sections = found.sections
    losses = [sections.logits.loss_target, *(sections.training or {}).get("losses_target", [])]
    kept = {key: found[key] for key in ("kept", "reason", "fault")}
    return kept | {"modes": sections.modes.modes, "device": device, "losses": losses}


def spoil(folder: Path, factor: float) -> None:
    with edit_weights(folder) as weights:
        weights["model.layers.1.self_attn.o_proj.weight"] *= factor


def narrow_sums_doubted() -> Iterator[tuple[str, str, bool]]:
    """The dtypes of a product and of its sums, and whether the device is doubted."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kept in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            WRONG["arithmetic"] = narrow_sums(128, dtype, kept)
            with PretendedGpu():
                yield (
                    str(dtype),
                    str(kept),
                    bool(find_arithmetic_fault(GPU, dtype, {(20, 1024, 32)})),
                )
    WRONG.clear()


def wrongly_proved(folder: Path, count: int) -> Iterator[dict[str, Any]]:
    """Prove a sound and a faulty pair with wrong arithmetic, of all kinds or a sample of them."""
    sound, faulty = folder / "sound", folder / "faulty"
    source = save_model(folder / "source", "llama")
    grown(source, sound, hidden="x2")
    (sound / "growkit.json").unlink()  # so that only logits show a fault
    shutil.copytree(source, faulty)
    with edit_weights(faulty) as weights:  # the last bit of a factor that kernels may leave out
        row = weights["model.layers.1.self_attn.o_proj.weight"][3]
        row[-1] = row[-1].nextafter(row.new_tensor(1.0))
    cases = [(kind, strength) for kind, (strengths, _) in KINDS.items() for strength in strengths]
    for kind, strength in random.Random(0).sample(cases, count or len(cases)):
        WRONG["arithmetic"] = KINDS[kind][1](strength)
        with PretendedGpu():
            seen = [
                find_arithmetic_fault(GPU, dtype, {(48, 16, 32)})
                for dtype in (torch.float64, torch.float32)
            ]
        found = {"kind": kind, "doubts": [*map(bool, seen)]}
        for state, target in (("sound", sound), ("faulty", faulty)):
            WRONG["arithmetic"] = KINDS[kind][1](strength)
            found[state] = proved(source, target)
        yield found
    if count:
        WRONG.clear()
        return
    unchecked = {}
    for state, target in (("sound", sound), ("faulty", faulty)):  # the control: no doubt about it
        with trusted():
            WRONG["arithmetic"] = KINDS["lost terms"][1](0.1)
            unchecked[state] = proved(source, target)
    for why, lacking in LACKING.items():
        WRONG["arithmetic"] = lacking
        yield {"why": why, **{each.name: proved(source, each) for each in (sound, faulty)}}
    WRONG.clear()
    yield unchecked
