"""What a model computes worse in its storage dtype alone, against KL to float64 by transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import growkit
from tests.models import save_model

WIDTH = 128
"""Of the target, whose layers alone are at fault."""

Fault = Callable[[Tensor, float], Tensor]


def noisy(output: Tensor, size: float) -> Tensor:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    return output * (1 + size * noise).to(output)


def rounded(output: Tensor, bits: float) -> Tensor:
    """Without the last bits of each number."""
    mask = -1 << int(bits)
    return (output.contiguous().view(torch.int16) & mask).view(output.dtype)


FAULTS: dict[str, tuple[tuple[float, ...], Fault]] = {
    "factor": ((0.002, 0.01, 0.05), lambda output, by: output * (1 + by)),
    "rounded": ((1, 2, 3), rounded),
    "late rows": (
        (0.01, 0.05, 0.2),
        lambda output, by: torch.cat([output[:, :64], output[:, 64:] * (1 + by)], 1),
    ),
    "noise": ((0.002, 0.01, 0.05), noisy),
}
PLACES = ("LlamaRMSNorm", "LlamaMLP", "LlamaAttention")


def put(monkeypatch: pytest.MonkeyPatch, place: str, fault: str, strength: float) -> None:
    """Change what a class returns, in bfloat16 and in the target alone."""
    change, whole = FAULTS[fault][1], getattr(modeling_llama, place)
    forward = whole.forward

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        first = output[0] if isinstance(output, tuple) else output
        if first.dtype != torch.bfloat16 or first.shape[-1] != WIDTH:
            return output
        first = change(first, strength)
        return (first, *output[1:]) if isinstance(output, tuple) else first

    monkeypatch.setattr(whole, "forward", changed)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rounding")
    sizes = {"hidden_size": WIDTH // 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "vocab_size": 256, "max_position_embeddings": 256}
    source = save_model(folder / "source", "llama", 3, torch.bfloat16, **sizes)
    growkit.grow(source, folder / "out", hidden="x2", verify=False)
    return source, folder / "out"


@torch.no_grad()
def kl(folder: Path) -> float:
    """Of a model in bfloat16 to itself in float64, mean of random tokens."""
    ids = torch.randint(256, (4, 128), generator=torch.Generator().manual_seed(1))
    logs = []
    for dtype in (torch.float64, torch.bfloat16):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        logs.append(model(ids).logits.double().log_softmax(-1))
    return float((logs[0].exp() * (logs[0] - logs[1])).sum(-1).mean())


def logits_of(pair: tuple[Path, Path]) -> tuple[Any, bool]:
    result = growkit.verify(*pair, prompts=4, length=128)
    kept = {finding["name"]: finding["kept"] for finding in result.findings}
    return result.sections.logits, kept["native"]


def test_a_sound_pair_rounds_alike(pair: tuple[Path, Path]) -> None:
    logits, kept = logits_of(pair)
    assert kept
    assert 0.9 < logits.inflation < 1.1
    assert logits.inflation_limit < 1.3
    assert abs(kl(pair[1]) / kl(pair[0]) - 1) < 0.1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strength", range(3))
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", PLACES)
def test_what_only_the_dtype_computes_worse(
    place: str, fault: str, strength: int, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noticed where KL to float64 grows by more than the limit that is stated."""
    source = kl(pair[0])
    put(monkeypatch, place, fault, FAULTS[fault][0][strength])
    ratio = kl(pair[1]) / source
    logits, kept = logits_of(pair)
    assert logits.strict_float64.relative < 1e-12
    if ratio > 1.15 * logits.inflation_limit:
        assert not kept
    if ratio < 1.05:
        assert kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("length", "compared"), [(2, False), (15, False), (16, True)])
def test_few_tokens_show_no_inflation(length: int, compared: bool, pair: tuple[Path, Path]) -> None:
    result = growkit.verify(*pair, prompts=2, length=length)
    assert result["kept"]
    assert (result.sections.logits.inflation is not None) == compared
