"""Memory of growth from a quantised folder, against the dense folder that it stands for.

    python benchmarks/quantised_memory.py [--formats FP8 GPTQ] [--proved FP8] [--folder FOLDER]

Random models (2 layers, 0.1 billion parameters at hidden 2048): any bits are numbers in these
formats. `growkit convert --to dense-weights` makes the dense folder; both are grown by two in
hidden without the proof, and some also with one prompt of 64 tokens. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

from measuring import apart, growkit, head, machine, row

FORMATS = ("MXFP4", "FP8", "int4", "GPTQ", "NF4")
SETTINGS: dict[str, dict[str, Any]] = {
    "MXFP4": {"quant_method": "mxfp4"},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "int4": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 4}}},
    },
    "GPTQ": {"quant_method": "gptq", "bits": 4},
    "NF4": {"quant_method": "bitsandbytes", "load_in_4bit": True},
}


def stored(kind: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Random tensors of a format, by suffix, for a matrix [rows, columns] or stacked experts."""
    import torch

    def bits(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.randint(0, 120, (*sizes, dtype.itemsize), dtype=torch.uint8).view(dtype)[
            ..., 0
        ]

    def scales(*sizes: int) -> torch.Tensor:
        return torch.rand(sizes).add(0.5).mul(0.002)

    rows, columns = shape[-2:]
    if kind == "MXFP4":
        experts, inputs, outputs = shape
        blocks = experts, outputs, inputs // 32
        exponents = torch.randint(116, 119, blocks, dtype=torch.uint8)
        return {"_blocks": bits(*blocks, 16, dtype=torch.uint8), "_scales": exponents}
    if kind == "FP8":
        numbers = bits(rows, columns, dtype=torch.float8_e4m3fn)
        return {".weight": numbers, ".weight_scale_inv": scales(rows // 128, columns // 128)}
    if kind == "int4":
        size = torch.tensor([rows, columns])
        packed = {".weight_packed": bits(rows, columns // 8), ".weight_shape": size}
        return {**packed, ".weight_scale": scales(rows, columns // 128).bfloat16()}
    if kind == "GPTQ":
        packed = {".qweight": bits(columns // 8, rows), ".qzeros": bits(columns // 128, rows // 8)}
        groups = torch.arange(columns).int() // 128
        return {**packed, ".scales": scales(columns // 128, rows).half(), ".g_idx": groups}
    state = {"shape": [rows, columns], "blocksize": 64, "dtype": "bfloat16"}
    name = ".weight.quant_state.bitsandbytes__nf4"
    return {
        ".weight": bits(rows * columns // 2, 1, dtype=torch.uint8),
        ".weight.absmax": scales(rows * columns // 64),
        ".weight.quant_map": torch.linspace(-1, 1, 16),
        name: torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }


def make_source(folder: Path, kind: str, hidden: int) -> None:
    """Write a random quantised model."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig

    sizes = {"vocab_size": 4096, "hidden_size": hidden, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "dtype": "bfloat16"}
    config: Any = LlamaConfig(**sizes, intermediate_size=11 * hidden // 4)
    if kind == "MXFP4":
        config = GptOssConfig(
            **sizes, intermediate_size=hidden // 2, head_dim=hidden // 16, num_local_experts=8
        )
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    tensors: dict[str, torch.Tensor] = {}
    for name, empty in model.named_parameters():
        whole = kind == "MXFP4"
        if empty.dim() == (3 if whole else 2) and not any(n in name for n in ("embed", "lm_head")):
            of_format = stored(kind, tuple(empty.shape))
            tensors |= {name.removesuffix(".weight") + key: each for key, each in of_format.items()}
        else:
            norm = empty.dim() == 1 and name.endswith("weight")
            tensors[name] = torch.randn(empty.shape).mul(0.02).add(norm).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = config.to_dict() | {"quantization_config": SETTINGS[kind]}
    (folder / "config.json").write_text(json.dumps(content, default=str))


def measured(kind: str, hidden: int, scratch: Path, proved: bool) -> str:
    """The row of a format."""
    source, dense, out = (scratch / name for name in ("source", "dense", "out"))
    source.mkdir()
    apart(make_source, source, kind, hidden)
    growkit("convert", source, dense, "--to", "dense-weights", "--no-verify")
    cells: list[object] = [kind]
    cells += [
        f"{(each / 'model.safetensors').stat().st_size / 1e9:.2f}" for each in (source, dense)
    ]
    proof = ["--prompts", 1, "--length", 64]
    for options in (["--no-verify"], proof)[: 1 + proved]:
        runs = []
        for folder in (source, dense):
            runs.append(growkit("grow", folder, out, "--hidden", "x2", *options))
            shutil.rmtree(out)
        cells += [f"{each.peak / 1e9:.2f}" for each in runs]
        cells += [" → ".join(f"{each.seconds:.0f}" for each in reversed(runs))]
    return row(*cells, *["–"] * (9 - len(cells)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--formats", nargs="*", default=FORMATS)
    parser.add_argument("--proved", nargs="*", default=["MXFP4", "FP8"])
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--folder", type=Path, help="where the models are made")
    given = parser.parse_args()
    print(machine("transformers"), end="\n\n")
    peaks = ("peak of quantised, GB", "of dense, GB", "s, dense → quantised")
    proved = ("with proof, quantised, GB", "dense, GB", "s, dense → quantised")
    print(head("format", "folder, GB", "dense, GB", *peaks, *proved))
    for kind in given.formats:
        with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
            print(measured(kind, given.hidden, Path(scratch), kind in given.proved), flush=True)


if __name__ == "__main__":
    main()
