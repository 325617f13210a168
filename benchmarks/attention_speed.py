"""Speed and memory of every attention variant, against eager attention and transformers' DiffLlama.

    python benchmarks/attention_speed.py [--device auto|cpu|cuda|…] [--rounds 5]
        [--lengths 4096 16384] [--threads N] [--eager]

One attention module, batch 1, random weights: prefill at every length; a training step (forward and
backward, to the weights and the input) at the first; and tokens decoded after so many. On a CPU
hidden 512, heads of 32, float32; on a GPU hidden 2048, heads of 128, bfloat16. References:

- eager (with ``--eager``): the same module on whole N × N maps, in float32 from the scores to the
  heads. Where its maps need more memory than is free it is left out.
- DiffLlama: ``DiffLlamaAttention`` of transformers with ``attn_implementation="sdpa"``; 16 query
  heads, 8 key and 8 value heads, the shape of DIFF here.

On a CPU that is shared, fewer threads than cores (``--threads``) keep other processes from stalling
a call: with as many, each operation waits for its slowest thread.

Before anything is measured, every variant must agree with its eager version, and DIFF, given the
same weights, with DiffLlama. Everything is measured in turn, in rounds that go forwards and
backwards by turns, eager in the first two; seconds are medians over rounds, ratios medians of the
rounds' own ratios.

Peak memory is that of tensors which a call allocates, above what was there before it (weights and
input). On a GPU it is torch's ``max_memory_allocated``; on a CPU every allocation and release of
torch's allocator, as torch's profiler reports them, summed in order of time, in a call of its own.
That counts the scratch that torch's kernels take from the allocator, but not what a library like
MKL packs in buffers of its own. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silence; read when torch is imported

import torch
from attention_variants import (
    DIFFLLAMA,
    SHAPES,
    VARIANTS,
    Contender,
    Positions,
    contenders,
    eager_of,
)
from measuring import head, machine, ratio, row, seconds
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from growkit.base.limits import within
from growkit.engine.device import choose_device, device_name
from growkit.extras.differential.modeling.integral_cache import fit_cache

MEBIBYTE = 2**20
EAGER_ROUNDS = 2
DECODED = 20
"""Tokens of a call."""
SMALL = 1024
"""Tokens at which eager attention shows what it needs; its maps grow with the square."""


class Bench:
    """What is measured on, and how."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.shape = SHAPES["cpu" if device == "cpu" else "gpu"]
        config = LlamaConfig(hidden_size=self.shape.hidden, head_dim=self.shape.head_dim)
        self.rotary = LlamaRotaryEmbedding(config).to(device)

    def inputs(self, tokens: int) -> tuple[Tensor, Positions]:
        """Hidden states, and cosines and sines; the same for everyone."""
        generator = torch.Generator().manual_seed(tokens)
        hidden = torch.randn(1, tokens, self.shape.hidden, generator=generator)
        hidden = hidden.to(self.device, self.shape.dtype)
        return hidden, self.rotary(hidden, torch.arange(tokens, device=self.device)[None])

    def prefill(self, contender: Contender, tokens: int) -> Callable[[], None]:
        """Forward, without gradients."""
        hidden, positions = self.inputs(tokens)

        @torch.no_grad()
        def call() -> None:
            contender.attend(hidden, positions)

        return call

    def training_step(self, contender: Contender, tokens: int) -> Callable[[], None]:
        """Forward and backward."""
        hidden, positions = self.inputs(tokens)
        gradient = torch.randn_like(hidden)
        hidden.requires_grad_()

        def call() -> None:
            contender.attend(hidden, positions).backward(gradient)
            contender.module.zero_grad()
            hidden.grad = None

        return call

    def decoding(self, contender: Contender, tokens: int) -> Callable[[], None]:
        """Some tokens, one by one, after a text in the cache."""
        module, (hidden, positions) = contender.module, self.inputs(tokens)
        cache, places = DynamicCache(), torch.arange(tokens, tokens + 1, device=self.device)[None]
        fit_cache(cache, 1, integral=module.config.integral != "none", same_shape=False)
        one = hidden[:, -1:], self.rotary(hidden, places)
        with torch.no_grad():
            module(hidden, positions, cache)

        @torch.no_grad()
        def call() -> None:
            for _ in range(DECODED):
                module(*one, cache)

        return call

    def peak(self, call: Callable[[], None]) -> int:
        """Bytes of tensors at the worst moment of a call, above those before it."""
        if self.device != "cpu":
            torch.accelerator.empty_cache()
            torch.accelerator.reset_peak_memory_stats()
            before = torch.accelerator.memory_allocated()
            call()
            return torch.accelerator.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            call()
        results = profiler.profiler
        assert results is not None
        changes = [
            (event.start_ns(), event.nbytes())
            for event in results.kineto_results.events()
            if event.name() == "[memory]"
        ]
        now = highest = 0
        for _, change in sorted(changes, key=lambda each: each[0]):
            now += change
            highest = max(highest, now)
        return highest

    def free(self) -> int:
        """Bytes of memory that are free on the device."""
        if self.device != "cpu":
            torch.accelerator.empty_cache()
            return torch.accelerator.get_memory_info()[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def in_turn(
        self, calls: dict[str, Callable[[], None]], slow: Sequence[str] = ()
    ) -> dict[str, list[float]]:
        """Seconds of every call in every round; all must have been called before.

        Args:
            calls: by name.
            slow: names of those that are in the first rounds only.
        """
        spent: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(self.rounds):
            for name in list(calls)[:: -1 if number % 2 else 1]:
                if number < EAGER_ROUNDS or name not in slow:
                    spent[name].append(seconds(calls[name]))
        return spent


@dataclass
class Measured:
    """Seconds of every round, and the peak in bytes."""

    seconds: list[float]
    peak: int


Kind = Callable[[Contender, int], Callable[[], None]]


def measure(
    bench: Bench, every: dict[str, Contender], kind: Kind, tokens: int
) -> dict[str, Measured]:
    """Everything that fits in memory."""
    calls, peaks = {}, {}
    for name, contender in every.items():
        if contender.reference:
            few = min(SMALL, tokens)
            small = kind(contender, few)
            small()
            if bench.peak(small) * (tokens / few) ** 2 > 0.8 * bench.free():
                continue
        call = kind(contender, tokens)
        if bench.device != "cpu":
            call()  # kernels are loaded and libraries take their workspaces
        peaks[name], calls[name] = bench.peak(call), call
    spent = bench.in_turn(calls, [name for name in calls if every[name].reference])
    return {name: Measured(spent[name], peaks[name]) for name in calls}


def show(title: str, found: dict[str, Measured]) -> None:
    """A Markdown section."""
    print(f"\n## {title}\n")
    columns = ["s", "/ DIFF", "/ DiffLlama", "eager, s", "/ eager", "peak, MiB", "/ DIFF"]
    print(head("variant", *columns, "eager peak, MiB"))
    for name, measured in found.items():
        if name != DIFFLLAMA and name not in VARIANTS:
            continue
        mine = [f"{median(measured.seconds):.3g}"]
        for other in ("DIFF", DIFFLLAMA):
            known = other in found
            mine.append(f"{ratio(measured.seconds, found[other].seconds):.2f}" if known else "")
        cells, peak = ["", "", ""], f"{measured.peak / MEBIBYTE:.0f}"
        larger = f"{measured.peak / found['DIFF'].peak:.2f}"
        if reference := found.get(eager_of(name)):
            few = measured.seconds[: len(reference.seconds)]  # eager was in the first rounds only
            cells = [f"{median(reference.seconds):.3g}", f"{ratio(few, reference.seconds):.3f}"]
            cells.append(f"{reference.peak / MEBIBYTE:.0f}")
        print(row(name, *mine, *cells[:2], peak, larger, cells[2]), flush=True)


def check(bench: Bench, every: dict[str, Contender]) -> float:
    """The largest relative difference between two ways to compute the same."""
    largest = 0.0
    hidden, positions = bench.inputs(300)
    with torch.no_grad():
        outputs = {name: each.attend(hidden, positions).double() for name, each in every.items()}
    pairs = [(name, eager_of(name)) for name in VARIANTS] + [("DIFF", DIFFLLAMA)]
    for name, reference in pairs:
        difference = outputs[name] - outputs[reference]
        relative = (difference.norm() / outputs[reference].norm()).item()
        assert within(relative, bench.shape.tolerance), (name, reference, relative)
        largest = max(largest, relative)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, or torch's name of another")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument("--eager", action="store_true", help="measure eager attention as well")
    chosen = parser.parse_args()
    device = choose_device(chosen.device).type
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    bench = Bench(device, chosen.rounds)
    every = contenders(bench.shape, device)
    gpu = "" if device == "cpu" else f", {device_name(torch.device(device))}"
    dtype = str(bench.shape.dtype).removeprefix("torch.")
    print(f"# Attention: speed and memory on {'a CPU' if device == 'cpu' else 'a GPU'}\n")
    print(
        f"{machine('transformers')}{gpu}, {torch.get_num_threads()} threads. One module, batch 1,"
    )
    print(f"hidden {bench.shape.hidden}, heads of {bench.shape.head_dim}, {dtype}; medians of")
    print(f"{bench.rounds} rounds (eager: at most {EAGER_ROUNDS}). Every variant agreed")
    print(f"with its eager version within {check(bench, every):.0e} of the output's norm.")
    if not chosen.eager:
        every = {name: each for name, each in every.items() if not each.reference}
    for tokens in chosen.lengths:
        show(f"prefill, {tokens} tokens", measure(bench, every, bench.prefill, tokens))
    tokens = chosen.lengths[0]
    show(f"training step, {tokens} tokens", measure(bench, every, bench.training_step, tokens))
    cached = {
        name: each
        for name, each in every.items()
        if name in VARIANTS and each.module.config.integral != "column_mean"
    }
    title = f"{DECODED} tokens decoded after {tokens}"
    show(title, measure(bench, cached, bench.decoding, tokens))


if __name__ == "__main__":
    main()
