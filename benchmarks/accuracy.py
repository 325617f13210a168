"""Accuracy of growing real models: strict float64 and storage dtype, several dtypes and factors.

    python benchmarks/accuracy.py TEXT MODEL [MODEL …]

Every model is cast to float32, bfloat16 and float16, grown by 2, 3 and 4 in both symmetries, proved
on the text, and thrown away. Prints the largest relative errors as Markdown; ends with an error if
any proof fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import growkit
from growkit.base.settings import Settings

FACTORS = (2, 3, 4)


def cast(model: Path, folder: Path, dtype: torch.dtype) -> Path:
    """A copy of a single-file model in another dtype."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    save_file({k: t.to(dtype) for k, t in load_file(file).items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(source: Path, target: Path, symmetry: str, text: str) -> str:
    """One row of the table: errors for every factor, and the losses."""
    strict, native, loss = [], [], 0.0
    for factor in FACTORS:
        result = growkit.grow(
            source,
            target,
            hidden=f"x{factor}",
            symmetry="keep" if symmetry == "keep" else "break",
            overwrite=True,
            verify=Settings(text=text, prompts=64, length=512),
        )
        verdict = result["verification"]
        if verdict is None or not verdict["kept"]:
            sys.exit(f"{source.name}, factor {factor}, {symmetry}: not preserved")
        strict.append(f"{verdict['strict_float64']['relative']:.1e}")
        native.append(f"{verdict['native']['relative']:.1e}")
        loss = verdict["loss_target"] or 0.0
    return f"{', '.join(strict)} | {', '.join(native)} | {loss:.4f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("models", nargs="+", type=Path)
    arguments = parser.parse_args()
    print("| model | dtype | symmetry | strict float64 | storage dtype | loss |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in arguments.models:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with tempfile.TemporaryDirectory() as scratch:
                source = cast(model, Path(scratch) / model.name, dtype)
                for symmetry in ("break", "keep"):
                    row = measure(source, Path(scratch) / "grown", symmetry, arguments.text)
                    name = str(dtype).removeprefix("torch.")
                    print(f"| {model.name} | {name} | {symmetry} | {row} |", flush=True)


if __name__ == "__main__":
    main()
