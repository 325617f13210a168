"""KL of compressed latents (``convert --to mla --rank``) against plain SVD at equal cache bytes.

    python benchmarks/latent_compression.py [--steps 300]
    python benchmarks/latent_compression.py --model FOLDER --calibration TEXT --text TEXT

Without a folder, a byte-level Llama (4 layers, hidden size 128, 8 query heads and 4 KV heads of 16)
learns the training text of the demo model, which is also the calibration text; KL is measured on 16
windows of held-out text. The peers keep as many numbers for each token by singular values of the
weights alone (the constant of a latent is among growkit's numbers):

- ``SVD for each frequency``: keys of all KV heads at one frequency, which RoPE rotates alike, by a
  real matrix each (RoRoPE's form), equally many for every frequency, in half of the numbers; and
  ``v_proj`` in the other half. Only this peer can be stored as latents of MLA.
- ``SVD of each``: ``k_proj`` and ``v_proj``, each truncated as a whole in half of the numbers
  (Palu's form, in which CARE compares). Keys are rotated after they are expanded, at every step.
- ``SVD of both``: the rows of ``k_proj`` and ``v_proj`` truncated together (MHA2MLA's form, without
  its rotary key). Keys are again rotated after they are expanded.
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
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

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
SHARES = (0.78, 0.53, 0.28)
"""Numbers, as parts of the full cache."""
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


def by_frequency(keys: Tensor, heads: int, rank: int) -> Tensor:
    """Keys of which every frequency has as many components."""
    halves = keys.unflatten(0, (heads, 2, -1)).permute(2, 0, 1, 3)  # [pairs, heads, 2, hidden]
    left = truncated(halves.flatten(2), max(1, rank // (2 * len(halves)))).view_as(halves)
    return left.permute(1, 2, 0, 3).flatten(0, 2)


def for_each_frequency(keys: Tensor, values: Tensor, heads: int, rank: int) -> tuple[Tensor, ...]:
    """See the module."""
    return by_frequency(keys, heads, rank // 2), truncated(values, rank - rank // 2)


def of_each(keys: Tensor, values: Tensor, heads: int, rank: int) -> tuple[Tensor, ...]:
    """See the module."""
    return truncated(keys, rank // 2), truncated(values, rank - rank // 2)


def of_both(keys: Tensor, values: Tensor, heads: int, rank: int) -> tuple[Tensor, ...]:
    """See the module."""
    return truncated(torch.cat([keys, values]), rank).chunk(2)


PEERS = {
    "SVD for each frequency": for_each_frequency,
    "SVD of each": of_each,
    "SVD of both": of_both,
}


def write_peer(source: Path, out: Path, rank: int, peer: Callable[..., tuple[Tensor, ...]]) -> None:
    """Write the model whose keys and values are what singular values leave."""
    model = AutoModelForCausalLM.from_pretrained(source)
    heads = model.config.num_key_value_heads
    with torch.no_grad():
        for layer in model.model.layers:
            weights = layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight
            for weight, left in zip(weights, peer(*weights, heads, rank), strict=True):
                weight.copy_(left)
    model.save_pretrained(out)
    for file in source.glob("tokenizer*"):
        copy(file, out)


def trained_in(folder: Path, steps: int) -> tuple[Path, Path, Path]:
    """A trained model, a text to calibrate, and a held-out text."""
    source, calibration, text = (folder / name for name in ("source", "training.txt", "text.txt"))
    trained(steps).save_pretrained(source)
    for file in MODEL.glob("tokenizer*"):
        copy(file, source)
    calibration.write_text(training_text(), encoding="utf-8")
    text.write_text(held_out_text(), encoding="utf-8")
    return source, calibration, text


def main() -> None:
    """Train or read, compress, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    for name in ("model", "calibration", "text"):
        parser.add_argument(f"--{name}", type=Path)
    chosen = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    print(machine())
    with TemporaryDirectory() as name:
        folder, source = Path(name), chosen.model
        calibration, text = chosen.calibration, chosen.text
        if source is None:
            source, calibration, text = trained_in(folder, chosen.steps)
        config = AutoConfig.from_pretrained(source)
        full = 2 * config.num_key_value_heads * config.head_dim
        settings = growkit.Settings(text=str(text), prompts=16)
        print(head("numbers", "of the cache", *PEERS, "growkit", "to the best peer"))
        for share in SHARES:
            costs, rank = [], round(share * full)
            for peer in PEERS.values():
                write_peer(source, folder / "out", rank, peer)
                costs.append(kl_of(growkit.verify(source, folder / "out", settings)))
            best = min(costs)
            result = growkit.convert(
                source,
                folder / "compressed",
                to="mla",
                rank=rank,
                calibration=str(calibration),
                verify=settings,
                overwrite=True,
            )
            assert result["kept"]
            assert result["verification"] is not None
            costs.append(kl_of(result["verification"]))
            figures = (f"{cost:.3g}" for cost in costs)
            print(row(rank, f"{share:.0%}", *figures, f"{costs[-1] / best:.2f}"), flush=True)


def kl_of(verdict: growkit.VerifyResult) -> float:
    """Nats per token in strict float64."""
    kl = verdict.sections.logits.strict_float64.kl_nats_per_token
    assert kl is not None
    return kl


if __name__ == "__main__":
    main()
