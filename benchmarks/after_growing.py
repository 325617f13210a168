"""How a grown model trains beside its source, with two ways to set the rate.

    python benchmarks/after_growing.py [--steps 60]

The demo model goes on with a new AdamW, on batches of its training text, in strict float64. Beside
it, on the same batches, go models that HyperCloning made twice as wide: with the source's rate for
every tensor, and with a rate for each tensor (``docs/training.md``).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import growkit
from growkit.cli.demo.story import MODEL
from growkit.cli.demo.text import held_out_text, training_text
from growkit.engine.strict import strict_float64

RATE, EPS, DECAY = 1e-4, 1e-8, 0.1
BATCH, LENGTH = 4, 128


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager"
    )


def copies(name: str, before: torch.Size, after: torch.Size) -> tuple[int, int]:
    """How many copies a tensor writes and reads, from how much it grew."""
    if name == "model.norm.weight":  # the embeddings are tied: this one reads for the output head
        return 1, after[0] // before[0]
    if "embed_tokens" in name:
        return after[1] // before[1], 1
    return after[0] // before[0], after[1] // before[1] if len(after) == 2 else 1


def groups(model: PreTrainedModel, source: PreTrainedModel, by_tensor: bool) -> list[dict]:
    """One group of parameters for each tensor."""
    shapes = {name: weight.shape for name, weight in source.named_parameters()}
    made = []
    for name, weight in model.named_parameters():
        written, read = copies(name, shapes[name], weight.shape) if by_tensor else (1, 1)
        decay = DECAY if weight.dim() > 1 else 0.0
        made.append(
            {
                "params": [weight],
                "lr": RATE / read,
                "eps": EPS / written,
                "weight_decay": decay * read,
            }
        )
    return made


def batches(steps: int) -> Iterator[torch.Tensor]:
    data = torch.tensor(list(training_text().encode()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator).tolist()
        yield torch.stack([data[start : start + LENGTH] for start in starts])


def held_out(model: PreTrainedModel) -> float:
    data = torch.tensor(list(held_out_text().encode()))
    windows = data[: 32 * LENGTH].view(-1, LENGTH)
    with torch.no_grad(), strict_float64():
        return float(model(windows, labels=windows).loss)


def train(folder: Path, source: Path, by_tensor: bool, steps: int) -> tuple[list[float], float]:
    model = load(folder)
    optimizer = torch.optim.AdamW(groups(model, load(source), by_tensor))
    losses = []
    for batch in batches(steps):
        with strict_float64():
            loss = model(batch, labels=batch).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, held_out(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    print(f"torch {torch.__version__}, {steps} steps of {BATCH} × {LENGTH} bytes, rate {RATE}")
    expected, end = train(MODEL, MODEL, False, steps)
    print(f"held out before: {held_out(load(MODEL)):.4f}")
    print("\n| model | rate | largest difference of the loss | held out after |")
    print("| --- | --- | --- | --- |")
    print(f"| source | {RATE} | | {end:.4f} |")
    for symmetry in ("keep", "break"):
        with tempfile.TemporaryDirectory() as scratch:
            grown = Path(scratch) / "grown"
            growkit.grow(MODEL, grown, hidden="x2", kv_heads="x1", symmetry=symmetry, verify=False)
            for by_tensor in (True, False):
                losses, end = train(grown, MODEL, by_tensor, steps)
                apart = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
                rate = "by tensor" if by_tensor else "the source's"
                print(f"| grown, {symmetry} | {rate} | {apart:.1e} | {end:.4f} |", flush=True)


if __name__ == "__main__":
    main()
