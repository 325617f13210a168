"""How far a model with more experts at the same cost per token is from its source.

    python benchmarks/more_experts.py TEXT SRC [--steps 1200]

SRC becomes a model of eight experts, two of them for a token, which trains on all but the last
tenth of the text, with transformers' loss for balance. That is the source of models with more
experts, two of them for a token again. The figures are those of their proof on the last tenth.
Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from measuring import head, machine, row
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import growkit

LENGTH, BATCH, RATE, BALANCE = 128, 8, 1e-3, 0.01

WAYS: dict[str, dict[str, Any]] = {
    "x2": {"experts": "x2"},
    "x2, bfloat16": {"experts": "x2", "dtype": "bfloat16"},
    "x2, equal rows": {"experts": "x2", "symmetry": "keep"},
    "x4": {"experts": "x4"},
    "x4, equal rows": {"experts": "x4", "symmetry": "keep"},
    "x3/2": {"experts": "x3/2"},
}


def specialised(source: Path, text: str, steps: int, folder: Path) -> Path:
    """A model whose experts and routers have trained."""
    growkit.grow(source, folder, method="upcycle", experts=8, top_k=2, verify=False)
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    windows = ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.router_aux_loss_coef = BALANCE
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        batch = windows[torch.randint(len(windows), (BATCH,), generator=generator)]
        model(batch, labels=batch, use_cache=False, output_router_logits=True).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    trained = folder.with_name("trained")
    model.save_pretrained(trained)
    tokenizer.save_pretrained(trained)
    return trained


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--steps", type=int, default=1200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    content = arguments.text.read_text(encoding="utf-8")
    cut = len(content) * 9 // 10
    columns = ("experts", "seed", "KL in float64", "in its dtype", "loss before", "loss after")
    print(machine("transformers") + head(*columns))
    with tempfile.TemporaryDirectory() as place:
        held = Path(place) / "held.txt"
        held.write_text(content[cut:], encoding="utf-8")
        source = specialised(arguments.source, content[:cut], arguments.steps, Path(place) / "new")
        settings = growkit.Settings(text=str(held), prompts=16, length=LENGTH)
        for name, options in WAYS.items():
            for seed in range(2 if "equal" not in name else 1):
                out = Path(place) / f"{name} {seed}"
                more = {"method": "experts", "top_k": 2, "seed": seed, "verify": settings}
                proof = growkit.grow(source, out, **more, **options)["verification"]
                kl = (proof[each]["kl_nats_per_token"] for each in ("strict_float64", "native"))
                losses = (proof.sections.logits.loss_source, proof.sections.logits.loss_target)
                figures = (*(f"{k:.4f}" for k in kl), *(f"{loss:.3f}" for loss in losses))
                print(row(name, seed, *figures), flush=True)


if __name__ == "__main__":
    main()
