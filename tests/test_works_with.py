"""Libraries that train, adapt, quantise, place and export, on every variant of the class.

The suite takes a sample; ``pytest --all`` runs all.
"""

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growkit.cli.demo import MODEL
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.extras.differential.modeling.modeling_diff_transformer import (
    DiffTransformerForCausalLM,
)
from tests.files import listed

SIZES: dict[str, Any] = listed("works_with", "sizes")
VARIANTS: dict[str, dict[str, Any]] = listed("works_with", "variants")
INT8 = 0.1
"""Largest difference of logits, relative to the logits (norms), that eight bits may make."""

Model = DiffTransformerForCausalLM


def model_of(variant: str) -> Model:
    """A small random model in float32, in which a gate of the integral is open."""
    torch.manual_seed(0)
    model = Model(DiffTransformerConfig(**{**SIZES, **VARIANTS[variant]}))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if each.dim() == 1:
                each += 0.2 * torch.randn_like(each)
            assert bool(each.any()), name
    return model.eval()


def ids(rows: int = 2, columns: int = 12) -> Tensor:
    return torch.randint(0, 255, (rows, columns), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    found: Tensor = model(input_ids=ids(), use_cache=False).logits
    assert bool(found.isfinite().all())
    return found.float()


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(MODEL)
    found.pad_token = found.eos_token
    return found


# --- Training -------------------------------------------------------------------------------------


def _train(model: Model, trainer: str, rows: list[dict[str, str]], **options: Any) -> None:
    import trl
    from datasets import Dataset

    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        settings = listed("works_with", "training") | options.pop("config", {})
        options["args"] = getattr(trl, f"{trainer}Config")(output_dir=folder, **settings)
        data = {"train_dataset": Dataset.from_list(rows), "processing_class": tokenizer()}
        result = getattr(trl, f"{trainer}Trainer")(model=model, **data, **options).train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    still = [name for name, each in model.named_parameters() if torch.equal(each, before[name])]
    assert not still, f"not trained: {still}"


def trl_sft(model: Model) -> None:
    _train(model, "SFT", [{"text": "The quick brown fox"}] * 8)


def trl_dpo(model: Model) -> None:
    row = {"prompt": "The quick", "chosen": " brown fox", "rejected": " red herring"}
    _train(model, "DPO", [row] * 8, ref_model=copy.deepcopy(model))


def trl_grpo(model: Model) -> None:
    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(i % 2) for i, _ in enumerate(completions)]

    config = {"num_generations": 2, "max_completion_length": 6}
    _train(model, "GRPO", [{"prompt": "The quick"}] * 8, reward_funcs=reward, config=config)


def peft_lora(model: Model) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    adapters = [each for name, each in adapted.named_parameters() if "lora_" in name]
    torch.manual_seed(0)
    with torch.no_grad():
        for each in adapters:
            each.normal_(0, 0.1)
    adapted(input_ids=ids(), labels=ids()).loss.backward()
    assert all(each.grad is not None and bool(each.grad.any()) for each in adapters)
    before = logits(adapted)
    difference = apart(logits(adapted.merge_and_unload()), before)
    assert difference < 1e-5, difference


# --- Quantisation ---------------------------------------------------------------------------------


def _near(quantised: nn.Module, expected: Tensor) -> None:
    difference = apart(logits(quantised), expected)
    assert 0 < difference < INT8, difference


def torchao_int8(model: Model) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    expected = logits(model)
    quantize_(model, Int8WeightOnlyConfig())
    _near(model, expected)


def dynamic_int8(model: Model) -> None:
    expected = logits(model)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    _near(quantised, expected)


# --- Running --------------------------------------------------------------------------------------


def accelerate_device_map(model: Model) -> None:
    """Modules and parameters of their own are placed one by one."""
    from accelerate import dispatch_model

    expected = logits(model)
    leaves = [name for name, each in model.named_modules() if not each._modules]
    parts = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] not in leaves]
    parts += [name for name in leaves if model.get_submodule(name)._parameters]
    places: dict[str, Any] = {name: "cpu" if i % 3 == 0 else "disk" for i, name in enumerate(parts)}
    with tempfile.TemporaryDirectory() as folder:
        placed = dispatch_model(
            model, device_map=places, main_device="cpu", offload_dir=folder, force_hooks=True
        )
        assert torch.equal(logits(placed), expected)


# --- Export ---------------------------------------------------------------------------------------


def onnx_export(model: Model) -> None:
    """With a dynamic number of texts and tokens; run by onnxruntime on others than were traced."""
    import onnxruntime

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Tensor) -> Tensor:
            found: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            return found

    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder) / "model.onnx")
        shapes = {"input_ids": {0: torch.export.Dim("batch"), 1: torch.export.Dim("rows")}}
        torch.onnx.export(
            Logits().eval(), (ids(2, 9),), file, dynamo=True, dynamic_shapes=shapes, verbose=False
        )
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        worst = 0.0
        for rows, columns in ((1, 5), (3, 140)):
            (found,) = session.run(None, {"input_ids": ids(rows, columns).numpy()})
            with torch.no_grad():
                expected = model(ids(rows, columns), use_cache=False).logits
            worst = max(worst, apart(torch.from_numpy(found), expected))
    assert worst < 1e-4, worst


CHECKS: dict[str, Callable[[Model], None]] = {
    check.__name__: check
    for check in (
        *(trl_sft, trl_dpo, trl_grpo, peft_lora, torchao_int8, dynamic_int8),
        *(accelerate_device_map, onnx_export),
    )
}
pytestmark = pytest.mark.filterwarnings("ignore")  # of the code that is tried


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_works_with(name: str, variant: str) -> None:
    CHECKS[name](model_of(variant))
