"""The series of DINT's integral against the exact one: in long texts, in training, in each layer.

    python -m benchmarks.integral_series FOLDER [--steps 1000] [--seeds 3] [--lengths 4096 16384]

- Long texts: random heads, from the cases of ``tests/test_series.py``, against float64.
- Training: small DINT models learn Python's help topics, byte by byte, from the same weights and
  batches: with the exact integral, with its series, and with the exact one from weights that are
  moved by their last bit or rounded to bfloat16, which shows what rounding alone does.
- Layers: heads of the models trained with the exact integral, on held-out text.

An error is the largest of a row, over the row's root mean square. It is compared with what rounding
the same exact row once to bfloat16 does. The bound is that of ``share_of_bound``.

FOLDER keeps models and losses; runs that are there are not repeated. Takes about 30 minutes of one
CPU core. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring import head, machine, row
from growkit.cli.demo import held_out_text, training_text
from growkit.extras.differential.checks.series import share_of_bound
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.extras.differential.modeling.differential_attention import (
    Projected,
    SignalHeads,
    causal_integral,
    combine,
    differential_heads,
    fused_attention,
)
from growkit.extras.differential.modeling.modeling_diff_transformer import (
    DiffTransformerForCausalLM,
)
from tests.test_series import (
    GAMMA,
    LATE,
    SCALING,
    SHAPES,
    gradients,
    late,
    long_text,
    of_bound,
)

CONTEXT, LONG = 512, 1024
"""Tokens of a text: of runs that are compared, and of the model whose layers are looked at."""
BATCH = 2
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": LONG,
    "tie_word_embeddings": True,
    "integral": "causal",
}
RUNS = {"exact": "exact", "series": "series", "last bit": "exact", "bfloat16": "exact"}
"""Methods of the integral."""
SIZES = (1, 5, 20)
"""Values of late columns, in multiples of others."""
EVERY_GRADIENT, SOME_GRADIENTS = 4096, ("hot column", "padded")
"""Exact gradients of longer texts take a minute each."""
MARKS = (100, 200, 500, 1000)
"""Steps after which the held-out loss is taken."""


def as_ids(text: str) -> Tensor:
    return torch.tensor(list(text.encode()))


def train(folder: Path, run: str, seed: int, steps: int, context: int = CONTEXT) -> None:
    """Train a model, unless it is there, and keep it with its losses."""
    if (folder / "losses.json").exists():
        return
    torch.manual_seed(seed)
    model = DiffTransformerForCausalLM(DiffTransformerConfig(**SHAPE, integral_method=RUNS[run]))
    for parameter in model.parameters():
        if run == "last bit":
            up = torch.full_like(parameter, torch.inf) * torch.randn_like(parameter).sign()
            parameter.data = torch.nextafter(parameter.data, up)
        elif run == "bfloat16":
            parameter.data = parameter.data.bfloat16().float()
    text, held_out = as_ids(training_text()), as_ids(held_out_text())
    windows = held_out[: 32 * CONTEXT].view(-1, 16, CONTEXT)
    decayed = [each for each in model.parameters() if each.dim() > 1]
    others = [each for each in model.parameters() if each.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    draws, losses, at_marks = torch.Generator().manual_seed(seed), [], {}
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, step / 50) * (1 + math.cos(math.pi * step / steps)) / 2
        starts = torch.randint(len(text) - context, (BATCH,), generator=draws).tolist()
        batch = torch.stack([text[start : start + context] for start in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step in MARKS:
            with torch.no_grad():
                found = [model(part, labels=part, use_cache=False).loss for part in windows]
            at_marks[step] = float(torch.stack(found).mean())
    model.save_pretrained(folder)
    (folder / "losses.json").write_text(json.dumps({"train": losses, "held out": at_marks}))


def losses_of(folder: Path, run: str, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{run} {seed}" / "losses.json").read_text())
    return found


def show_training(folder: Path, seeds: int) -> None:
    """Losses, and how far the other runs are from the exact one."""
    print("\n## Training\n\nHeld-out loss in nats per byte, and differences from the exact run.")
    differences = [f"{run} − exact" for run in RUNS if run != "exact"]
    print(head("seed", "step", "exact", *differences))
    training = {}
    for seed in range(seeds):
        every = {run: losses_of(folder, run, seed) for run in RUNS}
        for mark in every["exact"]["held out"]:
            exact, *others = (each["held out"][mark] for each in every.values())
            print(row(seed, mark, f"{exact:.4f}", *(f"{each - exact:+.1e}" for each in others)))
        training[seed] = [torch.tensor(each["train"]) for each in every.values()]
    print("\nTraining loss, root mean square of the differences in some steps:")
    print(head("seed", "steps", *differences))
    for seed, (exact, *others) in training.items():
        for first, last in pairwise((0, *MARKS)):
            apart = ((each - exact)[first:last].square().mean().sqrt() for each in others)
            print(row(seed, f"{first + 1} to {last}", *(f"{each:.1e}" for each in apart)))


def worst(found: Tensor, exact: Tensor, real: Tensor | None = None) -> tuple[float, float, float]:
    """The largest error of a row, the largest of rounding, and the largest ratio of a row."""
    scale = exact.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-30)
    ours, rounding = (
        ((each.double() - exact) / scale).abs().amax(-1) for each in (found, exact.bfloat16())
    )
    if real is not None:
        ours, rounding = (each[real[:, None].expand_as(each)] for each in (ours, rounding))
    return float(ours.max()), float(rounding.max()), float((ours / rounding).max())


def largest_of(ours: list[Tensor], exact: list[Tensor]) -> float:
    """Error of gradients over that of rounding, in norms; the largest of several."""
    return max(
        float((mine - right).norm() / (right.bfloat16() - right).norm())
        for mine, right in zip(ours, exact, strict=True)
    )


def show_long_texts(lengths: list[int]) -> None:
    """One random head."""
    print("\n## Long texts\n")
    columns = ["error", "rounding", "/ rounding, worst row", "/ bound, worst row"]
    others = ["error in bfloat16", "of exact in bfloat16", "gradients, / rounding"]
    print(head("tokens", "input", *columns, *others))
    every = {shape: partial(long_text, shape) for shape in SHAPES}
    for shape, size in product(LATE, SIZES):
        every[f"{shape}, value × {size}"] = partial(late, shape, size=size)
    for rows, (shape, make) in product(lengths, every.items()):
        case = make(rows)
        real, given = case.real, [case.query, case.key, case.value]
        error, rounding, ratio = worst(case.series(*given), case.exact, real)
        halves = [each.bfloat16() for each in given]
        blocks, _ = causal_integral(SignalHeads(*halves, GAMMA, SCALING, 0, real), None)
        narrow, usual = (
            worst(each, case.exact, real)[0] for each in (case.series(*halves), blocks)
        )
        off = ""
        if (rows <= EVERY_GRADIENT and "20" not in shape) or shape in SOME_GRADIENTS:
            exact = gradients(case.heads, [each.double() for each in given], real)
            off = f"{largest_of(gradients(case.series, given, real), exact):.1e}"
        shown = f"{error:.1e}", f"{rounding:.1e}", f"{ratio:.3f}", f"{of_bound(case).max():.2f}"
        print(row(rows, shape, *shown, f"{narrow:.1e}", f"{usual:.1e}", off), flush=True)


def heads_of(projected: Projected, scaling: float, integral: str) -> Tensor:
    attend = partial(fused_attention, scaling=scaling, past=0, real=None)
    return combine(*differential_heads(projected, scaling, integral, 0, None, None, attend)[0])


def gradients_of(projected: Projected, scaling: float, integral: str) -> list[Tensor]:
    """To queries, keys and values, of a random sum of the heads."""
    given = projected.map(lambda tensor: tensor.detach().requires_grad_())
    found = heads_of(given, scaling, integral)
    generator = torch.Generator().manual_seed(0)
    (found * torch.randn(found.shape, generator=generator)).sum().backward()
    return [each.grad for each in given[:3] if each is not None and each.grad is not None]


def show_layers(folder: Path) -> None:
    """Heads of a trained model: series in float32, exact in float64."""
    print("\n## Layers of a trained model")
    columns = ["error", "rounding", "/ rounding, worst row", "/ bound, worst row"]
    print(head("layer", *columns, "gradients, / rounding"))

    def show(module: Any, args: Any, kwargs: Any, _: Any) -> None:
        given = module.project(*args, **kwargs)[0].map(Tensor.detach)
        doubled, scaling = given.map(Tensor.double), module.scaling
        exact = heads_of(doubled, scaling, "causal")
        error, rounding, ratio = worst(heads_of(given, scaling, "series"), exact)
        with torch.enable_grad():
            found = gradients_of(given, scaling, "series")
            off = largest_of(found, gradients_of(doubled, scaling, "causal"))
        shown = f"{error:.1e}", f"{rounding:.1e}", f"{ratio:.3f}"
        share = f"{share_of_bound(given, scaling):.2f}"
        print(row(module.layer_idx, *shown, share, f"{off:.1e}"), flush=True)

    model = DiffTransformerForCausalLM.from_pretrained(folder)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(show, with_kwargs=True)
    with torch.no_grad():
        model(as_ids(held_out_text())[: 32 * LONG].view(-1, LONG), use_cache=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 16384])
    chosen = parser.parse_args()
    print("# The series of the integral against the exact one, on a CPU\n")
    print(f"{machine('transformers')}, {torch.get_num_threads()} threads.")
    show_long_texts(chosen.lengths)
    for seed in range(chosen.seeds):
        for run in RUNS:
            train(chosen.folder / f"{run} {seed}", run, seed, chosen.steps)
    train(chosen.folder / "long", "exact", 0, chosen.steps, LONG)
    show_training(chosen.folder, chosen.seeds)
    show_layers(chosen.folder / "long")


if __name__ == "__main__":
    main()
