"""Libraries that train, adapt, quantise, export and evaluate, on every variant of the class.

The suite takes those that install in seconds (``tests/test_works_with.py``). Everything, with what
is installed here and its versions: ``python -m tests.works_with [NAME …]``.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import warnings
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from growkit.cli.demo.story import MODEL
from growkit.modeling.configuration_diff_transformer import DiffTransformerConfig
from growkit.modeling.modeling_diff_transformer import DiffTransformerForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 255,
    "eos_token_id": 255,
    "pad_token_id": 255,
    "initializer_range": 0.15,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "DIFF": {},
    "grouped DIFF": {"num_noise_heads": 2},
    "DINT": {"integral": "causal", "gamma": "gated", "head_output_scale": "none"},
    "Shared DIFF": {"qk_projection": "shared", "shared_rank": 4},
    "DIFF V2": {
        "lambda_type": "projected",
        "noise_keys": "shared",
        "head_norm": "none",
        "num_key_value_heads": 2,
        "value_head_dim": 16,
    },
}
INT8 = 0.1
"""Largest difference of logits, relative to the logits (norms), that eight bits may make."""

Model = DiffTransformerForCausalLM
Check = Callable[[Model], str]
CHECKS: dict[str, tuple[str, Check]] = {}
"""By name: the package that it needs, and what it does; it raises, or says what was seen."""


def check(package: str) -> Callable[[Check], Check]:
    """Put a check into ``CHECKS``."""

    def add(function: Check) -> Check:
        CHECKS[function.__name__] = package, function
        return function

    return add


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


def _train(model: Model, trainer: str, rows: list[dict[str, str]], **options: Any) -> str:
    import trl
    from datasets import Dataset

    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        arguments = getattr(trl, f"{trainer}Config")(
            output_dir=folder,
            max_steps=2,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            warmup_steps=0,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            **options.pop("config", {}),
        )
        run = getattr(trl, f"{trainer}Trainer")(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            **options,
        )
        result = run.train()
    assert torch.isfinite(torch.tensor(result.training_loss))
    still = [name for name, each in model.named_parameters() if torch.equal(each, before[name])]
    assert not still, f"not trained: {still}"
    return "two steps, every parameter moves"


@check("trl")
def trl_sft(model: Model) -> str:
    return _train(model, "SFT", [{"text": "The quick brown fox"}] * 8)


@check("trl")
def trl_dpo(model: Model) -> str:
    row = {"prompt": "The quick", "chosen": " brown fox", "rejected": " red herring"}
    return _train(model, "DPO", [row] * 8, ref_model=copy.deepcopy(model))


@check("trl")
def trl_grpo(model: Model) -> str:
    def reward(completions: list[str], **others: Any) -> list[float]:
        return [float(i % 2) for i, _ in enumerate(completions)]

    config = {"num_generations": 2, "max_completion_length": 6}
    return _train(model, "GRPO", [{"prompt": "The quick"}] * 8, reward_funcs=reward, config=config)


@check("peft")
def peft_lora(model: Model) -> str:
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
    return f"{len(adapters)} matrices, all with gradients; merged: {difference:.0e}"


# --- Quantisation ---------------------------------------------------------------------------------


def _near(quantised: nn.Module, expected: Tensor, what: str) -> str:
    difference = apart(logits(quantised), expected)
    assert 0 < difference < INT8, difference
    return f"{what}; logits differ by {difference:.1%}"


@check("torchao")
def torchao_int8(model: Model) -> str:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    expected = logits(model)
    quantize_(model, Int8WeightOnlyConfig())
    return _near(model, expected, "weights in int8")


@check("torch")
def dynamic_int8(model: Model) -> str:
    expected = logits(model)
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    return _near(quantised, expected, "every Linear in int8")


@check("optimum-quanto")
def quanto_int8(model: Model) -> str:
    from optimum.quanto import freeze, qint8, quantize

    expected = logits(model)
    quantize(model, weights=qint8)
    freeze(model)
    return _near(model, expected, "weights in int8")


@check("bitsandbytes")
def bitsandbytes_int8(model: Model) -> str:
    from transformers import BitsAndBytesConfig

    expected = logits(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        quantised = Model.from_pretrained(
            folder,
            quantization_config=BitsAndBytesConfig(load_in_8bit=True),
            device_map={"": "cpu"},
        )
    return _near(quantised, expected, "8 bit")


# --- Running --------------------------------------------------------------------------------------


@check("accelerate")
def accelerate_device_map(model: Model) -> str:
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
    return f"two thirds of {len(parts)} modules on the disk: the same logits"


@check("torch")
def compiled(model: Model) -> str:
    expected = logits(model)
    torch._dynamo.reset()
    difference = apart(logits(torch.compile(model, fullgraph=True)), expected)
    assert difference < 1e-4, difference
    return f"fullgraph=True: {difference:.0e}"


@check("transformers")
def assisted_generation(model: Model) -> str:
    """With the model itself as a draft, and with another, whose guesses are wrong."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for each in other.parameters():
            each += 0.05 * torch.randn_like(each)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 255}
    expected = model.generate(ids(1), **options)
    for draft in (copy.deepcopy(model), other):
        assert torch.equal(model.generate(ids(1), assistant_model=draft, **options), expected)
    return "with itself and with another as a draft: the same tokens"


@check("lm_eval")
def lm_eval_figures(model: Model) -> str:
    """Of the model in a folder and of what growkit grows from it."""
    import growkit

    with tempfile.TemporaryDirectory() as folder:
        source, grown = Path(folder) / "source", Path(folder) / "grown"
        model.save_pretrained(source)
        tokenizer().save_pretrained(source)
        growkit.grow(source, grown, hidden="x2", verify=False)
        first, second = (_evaluated(each) for each in (source, grown))
    difference = max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))
    assert difference < 1e-4, (first, second)
    return f"log-likelihoods of source and grown model: {difference:.0e}"


def _evaluated(folder: Path) -> list[float]:
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    evaluated = HFLM(pretrained=str(folder), device="cpu", batch_size=2, trust_remote_code=True)

    def ask(kind: Any, *arguments: tuple[str, ...]) -> Any:
        asked = [Instance(request_type=kind, doc={}, arguments=each, idx=0) for each in arguments]
        return getattr(evaluated, kind)(asked, disable_tqdm=True)

    pairs = ask("loglikelihood", ("The quick", " brown fox"), ("", "The quick"))
    return [pair[0] for pair in pairs] + ask("loglikelihood_rolling", ("The quick brown fox",))


# --- Export ---------------------------------------------------------------------------------------


@check("onnxscript")
def onnx_export(model: Model) -> str:
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
    return f"two other shapes than the traced one: {worst:.0e}"


def installed(package: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "" if find_spec(package) else None


def main(names: list[str]) -> None:
    """Run checks on all variants, and print a line for each."""
    for name, (package, function) in CHECKS.items():
        if names and name not in names:
            continue
        found = installed(package)
        if found is None:
            print(f"{name}: {package} is not installed")  # noqa: T201
            continue
        for variant in VARIANTS:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    said = function(model_of(variant))
                except Exception as error:  # whatever a library raises is what is to be known
                    said = f"FAILED: {type(error).__name__}: {str(error)[:200]}"
            print(f"{name} ({package} {found}), {variant}: {said}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
