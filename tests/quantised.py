"""``python -m tests.quantised`` writes ``quantised.safetensors``, as libraries quantise weights.

It needs compressed-tensors, bitsandbytes, GPTQModel and AutoAWQ. Every case is one matrix: what is
stored of it, what the library's own code makes of that, and the settings in ``config.json``.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.files import edit_config, edit_weights

FILE = Path(__file__).with_suffix(".safetensors")
ROWS, COLUMNS, GROUP = 32, 64, 32
NAME = "m.weight"
"""Of the matrix in a model."""

Case = tuple[str, dict[str, Any], dict[str, Tensor], Tensor]
"""A name, settings, stored tensors by suffix, and the matrix that they stand for."""


def cases() -> dict[str, tuple[dict[str, Any], dict[str, Tensor], Tensor]]:
    """The cases in the file, by name."""
    found: dict[str, tuple[dict[str, Any], dict[str, Tensor], Tensor]] = {}
    with safe_open(FILE, "pt") as file:
        for case, settings in file.metadata().items():
            names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118
            tensors = {name.partition("/")[2]: file.get_tensor(name) for name in names}
            expected = tensors.pop("expected")
            found[case] = json.loads(settings), tensors, expected
    return found


def quantise(folder: Path) -> Path:
    """Store the projections of a model in FP8, with a scale for each."""
    with edit_weights(folder) as tensors:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[f"{name}_scale_inv"] = torch.tensor(0.5)
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    edit_config(folder, quantization_config={"quant_method": "fp8", "weight_block_size": None})
    return folder


def matrix(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, COLUMNS).to(dtype)


def of_compressed_tensors() -> Iterator[Case]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    group = {"strategy": "group", "group_size": GROUP}
    block = {"strategy": "block", "block_structure": [16, 16]}
    for name, form, how in (
        ("int4", "pack-quantized", {"num_bits": 4, **group}),
        ("int4-zeros", "pack-quantized", {"num_bits": 4, "symmetric": False, **group}),
        ("int8-packed", "pack-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int8", "int-quantized", {"num_bits": 8, "strategy": "channel"}),
        ("int8-zeros", "int-quantized", {"strategy": "channel", "symmetric": False}),
        ("fp8", "float-quantized", {"type": "float", "strategy": "channel"}),
        ("fp8-tensor", "float-quantized", {"type": "float", "strategy": "tensor"}),
        ("fp8-blocks", "float-quantized", {"type": "float", **block}),
    ):
        weight = matrix()
        rows, columns = {"group": (1, GROUP), "block": (16, 16), "tensor": (ROWS, COLUMNS)}.get(
            how["strategy"], (1, COLUMNS)
        )
        blocks = weight.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
        args = QuantizationArgs(**{"type": "int", "symmetric": True, **how})
        scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        compressor = BaseCompressor.get_value_from_registry(form)
        plain = {"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}
        stored = compressor.compress(plain, scheme)
        expected = compressor.decompress(dict(stored), scheme)["weight"]
        groups = {"group_0": {"targets": ["Linear"], "weights": json.loads(args.model_dump_json())}}
        settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
        yield name, settings, {f".{key}": value for key, value in stored.items()}, expected


def of_bitsandbytes() -> Iterator[Case]:
    from bitsandbytes import functional

    for kind, nested in (("nf4", True), ("nf4", False), ("fp4", False)):
        packed, state = functional.quantize_4bit(
            matrix(), quant_type=kind, compress_statistics=nested
        )
        stored = {f".weight.{key}": value for key, value in state.as_dict(packed=True).items()}
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
        expected = functional.dequantize_4bit(packed, state)
        yield f"{kind}{'-nested' * nested}", settings, {".weight": packed, **stored}, expected
    numbers, scales, _ = functional.int8_vectorwise_quant(matrix(torch.float16))
    expected = functional.int8_vectorwise_dequant(numbers, scales).to(torch.bfloat16)
    stored = {".weight": numbers, ".SCB": scales, ".weight_format": torch.tensor(0).byte()}
    yield "llm-int8", {"quant_method": "bitsandbytes", "load_in_8bit": True}, stored, expected


def of_gptq() -> Iterator[Case]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = matrix(torch.float32)
    for bits, shuffled, form in ((4, False, "gptq"), (4, True, "gptq"), (8, True, "gptq_v2")):
        index = torch.arange(COLUMNS) // GROUP
        index = index[torch.randperm(COLUMNS)] if shuffled else index
        most, groups = 2**bits - 1, [linear.weight[:, index == g] for g in index.unique()]
        lowest = torch.stack([each.amin(1) for each in groups], 1)
        scales = (torch.stack([each.amax(1) for each in groups], 1) - lowest) / most
        zeros = (-lowest / scales).round().clamp(1, most)
        sizes = {"in_features": COLUMNS, "out_features": ROWS, "group_size": GROUP}
        packed = TorchLinear(bits=bits, sym=False, desc_act=shuffled, bias=False, **sizes)
        packed.pack(linear, scales.detach(), zeros.detach(), index.int())
        packed.post_init()
        expected = packed.eval().dequantize_weight().T.contiguous()
        less = sum(1 << place for place in range(0, 32, bits)) if form == "gptq" else 0
        stored = {".qweight": packed.qweight, ".qzeros": (packed.qzeros - less).int()}
        stored |= {".scales": packed.scales, ".g_idx": packed.g_idx.int()}
        settings = {"quant_method": "gptq", "bits": bits, "checkpoint_format": form}
        yield f"gptq-{bits}{'-shuffled' * shuffled}", settings, stored, expected


def of_awq() -> Iterator[Case]:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight.data = matrix(torch.float32)
    groups = linear.weight.detach().unflatten(1, (-1, GROUP))
    scales = (groups.amax(-1) - groups.amin(-1)) / 14
    zeros = (-groups.amin(-1) / scales).round()
    packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scales.T, zeros=zeros.T)
    stored = {".qweight": packed.qweight, ".qzeros": packed.qzeros, ".scales": packed.scales}
    expected = dequantize_gemm(*stored.values(), 4, GROUP).T
    yield "awq", {"quant_method": "awq", "bits": 4, "version": "gemm"}, stored, expected


if __name__ == "__main__":
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for library in (of_compressed_tensors, of_bitsandbytes, of_gptq, of_awq):
        for case, settings, stored, expected in library():
            metadata[case] = json.dumps(settings)
            for suffix, tensor in {**stored, "expected": expected}.items():
                tensors[f"{case}/{suffix}"] = tensor.detach().contiguous().clone()
    save_file(tensors, FILE, metadata)
