"""How many tokens a proof needs: faults that logits alone must find, on few tokens and on many.

    python benchmarks/proof_tokens.py [--models 2] [--kinds llama diffllama mixtral]

Random Llamas, DiffLlamas and Mixtrals with three layers are grown by two. Then one tensor after
another is spoiled in one of three ways: all of it is multiplied by 1.001, or one row is, or one
number is changed by its last bit. The manifest is taken away, so that no weight is held against the
source's. A fault is found if logits in strict float64 differ by more than their limit; how many
times the limit they differ by, at least, says what there is to spare. Prints Markdown.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from measuring import head, row
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

import growkit
from growkit.base.settings import FEW, LONG, MANY, SHORT

AMOUNTS = ((1, 12), (FEW, SHORT), (MANY, LONG))
"""Prompts, and tokens in each: what the mutation study takes, and both defaults."""

SIZES = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
KINDS = {"llama": {}, "diffllama": {"num_key_value_heads": 4}, "mixtral": {"num_local_experts": 4}}


def whole(tensor: Tensor) -> None:
    tensor *= 1.001


def a_row(tensor: Tensor) -> None:
    tensor[0] *= 1.001


def a_last_bit(tensor: Tensor) -> None:
    number = tensor.view(-1)[tensor.abs().argmax() :][:1]
    number.copy_(torch.nextafter(number, number * 2))


FAULTS: dict[str, Callable[[Tensor], None]] = {
    "a tensor × 1.001": whole,
    "a row × 1.001": a_row,
    "a number's last bit": a_last_bit,
}


def make_source(folder: Path, kind: str, seed: int) -> None:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]})
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        scale = 1 / math.sqrt(parameter.shape[-1]) if parameter.dim() > 1 else 0.2
        torch.nn.init.normal_(parameter.data, mean=float(parameter.dim() == 1), std=scale)
    model.save_pretrained(folder)


def spoiled(target: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Targets with a fault, one after the other in the same folder: the fault, and the tensor."""
    sound = load_file(target / "model.safetensors")
    for name in sorted(sound):
        if "layers.0" in name or "layers.2" in name:
            continue
        for fault, spoil in FAULTS.items():
            tensors = {key: tensor.clone() for key, tensor in sound.items()}
            spoil(tensors[name])
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            yield fault, name


def margins(
    kinds: list[str], models: int, scratch: Path
) -> Iterator[tuple[str, str, tuple[int, int], float]]:
    """The fault, whether its tensor is the embedding, the amount, and by how much it shows."""
    for seed in range(models):
        for kind in kinds:
            source, target = scratch / f"{kind}-{seed}", scratch / f"{kind}-{seed}-grown"
            make_source(source, kind, seed)
            growkit.grow(source, target, hidden="x2", verify=False)
            bad = shutil.copytree(target, scratch / f"{kind}-{seed}-spoiled")
            (bad / "growkit.json").unlink()
            for fault, name in spoiled(target, bad):
                place = "embedding" if "embed_tokens" in name else "elsewhere"
                for prompts, length in AMOUNTS:
                    result = growkit.verify(source, bad, prompts=prompts, length=length)
                    strict = result.sections.logits.strict_float64
                    assert strict["relative"] is not None
                    assert strict["tolerance"] is not None
                    yield fault, place, (prompts, length), strict["relative"] / strict["tolerance"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=2, help="of every kind")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # tiny models: a second thread only costs
    logging.disable_progress_bar()
    found: dict[tuple[str, str], dict[tuple[int, int], list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for fault, place, amount, margin in margins(
            arguments.kinds, arguments.models, Path(scratch)
        ):
            found.setdefault((fault, place), {}).setdefault(amount, []).append(margin)
    amounts = [f"{prompts} × {length} tokens" for prompts, length in AMOUNTS]
    print(head("fault", "in the", *amounts))
    for (fault, place), by_amount in found.items():
        cells = []
        for values in (by_amount[amount] for amount in AMOUNTS):
            caught = [value for value in values if not value <= 1]
            least = f", {min(caught):.2g} to {statistics.median(caught):.2g}" if caught else ""
            cells.append(f"{len(caught)} of {len(values)}{least}")
        print(row(fault, place, *cells))


if __name__ == "__main__":
    main()
