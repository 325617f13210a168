"""Do models with an upgraded architecture train as well as their source does?

A small Llama, Qwen3 and Granite learn a random text of second order; they are converted, and
sources and results train on with AdamW for 100 steps of the same tokens, with five seeds, at the
learning rates of the law of updates:

    python benchmarks/upgrade_training.py [SOURCE ...]
"""

import sys
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from measuring import head, row
from torch import Tensor
from transformers import AutoModelForCausalLM, GraniteConfig, LlamaConfig, Qwen3Config

import growkit
from growkit import ConvertStep, GrowStep, Recipe
from growkit.training import param_groups

VOCAB, STEPS, SEEDS, RATE = 16, 100, range(5), 1e-3
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LINEAR = {  # for layers of Gated DeltaNet
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
INSERTED = GrowStep("depth", {"layers": "x2", "kind": "linear_attention"})
DEEPER = GrowStep("depth", {"layers": "x2"})
UPGRADES: list[tuple[str, Any, dict[str, tuple[GrowStep | ConvertStep, ...]]]] = [
    (
        "Llama",
        LlamaConfig(**SIZES),
        {name: (ConvertStep(name, {}),) for name in ("mla", "hybrid", "hyper-connections")},
    ),
    (
        "Qwen3",
        Qwen3Config(**SIZES, **LINEAR),
        {
            **{name: (ConvertStep(name, {}),) for name in ("mla", "hyper-connections")},
            "output-gate": (ConvertStep("output-gate", {}),),
            "output-gate, depth x2": (ConvertStep("output-gate", {}), DEEPER),
            "output-gate, depth x2 --kind linear_attention": (
                ConvertStep("output-gate", {}),
                INSERTED,
            ),
        },
    ),
    (
        "Granite",
        GraniteConfig(
            **SIZES,
            attention_multiplier=1 / 16,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=4.0,
        ),
        {name: (ConvertStep(name, {}),) for name in ("mla", "hybrid")},
    ),
]
"""Names and configs of sources, and by name the steps of what becomes of each."""


def next_tokens() -> Tensor:
    """Probabilities of the next token after any two, [vocab, vocab, vocab]."""
    generator = torch.Generator().manual_seed(0)
    return torch.softmax(2.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator), -1)


def train(
    model: Any, groups: Any, text: Tensor, steps: int, seed: int
) -> tuple[float, float, list[str]]:
    """The first loss, the mean of the last 20, and the parameters that did not move."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(groups, lr=RATE)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    losses = []
    for _ in range(steps):
        ids = torch.randint(VOCAB, (8, 2), generator=generator)
        for _ in range(30):
            odds = text[ids[:, -2], ids[:, -1]]
            ids = torch.cat([ids, torch.multinomial(odds, 1, generator=generator)], 1)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    still = [name for name, value in model.named_parameters() if torch.equal(value, before[name])]
    return losses[0], fmean(losses[-20:]), still


def main() -> None:
    """Print a row for each source and each conversion."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    text = next_tokens()
    print(head("model", "first loss", "loss after 100 steps", "parameters that stayed"))
    chosen = [each for each in UPGRADES if each[0] in sys.argv[1:]] or UPGRADES
    for source, config, upgrades in chosen:
        torch.manual_seed(0)
        trained = AutoModelForCausalLM.from_config(config)
        train(trained, trained.parameters(), text, 400, 99)
        with TemporaryDirectory() as scratch:
            folders = {name: Path(scratch) / str(at) for at, name in enumerate((source, *upgrades))}
            trained.save_pretrained(folders[source])
            for name, steps in upgrades.items():
                recipe = Recipe(str(folders[source]), steps, str(folders[name]))
                assert growkit.run(recipe)["kept"]
            for name, folder in folders.items():
                print(row(name, *figures(folder, text)), flush=True)


def figures(folder: Path, text: Tensor) -> tuple[str, str, str]:
    """Train a model with every seed."""
    runs = []
    for seed in SEEDS:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        grown = (folder / "growkit.json").exists()
        groups = param_groups(model, folder, lr=RATE) if grown else model.parameters()
        runs.append(train(model, groups, text, STEPS, seed))
    first, last = ([run[at] for run in runs] for at in (0, 1))
    still = sorted({parameter for run in runs for parameter in run[2]})
    losses = f"{fmean(first):.6f}", f"{fmean(last):.4f} ± {stdev(last):.4f}"
    return *losses, ", ".join(still) or "none"


if __name__ == "__main__":
    main()
