"""How copies part in the first hundred steps after growing, by what is done to part them.

    python benchmarks/symmetry.py OUT.jsonl [--steps 100] [--orders 2]

The demo model is trained, saved with its optimizer, and grown with that to twice its width, in
several ways. All go on by the law of updates (``growkit.training.param_groups``) on the same
batches, in float32. On the way, of the neurons of all MLPs on held-out text, each averaged over the
layers:

- how far the two copies of a neuron are apart: the root mean square of the difference of what they
  say, relative to that of what they say;
- their effective rank: exp of the entropy of the singular values, as shares of their sum
  (Roy and Vetterli, 2007). Copies that say the same add nothing to it.

Runs are lines, which are added to ``OUT.jsonl``; ``benchmarks/figures.py`` draws them.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from first_steps import (
    BEFORE,
    DECAY,
    EPS,
    RATE,
    WARMUP,
    Data,
    about,
    adamw,
    held_out,
    load,
    plain_groups,
    train,
)
from torch import Tensor
from transformers import AutoTokenizer

import growkit
from growkit.cli.demo.story import MODEL
from growkit.cli.demo.text import held_out_text, training_text
from growkit.training import param_groups, rewarming

REWARMED = 20
LOOKS = (0, 1, 2, 5, 10, 20, 50, 100)
"""After how many steps the copies are looked at."""

WAYS: dict[str, dict[str, str]] = {
    "break": {"symmetry": "break"},
    "uneven": {"symmetry": "uneven"},
    "keep": {"symmetry": "keep"},
    "keep, --groups part": {"symmetry": "keep", "groups": "part"},
    "keep, --moments reset": {"symmetry": "keep", "moments": "reset"},
    "keep, --moments reset, re-warmed": {"symmetry": "keep", "moments": "reset"},
}


def neurons(model: Any, windows: Tensor) -> list[Tensor]:
    """What the neurons of every MLP say, [tokens, neurons]."""
    found: list[Tensor] = []
    hooks = [
        layer.mlp.down_proj.register_forward_pre_hook(
            lambda _, inputs: found.append(inputs[0].flatten(0, -2).double())
        )
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(windows)
    for hook in hooks:
        hook.remove()
    return found


def effective_rank(said: Tensor) -> float:
    values = torch.linalg.svdvals(said)
    shares = values[values > 0] / values.sum()
    return float(torch.exp(-(shares * shares.log()).sum()))


def apart(said: Tensor) -> float:
    """How far the two halves are apart, which are copies in blocks."""
    one, other = said.chunk(2, dim=1)
    return float((one - other).square().mean().sqrt() / said.square().mean().sqrt())


def look(model: Any, data: Data, grown: bool) -> dict[str, float]:
    said = neurons(model, data.held_out[:4])
    found = {"rank": sum(effective_rank(each) for each in said) / len(said)}
    if grown:
        found["apart"] = sum(apart(each) for each in said) / len(said)
    return {**found, "held_out": held_out(model, data, torch.float32)}


def followed(
    model: Any, optimizer: Any, data: Data, steps: int, order: int, warmup: int, grown: bool
) -> list[dict[str, float]]:
    """Train, and look at the copies on the way."""
    looks = [{"step": 0, **look(model, data, grown)}]
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, rewarming(warmup) if warmup else lambda _: 1.0
    )
    for step, batch in enumerate(data.batches(steps, order), 1):
        train(model, optimizer, iter([batch]), dtype=torch.float32)
        schedule.step()
        if step in LOOKS:
            looks.append({"step": step, **look(model, data, grown)})
    return looks


def runs(data: Data, steps: int, orders: int, scratch: Path) -> Iterator[dict[str, Any]]:
    model = load(MODEL)
    optimizer = adamw(plain_groups(model), None)
    train(model, optimizer, data.batches(BEFORE, order=-1), torch.float32, WARMUP)
    trained = scratch / "trained"
    model.save_pretrained(trained)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(trained)
    saved = trained / "optimizer.pt"
    torch.save(optimizer.state_dict(), saved)
    for order in range(orders):
        model = load(trained)
        optimizer = adamw(plain_groups(model), saved)
        looks = followed(model, optimizer, data, steps, order, 0, grown=False)
        yield {"run": "source", "order": order, "looks": looks}
        for number, (name, options) in enumerate(WAYS.items()):
            folder = scratch / str(number)
            if not order:
                growkit.grow(trained, folder, hidden="x2", **options, optimizer=saved, verify=False)
            model = load(folder)
            groups = param_groups(
                model,
                folder,
                lr=RATE,
                weight_decay=DECAY,
                eps=EPS,
                decays=lambda _, parameter: parameter.dim() > 1,
            )
            optimizer = adamw(groups, folder / "optimizer.pt")
            warmup = REWARMED if "re-warmed" in name else 0
            looks = followed(model, optimizer, data, steps, order, warmup, grown=True)
            yield {"run": name, "order": order, "looks": looks}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--orders", type=int, default=2)
    chosen = parser.parse_args()
    data = Data(AutoTokenizer.from_pretrained(MODEL), training_text(), held_out_text())
    with chosen.output.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps({"about": about() | {"rewarmed": REWARMED}}) + "\n")
        with tempfile.TemporaryDirectory() as scratch:
            for each in runs(data, chosen.steps, chosen.orders, Path(scratch)):
                lines.write(json.dumps(each) + "\n")
                lines.flush()
                print(each["run"], each["order"], each["looks"][-1], flush=True)


if __name__ == "__main__":
    main()
