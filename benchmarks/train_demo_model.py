"""Train the demo model that ships in ``growkit/cli/demo/model``: a byte-level DiffLlama.

    python benchmarks/train_demo_model.py OUT [--steps 2400]

About 0.8 million parameters, trained on Python's help topics (``growkit.cli.demo``) with
AdamW. Takes under an hour on two CPU cores, and prints the loss on the held-out tenth as it goes.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM

from growkit.cli.demo import held_out_text, training_text

CONTEXT = 512  # bytes
BATCH = 8


def byte_tokenizer() -> Tokenizer:
    """One token per byte: a byte-level BPE without a single merge, and ids equal to the bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    tokenizer = Tokenizer(
        models.BPE(vocab={characters[byte]: byte for byte in range(256)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def as_ids(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.long)


def held_out_loss(model: DiffLlamaForCausalLM, ids: torch.Tensor) -> float:
    """Mean nats per byte over consecutive windows of the context length."""
    windows = ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    model.eval()
    with torch.no_grad():
        losses = [
            model(batch, labels=batch).loss.item() * len(batch) for batch in windows.split(16)
        ]
    model.train()
    return sum(losses) / len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2400)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = DiffLlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = DiffLlamaForCausalLM(config)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train, held_out = as_ids(training_text()), as_ids(held_out_text())
    print(f"{len(train):,} bytes to train on, {len(held_out):,} held out")

    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-3,
        betas=(0.9, 0.95),
    )
    warmup = 100
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / warmup)
            * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / arguments.steps)))
        ),
    )
    for step in range(arguments.steps):
        starts = torch.randint(len(train) - CONTEXT, (BATCH,)).tolist()
        batch = torch.stack([train[start : start + CONTEXT] for start in starts])
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(
                f"step {step + 1}: loss {loss.item():.4f}, "
                f"held out {held_out_loss(model, held_out):.4f} nats per byte",
                flush=True,
            )

    model.to(torch.bfloat16).save_pretrained(arguments.out)
    byte_tokenizer().save(str(arguments.out / "tokenizer.json"))
    (arguments.out / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT})
        + "\n"
    )


if __name__ == "__main__":
    main()
