"""Pieces of an MLP (``--granularity``) in training: rows of routers that stay equal, and that part.

``python benchmarks/pieces.py TEXT MODEL``
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import growkit
from growkit.training import param_groups

WINDOW, HELD_OUT, BATCH, STEPS, PIECES = 128, 32, 8, 100, 4


def windows_of(text: Path, model: str) -> torch.Tensor:
    """Windows of a text in random order, [windows, tokens]."""
    content = text.read_text(errors="ignore")[:400_000]
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(content).input_ids)
    windows = ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]


def loss_after(windows: torch.Tensor, source: str, seed: int, pieces: int, together: bool) -> float:
    """Loss on held-out windows after some steps, in nats per token."""
    with TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        sizes = {"experts": 4 * pieces, "top_k": 2 * pieces, "granularity": pieces}
        growkit.grow(source, out, method="upcycle", seed=seed, verify=False, **sizes)
        model = AutoModelForCausalLM.from_pretrained(out, experts_implementation="eager")
        model.float()
        groups = param_groups(model, out, lr=5e-4, weight_decay=0.1)
    for parameter in model.parameters():
        if not together and parameter._backward_hooks:
            parameter._backward_hooks.clear()
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(seed)
    held_out, seen = windows[:HELD_OUT], windows[HELD_OUT:]
    for _ in range(STEPS):
        batch = seen[torch.randint(len(seen), (BATCH,), generator=generator)]
        model(batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return float(model(held_out, labels=held_out).loss)


def main(text: str, source: str) -> None:
    windows = windows_of(Path(text), source)
    print("| seed | whole experts | pieces, together | pieces, parted |\n| --- | --- | --- | --- |")
    for seed in range(3):
        ways = ((1, True), (PIECES, True), (PIECES, False))
        losses = [loss_after(windows, source, seed, *way) for way in ways]
        print(f"| {seed} |", " | ".join(f"{loss:.4f}" for loss in losses), "|", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
