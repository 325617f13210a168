"""KL of compressed latents (``convert --to mla --rank``) against plain SVD at equal cache bytes.

    python benchmarks/latent_compression.py [--steps 300]

A byte-level Llama (4 layers, hidden size 128, 8 query heads and 4 KV heads of 16) learns the
training text of the demo model, which is also the calibration text; KL is measured on 32 windows of
held-out text. The peers keep as many numbers for each token, half for keys and half for values, by
singular values of the weights alone (the four constants of a latent are among growkit's numbers):

- ``plain SVD``: ``k_proj`` and ``v_proj``, each truncated as a whole. Keys are then rotated after
  they are expanded, which no cache of MLA can do: the peer is flattered.
- ``SVD for each frequency``: ``v_proj`` likewise; keys of all KV heads at one frequency, which RoPE
  rotates alike, by a real matrix each (RoRoPE's form), equally many for every frequency.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

import torch
import transformers
from measuring import head, machine, row
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import growkit
from growkit.cli.demo import MODEL, held_out_text, training_text

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
KV_HEADS, PAIRS = 4, 8
FULL = 2 * KV_HEADS * 2 * PAIRS
RANKS = (100, 68, 36)
BATCH, CONTEXT = 4, 256


def trained(steps: int) -> LlamaForCausalLM:
    """A model that learned the training text."""
    torch.manual_seed(0)
    model, text = LlamaForCausalLM(CONFIG), torch.tensor(list(training_text().encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,))
        ids = torch.stack([text[start : start + CONTEXT] for start in starts])
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"last loss: {loss.item():.3f} nats per byte")
    return model


def truncated(matrix: Tensor, rank: int) -> Tensor:
    """The best approximation of a rank."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    return (left[..., :rank] * values[..., None, :rank]) @ right[..., :rank, :]


def by_frequency(keys: Tensor, rank: int) -> Tensor:
    """Keys of which every frequency has as many components."""
    halves = keys.unflatten(0, (KV_HEADS, 2, PAIRS)).permute(2, 0, 1, 3)  # [pairs, heads, 2, …]
    left = truncated(halves.flatten(2), rank // (2 * PAIRS)).view_as(halves)
    return left.permute(1, 2, 0, 3).flatten(0, 2)


def peer(source: Path, out: Path, rank: int, of_keys: Callable[[Tensor, int], Tensor]) -> None:
    """Write the model whose keys and values are what singular values leave."""
    model = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for layer in model.model.layers:
            keys, values = layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight
            keys.copy_(of_keys(keys, rank // 2))
            values.copy_(truncated(values, rank - rank // 2))
    model.save_pretrained(out)
    for file in source.glob("tokenizer*"):
        copy(file, out)


def main() -> None:
    """Train, compress, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    steps = parser.parse_args().steps
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(machine())
    with TemporaryDirectory() as name:
        folder = Path(name)
        source, out = folder / "source", folder / "out"
        trained(steps).save_pretrained(source)
        for file in MODEL.glob("tokenizer*"):
            copy(file, source)
        calibration, held_out = folder / "calibration.txt", folder / "held_out.txt"
        calibration.write_text(training_text(), encoding="utf-8")
        held_out.write_text(held_out_text(), encoding="utf-8")
        settings = growkit.Settings(text=str(held_out), prompts=32)
        names = ("plain SVD", "SVD for each frequency", "growkit", "growkit, no text")
        print(head("numbers", "of the cache", *names, "growkit / SVD for each"))
        for rank in RANKS:
            costs = []
            for of_keys in (truncated, by_frequency):
                peer(source, out, rank, of_keys)
                costs.append(kl_of(growkit.verify(source, out, settings)))
            for text in (str(calibration), None):
                result = growkit.convert(
                    source,
                    folder / "compressed",
                    to="mla",
                    rank=rank,
                    calibration=text,
                    verify=settings,
                    overwrite=True,
                )
                assert result["kept"]
                assert result["verification"] is not None
                costs.append(kl_of(result["verification"]))
            figures = (f"{cost:.3g}" for cost in costs)
            ratio = costs[2] / costs[1]
            print(row(rank, f"{rank / FULL:.0%}", *figures, f"{ratio:.2f}"), flush=True)


def kl_of(verdict: growkit.VerifyResult) -> float:
    """Nats per token in strict float64."""
    kl = verdict.sections.logits.strict_float64.kl_nats_per_token
    assert kl is not None
    return kl


if __name__ == "__main__":
    main()
