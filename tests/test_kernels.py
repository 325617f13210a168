"""Triton's kernels against the papers and exact integrals in float64.

On a GPU they run as they are; elsewhere Triton's interpreter runs them, in a process of its own.
"""

import copy
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from growkit.engine.strict import strict_float64
from growkit.extras.differential.modeling import differential_attention, modeling_diff_transformer
from tests import papers
from tests.files import listed
from tests.models import distance
from tests.test_modeling import CACHED, VARIANTS, build, left_padded, tokens
from tests.test_series import GAMMA, SCALING, Case, drawn

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
GPU = torch.cuda.is_available() and not INTERPRETED
PLACES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="the interpreter's")),
    pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="no GPU")]),
]


pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
SMALL = {"head_dim": 8, "value_head_dim": 16, "num_hidden_layers": 1}
MODELS = {
    name: options | SMALL | ({"lambda_init": (0.3,)} if "lambda_init" in options else {})
    for name, options in VARIANTS.items()
}


@pytest.mark.skipif(INTERPRETED or find_spec("triton") is None, reason="needs Triton")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """What fused attention returns, which a CPU lacks, in float64 in between."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.double().repeat_interleave(group, 1) for each in (key, value))
    scores = query.double() @ key.mT * scaling
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    return (scores.softmax(-1) @ value).float(), scores.logsumexp(-1).float()


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    log_sums: Tensor,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """As fused attention does it, from its output and the logarithms of its sums."""
    heads = key.shape[1]
    gradient, query, output = (each.double() for each in (gradient, query, output))
    key, value = (
        each.double().repeat_interleave(query.shape[1] // heads, 1) for each in (key, value)
    )
    scores = query @ key.mT * scaling - log_sums.double()[..., None]
    maps = scores.exp().tril()
    product = (gradient * output).sum(-1, keepdim=True)
    d_scores = maps * (gradient @ value.mT - product) * scaling
    d_key, d_value = d_scores.mT @ query, maps.mT @ gradient
    d_key, d_value = (each.unflatten(1, (heads, -1)).sum(2) for each in (d_key, d_value))
    return (d_scores @ key).float(), d_key.float(), d_value.float()


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which the kernels run."""
    pytest.importorskip("triton")
    from growkit.extras.differential.modeling import triton_kernels

    if request.param == "cpu":
        from triton.runtime import interpreter

        patch_tensor = interpreter._patch_lang_tensor

        def patch(tensor: Any, scope: Any) -> None:
            patch_tensor(tensor, scope)  # its numbers are arrays, which numpy no longer takes
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        monkeypatch.setattr(triton_kernels, "attend", attend)
        monkeypatch.setattr(triton_kernels, "attend_backward", attend_backward)
        for module in (differential_attention, modeling_diff_transformer):
            monkeypatch.setattr(module, "runs_kernels", lambda x: x.dtype != torch.float64)
    return str(request.param)


@pytest.mark.parametrize(("shape", "rows", "tolerance"), listed("kernels", "tiles"))
def test_tiles(
    shape: str, rows: int, tolerance: float | None, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out is within the reported bound; the rest of the error is float32's."""
    from growkit.extras.differential.modeling import triton_kernels

    if tolerance is not None:
        monkeypatch.setattr(triton_kernels, "TOLERANCE", tolerance)
    drawn_case = drawn(rows, shape, rows)
    group = drawn_case.query.shape[1] // drawn_case.key.shape[1]
    few = slice(2 if shape == "padded" else 1), slice(group), slice(1)
    parts = drawn_case.query[few[:2]], drawn_case.key[few[::2]], drawn_case.value[few[::2]]
    case = Case(*parts, drawn_case.real)
    given = [each.to(place).requires_grad_() for each in (case.query, case.key, case.value)]
    real = None if case.real is None else case.real.to(place)
    inputs = triton_kernels.HeadInputs(*given, group, SCALING, real)
    attended = triton_kernels.attention_of_heads(inputs, integral=True)
    heads = (attended.signal + GAMMA.to(place) * attended.integral).cpu()
    seen = torch.ones(rows, 1) if case.real is None else case.real[:, None, :, None]
    off = ((heads.double() - case.exact) * seen).abs().amax(-1)
    bound = attended.errors.cpu().repeat_interleave(triton_kernels.TILE, 2)[..., :rows]
    largest = 2 * case.value.abs().max()
    assert (off <= GAMMA.squeeze() * bound * largest + 2e-6).all()
    assert bool(bound.any()) == (tolerance == 1e4)
    if tolerance is None:
        assert (case.errors(heads) < case.quarter).all()

    gradient = torch.randn(heads.shape, generator=torch.Generator().manual_seed(0)) * seen
    found = torch.autograd.grad(heads, given, gradient)
    expected, plain = (case.gradients(gradient, dtype) for dtype in (torch.float64, torch.float32))
    rounding = max(distance(a, b.double()) for a, b in zip(expected, plain, strict=True))
    limit = 1e-4 if tolerance == 1e4 else 4 * rounding
    for mine, theirs in zip(found, expected, strict=True):
        assert distance(theirs, mine.cpu().double()) < limit


@pytest.mark.parametrize("variant", MODELS)
def test_models(variant: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and gradients of a model, also checkpointed, against the papers in float64."""
    from growkit.extras.differential.modeling import triton_kernels

    monkeypatch.setattr(triton_kernels, "TILE", 16)
    exact = build(**MODELS[variant])
    model, ids = copy.deepcopy(exact).float().to(place).train(), tokens((2, 20))
    model.activation_checkpointing_enable()
    logits = model(ids.to(place), use_cache=False).logits
    with strict_float64():
        state = {name: p.requires_grad_() for name, p in exact.named_parameters()}
        expected = papers.logits(state, exact.config, ids)
        # The gradient of λ is one sum, which may cancel with another one.
        generator = torch.Generator().manual_seed(0)
        gradient = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
        gradients = torch.autograd.grad(expected, [*state.values()], gradient)
        theirs = dict(zip(state, gradients, strict=True))
    assert distance(expected.detach(), logits.detach().cpu().double()) < 1e-5
    logits.backward(gradient.float().to(place))
    for name, parameter in model.named_parameters():
        assert distance(theirs[name], parameter.grad.cpu().double()) < 1e-4, name

    mask = left_padded((2, 20), 0, 9)
    with torch.no_grad():
        found = model(ids.to(place), attention_mask=mask.to(place), use_cache=False).logits
        text = papers.logits(state, exact.config, ids[1:, 9:])
    assert distance(text, found[1:, 9:].cpu().double()) < 1e-5


@pytest.mark.parametrize("variant", CACHED)
def test_rows_after_a_cache(variant: str, place: str) -> None:
    """Token by token, with padding on the left, against the papers in float64."""
    exact, ids, mask = build(**MODELS[variant]), tokens((2, 9)), left_padded((2, 9), 0, 2)
    model = copy.deepcopy(exact).float().to(place)
    with torch.no_grad():
        expected = papers.logits(exact.state_dict(), exact.config, ids, mask)
        ids, mask = ids.to(place), mask.to(place)
        output = model(ids[:, :5], attention_mask=mask[:, :5], use_cache=True)
        found = [output.logits]
        for n in range(5, 9):
            given = {"attention_mask": mask[:, : n + 1], "cache": output.cache}
            output = model(ids[:, [n]], **given, use_cache=True)
            found.append(output.logits)
    assert distance(expected, torch.cat(found, 1).cpu().double(), mask.cpu()) < 1e-5


@pytest.mark.skipif(INTERPRETED or GPU, reason="where no kernels run")
def test_on_a_cpu_nothing_is_imported() -> None:
    model, ids = build(integral="causal").float(), tokens((1, 9))
    model(ids, labels=ids).loss.backward()
    assert "growkit.extras.differential.modeling.triton_kernels" not in sys.modules


def test_nobody_has_to_install_triton() -> None:
    """transformers refuses code that imports packages which are missing."""
    from transformers.dynamic_module_utils import get_imports, get_relative_import_files

    folder = Path(differential_attention.__file__).parent
    for file in folder.glob("[!_]*.py"):
        assert "triton" not in get_imports(file)
    files = get_relative_import_files(folder / "modeling_diff_transformer.py")
    assert str(folder / "triton_kernels.py") in files


@pytest.mark.parametrize("variant", ["diff", "v2", "gated dint"])
def test_graphs(variant: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph without breaks, whose logits and gradients are those without a graph."""
    from growkit.extras.differential.modeling import triton_kernels

    monkeypatch.setattr(triton_kernels, "TILE", 16)
    model, ids = build(**MODELS[variant]).float().to(place).train(), tokens((2, 20)).to(place)
    expected = model(ids, labels=ids, use_cache=False).loss
    expected.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss = compiled(ids, labels=ids, use_cache=False).loss
    loss.backward()
    assert abs(loss - expected) < 1e-5 * abs(expected)
    for name, parameter in model.named_parameters():
        assert distance(gradients[name], parameter.grad) < 1e-4, name
