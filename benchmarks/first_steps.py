"""The first steps after growing, as people take them: bfloat16, AdamW, the schedule going on.

    python benchmarks/first_steps.py OUT.jsonl [--model FOLDER TEXT] [--steps 20] [--orders 3]

A model (the demo's, or another one with a text) is trained, saved with its optimizer, grown to
twice its width with that, and goes on beside its source on the same batches: by the law of updates,
with the source's rate for every tensor, and with a new optimizer. Weights and moments are float32,
everything else runs in bfloat16 (``torch.autocast``).

How much of a difference is noise is measured too: the source goes on once more from weights that
are disturbed by at most half of what bfloat16 tells apart, and once computed in float32. Every
order of batches is a run of its own. Runs are lines, which are added to ``OUT.jsonl``;
``benchmarks/figures.py`` draws them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

import growkit
from growkit.cli.demo.story import MODEL
from growkit.cli.demo.text import held_out_text, training_text
from growkit.training import param_groups

RATE, DECAY, EPS, BETAS = 5e-4, 0.1, 1e-8, (0.9, 0.95)
WARMUP, BEFORE = 10, 40
BATCH, LENGTH, HELD_OUT = 2, 128, 16
NUDGE = 2.0**-9
"""Half of the distance between neighbours in bfloat16, relative to the larger one at least."""

MOST_TEXT = 1_000_000
"""Characters of a text that are used."""

GROWN = {
    "law, keep": ("keep", True, True),
    "law, break": ("break", True, True),
    "source's rate": ("keep", False, True),
    "new optimizer": ("keep", True, False),
    "source's rate, new optimizer": ("keep", False, False),
}
"""The grown model's runs: ``--symmetry``, whether the factors are used, whether the state is."""


class Data:
    """Batches of a text, and windows of its end that are held out."""

    def __init__(self, tokenizer: Any, train: str, held_out: str) -> None:
        def ids(text: str) -> Tensor:
            found = tokenizer(text, add_special_tokens=False, return_tensors="pt", verbose=False)
            return found.input_ids[0]

        self._train = ids(train)
        self.held_out = ids(held_out)[: HELD_OUT * LENGTH].view(-1, LENGTH)

    def batches(self, count: int, order: int) -> Iterator[Tensor]:
        """Windows from anywhere in the text, in an order of their own."""
        generator = torch.Generator().manual_seed(order)
        for _ in range(count):
            starts = torch.randint(len(self._train) - LENGTH, (BATCH,), generator=generator)
            yield torch.stack([self._train[at : at + LENGTH] for at in starts.tolist()])


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def plain_groups(model: Any) -> list[dict[str, Any]]:
    """As transformers' Trainer makes them: matrices decay, vectors do not."""
    parameters = list(model.parameters())
    return [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in parameters if each.dim() == 1], "weight_decay": 0.0},
    ]


def adamw(groups: list[dict[str, Any]], state: Path | None) -> torch.optim.AdamW:
    optimizer = torch.optim.AdamW(groups, lr=RATE, eps=EPS, betas=BETAS)
    if state:
        optimizer.load_state_dict(torch.load(state, weights_only=True))
        for parameter, each in optimizer.state.items():
            assert each["exp_avg"].shape == parameter.shape
    return optimizer


def computed(dtype: torch.dtype) -> Any:
    return torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext()


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Tensor],
    dtype: torch.dtype = torch.bfloat16,
    warmup: int = 0,
) -> list[float]:
    losses = []
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, batch in enumerate(batches):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1.0, (step + 1) / max(1, warmup))
        with computed(dtype):
            loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def held_out(model: Any, data: Data, dtype: torch.dtype = torch.bfloat16) -> float:
    with torch.no_grad(), computed(dtype):
        return float(model(data.held_out, labels=data.held_out).loss)


def nudged(model: Any, seed: int) -> Any:
    """The same weights but for what bfloat16 cannot tell."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(1 + NUDGE * (2 * torch.rand(each.shape, generator=generator) - 1))
    return model


def runs(
    source: Path, data: Data, steps: int, orders: int, scratch: Path
) -> Iterator[dict[str, Any]]:
    """Train a source, grow it, and go on in every way in every order of batches."""
    model = load(source)
    optimizer = adamw(plain_groups(model), None)
    losses = train(model, optimizer, data.batches(BEFORE, order=-1), warmup=WARMUP)
    yield {"run": "before", "order": -1, "losses": losses, "held_out": held_out(model, data)}
    trained = scratch / "trained"
    model.save_pretrained(trained)
    AutoTokenizer.from_pretrained(source).save_pretrained(trained)
    saved = trained / "optimizer.pt"
    torch.save(optimizer.state_dict(), saved)
    grown = {symmetry: scratch / symmetry for symmetry in ("keep", "break")}
    for symmetry, folder in grown.items():
        growkit.grow(trained, folder, hidden="x2", symmetry=symmetry, optimizer=saved, verify=False)

    def run(name: str, order: int, model: Any, optimizer: Any, **options: Any) -> dict[str, Any]:
        losses = train(model, optimizer, data.batches(steps, order), **options)
        return {"run": name, "order": order, "losses": losses, "held_out": held_out(model, data)}

    for order in range(orders):
        for name, dtype in (("source", torch.bfloat16), ("float32", torch.float32)):
            model = load(trained)
            yield run(name, order, model, adamw(plain_groups(model), saved), dtype=dtype)
        model = nudged(load(trained), order)
        yield run("disturbed", order, model, adamw(plain_groups(model), saved))
        for name, (symmetry, by_law, with_state) in GROWN.items():
            folder = grown[symmetry]
            model = load(folder)
            groups = param_groups(
                model,
                folder,
                lr=RATE,
                weight_decay=DECAY,
                eps=EPS,
                decays=lambda _, parameter: parameter.dim() > 1,
            )
            optimizer = adamw(groups, folder / "optimizer.pt" if with_state else None)
            for group in () if by_law else optimizer.param_groups:
                decay = DECAY if group["weight_decay"] else 0.0
                group.update(lr=RATE, weight_decay=decay, eps=EPS)
            yield run(name, order, model, optimizer)


def about() -> dict[str, Any]:
    """On what this runs, and how it trains."""
    return {
        "date": datetime.now(timezone.utc).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "growkit": growkit.__version__,
        "lr": RATE,
        "betas": BETAS,
        "weight_decay": DECAY,
        "eps": EPS,
        "batch": [BATCH, LENGTH],
        "steps_before": BEFORE,
        "warmup": WARMUP,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", nargs=2, type=Path)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--orders", type=int, default=3)
    chosen = parser.parse_args()
    if chosen.model:
        folder, text = chosen.model
        whole = text.read_text("utf-8")[:MOST_TEXT]
        split = len(whole) * 9 // 10
        name, train_text, rest = folder.name, whole[:split], whole[split:]
    else:
        name, folder, train_text, rest = "demo", MODEL, training_text(), held_out_text()
    data = Data(AutoTokenizer.from_pretrained(folder), train_text, rest)
    with chosen.output.open("a", encoding="utf-8") as lines:

        def write(line: dict[str, Any]) -> None:
            lines.write(json.dumps(line) + "\n")
            lines.flush()

        write({"model": name, "about": about()})
        with tempfile.TemporaryDirectory() as scratch:
            for each in runs(folder, data, chosen.steps, chosen.orders, Path(scratch)):
                write({"model": name, **each})
                print(f"{name} {each['run']} {each['order']}: {each['held_out']:.4f}", flush=True)


if __name__ == "__main__":
    main()
