"""Training, prefill and decoding of whole models: softmax, DIFF, DINT and transformers' DiffLlama.

    python benchmarks/model_speed.py [--device auto|cpu|cuda|…] [--layers 24] [--compiled] [--quick]

Random models of 1.3 to 1.4 billion parameters (24 layers of 2048, heads of 128) in bfloat16, with
activation checkpointing and AdamW. Medians; a step of training is forward, backward and update.
With ``--compiled`` only training is measured, compiled into one graph. Prints Markdown, a row as
soon as it is known.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measuring import head, row, seconds
from torch import nn
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, DynamicCache

from growkit.engine.device import choose_device
from growkit.extras.differential.modeling.configuration_diff_transformer import (
    DiffTransformerConfig,
)
from growkit.extras.differential.modeling.modeling_diff_transformer import (
    DiffTransformerForCausalLM,
)

PLAIN = {"head_norm": "none", "head_output_scale": "none"}
KINDS: dict[str, dict[str, Any]] = {
    "softmax": {"num_noise_heads": 0, "num_key_value_heads": 8, **PLAIN},
    "DIFF": {},
    "DINT, gated": {"integral": "causal", "gamma": "gated"},
    "DiffLlama": {"num_key_value_heads": 8, "attn_implementation": "sdpa"},
}
LARGE = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "head_dim": 128}
TINY = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 64, "head_dim": 4}
DECODED = 5
"""Tokens of a call."""


def build(kind: str, sizes: dict[str, Any], device: torch.device) -> nn.Module:
    options = sizes | {"num_attention_heads": 16, "max_position_embeddings": 32768} | KINDS[kind]
    torch.manual_seed(0)
    with device:
        if kind == "DiffLlama":
            model: nn.Module = DiffLlamaForCausalLM(DiffLlamaConfig(**options))
        else:
            model = DiffTransformerForCausalLM(DiffTransformerConfig(**options))
    return model.to(torch.bfloat16)


def typical(call: Callable[[], Any], rounds: int, warm: int) -> float:
    """Seconds, the median of some rounds after others that only warm up."""
    return median([seconds(call) for _ in range(warm + rounds)][warm:])


def training(model: Any, ids: torch.Tensor, compiled: bool) -> Callable[[], None]:
    """A step; one graph if it is compiled."""
    model.train()
    model.activation_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    run = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> None:
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@torch.no_grad()
def inference(model: Any, ids: torch.Tensor) -> list[str]:
    """Milliseconds of prefill, and of a token after it."""
    model.eval()
    cache = DynamicCache(config=model.config)
    prefill = typical(lambda: model.model(input_ids=ids, use_cache=False), 5, 1)
    model.model(input_ids=ids, cache=cache, use_cache=True)

    def decode() -> None:
        for _ in range(DECODED):
            model.model(input_ids=ids[:, :1], cache=cache, use_cache=True)

    return [f"{1e3 * prefill:.1f}", f"{1e3 * typical(decode, 3, 1) / DECODED:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, or torch's name of another")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--compiled", action="store_true", help="only training, in one graph")
    parser.add_argument("--quick", action="store_true", help="tiny models, to see that it runs")
    chosen = parser.parse_args()
    device, rounds = choose_device(chosen.device), 1 if chosen.quick else 3
    sizes = (TINY if chosen.quick else LARGE) | {"num_hidden_layers": chosen.layers}
    lengths = (32, 64) if chosen.quick else (4096, 16384)
    columns = [f"training, tokens/s, {lengths[1]} of {n}" for n in lengths]
    if chosen.compiled:
        columns = [f"{each}, compiled" for each in columns[:1]]
    else:
        columns += [f"{what}, ms, {n}" for n in lengths for what in ("prefill", "a token after")]
    print(head("", "parameters", *columns), flush=True)
    for kind in KINDS:
        if chosen.compiled and kind == "DiffLlama":
            continue
        model, cells = build(kind, sizes, device), []
        texts = [torch.randint(sizes["vocab_size"], (lengths[1] // n, n)) for n in lengths]
        for ids in texts[: len(columns)]:
            step = training(model, ids.to(device), chosen.compiled)
            cells.append(f"{lengths[1] / typical(step, rounds, 2):.0f}")
            del step
        if not chosen.compiled:
            model.activation_checkpointing_disable()
            for ids in texts:
                cells += inference(model, ids[:1].to(device))
        print(row(kind, sum(p.numel() for p in model.parameters()), *cells), flush=True)
        del model
        if torch.accelerator.is_available():
            torch.accelerator.empty_cache()


if __name__ == "__main__":
    main()
