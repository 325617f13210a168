"""Speed and memory of every attention variant, against eager attention and transformers' DiffLlama.

    python benchmarks/attention_speed.py [--device auto|cpu|cuda] [--rounds 5]
        [--lengths 4096 16384] [--blocks 64 128 256 512] [--threads N]
        [--output FILE.md]

One attention module, batch 1, random weights: prefill at every length, and a training step (forward
and backward, to the weights and the input) at the first. On a CPU hidden 512, heads of 32, float32;
on a GPU hidden 2048, heads of 128, bfloat16. References:

- eager: the same formula on whole N × N maps, with the same weights, in float32 from the scores to
  the weights of the values. Where its maps do not fit in memory it is left out.
- DiffLlama: ``DiffLlamaAttention`` of transformers with ``attn_implementation="sdpa"``; 16 query
  heads, 8 key and 8 value heads, the shape of DIFF here.

On a CPU that is shared, fewer threads than cores (``--threads``) keep others from stalling a call:
with as many, each operation waits for its slowest thread.

Before anything is measured, every variant must agree with its eager version, and DIFF, given the
same weights, with DiffLlama. Everything is measured in turn, in rounds that go forwards and
backwards by turns, eager in the first two; seconds are medians over rounds, ratios medians of the
rounds' own ratios.

Peak memory is that of tensors which a call allocates, above what was there before it (weights and
input). On a GPU it is ``torch.cuda.max_memory_allocated``; on a CPU every allocation and release of
torch's allocator, as torch's profiler reports them, summed in order of time, in a call of its own.
That counts the scratch that torch's kernels take from the allocator, but not what a library like
MKL packs in buffers of its own. Prints Markdown, and progress to stderr.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

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
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from growkit.base.limits import within
from growkit.modeling import differential_attention
from growkit.modeling.modeling_diff_transformer import DiffTransformerAttention

MEBIBYTE = 2**20
EAGER_ROUNDS = 2
PROBE = 1024
"""Tokens at which eager attention shows what it needs; its maps grow with the square."""


class Bench:
    """What is measured on, and how."""

    def __init__(self, device: str, rounds: int) -> None:
        self.device, self.rounds = device, rounds
        self.shape = SHAPES[device]
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

    def seconds(self, call: Callable[[], None]) -> float:
        """Of one call, until the device is done."""
        self.wait()
        started = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        """Until the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def peak(self, call: Callable[[], None]) -> int:
        """Bytes of tensors at the worst moment of a call, above those before it."""
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            call()
            return torch.cuda.max_memory_allocated() - before
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
        if self.device == "cuda":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def in_turn(
        self, calls: dict[str, Callable[[], None]], slow: Sequence[str] = ()
    ) -> dict[str, list[float]]:
        """Seconds of every call in every round; all must have been called before.

        Args:
            calls: by name.
            slow: names of those that are in the first rounds only.
        """
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(self.rounds):
            for name in list(calls)[:: -1 if number % 2 else 1]:
                if number < EAGER_ROUNDS or name not in slow:
                    seconds[name].append(self.seconds(calls[name]))
        return seconds


@dataclass
class Measured:
    """Seconds of every round, and the peak in bytes."""

    seconds: list[float]
    peak: int


@dataclass
class Work:
    """Everything measured of one kind of work, and what was left out because of its need."""

    title: str
    measured: dict[str, Measured]
    needs: dict[str, int]
    free: int

    def ratios(self, name: str, reference: str) -> list[float]:
        """Times over those of the reference in the same round."""
        # Eager was in the first rounds only.
        pairs = zip(self.measured[name].seconds, self.measured[reference].seconds, strict=False)
        return [ours / theirs for ours, theirs in pairs]

    def lines(self) -> list[str]:
        """As a Markdown section."""
        lines = [
            f"## {self.title}",
            "",
            "| variant | s | / DiffLlama | eager, s | / eager | peak, MiB | eager peak, MiB |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for name, measured in self.measured.items():
            if name == DIFFLLAMA or name in VARIANTS:
                cells = [name, f"{statistics.median(measured.seconds):.3g}"]
                cells.append(f"{statistics.median(self.ratios(name, DIFFLLAMA)):.2f}")
                reference = self.measured.get(eager_of(name))
                peak = f"{measured.peak / MEBIBYTE:.0f}"
                if reference is None:
                    cells += ["", "", peak, ""]
                else:
                    ratio = statistics.median(self.ratios(name, eager_of(name)))
                    cells += [f"{statistics.median(reference.seconds):.3g}", f"{ratio:.3f}"]
                    cells += [peak, f"{reference.peak / MEBIBYTE:.0f}"]
                lines.append(f"| {' | '.join(cells)} |")
        if self.needs:
            low, high = min(self.needs.values()), max(self.needs.values())
            lines += [
                "",
                f"Eager left out where N × N does not fit: it would need {low / 2**30:.0f} to "
                f"{high / 2**30:.0f} GiB (its peak at {PROBE} tokens, times the square of the "
                f"length), and {self.free / 2**30:.0f} GiB are free.",
            ]
        return lines

    def verdict(self) -> str:
        """Whether DIFF is at least as fast as DiffLlama."""
        ratios = self.ratios("DIFF", DIFFLLAMA)
        middle = statistics.median(ratios)
        return (
            f"- {self.title}: {'yes' if middle <= 1 else 'no'}, {middle:.2f} of its time "
            f"({min(ratios):.2f} to {max(ratios):.2f} over the rounds)"
        )


Kind = Callable[[Contender, int], Callable[[], None]]


def measure(bench: Bench, title: str, every: dict[str, Contender], kind: Kind, tokens: int) -> Work:
    calls, peaks, needs = {}, {}, {}
    free = bench.free()
    for name, contender in every.items():
        if contender.reference:
            probed = min(PROBE, tokens)
            probe = kind(contender, probed)
            probe()
            need = bench.peak(probe) * (tokens / probed) ** 2
            if need > 0.8 * free:
                needs[name] = int(need)
                continue
        call = kind(contender, tokens)
        if bench.device == "cuda":
            call()  # kernels are loaded and libraries take their workspaces
        peaks[name] = bench.peak(call)
        calls[name] = call
    seconds = bench.in_turn(calls, [name for name in calls if every[name].reference])
    measured = {name: Measured(seconds[name], peaks[name]) for name in calls}
    work = Work(title, measured, needs, free)
    print(work.verdict(), file=sys.stderr)
    return work


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


def memory_lines(short: Work, long: Work) -> list[str]:
    lines = [
        "## Peak memory of prefill, MiB",
        "",
        f"| variant | {short.title} | {long.title} | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for name, measured in long.measured.items():
        if name in short.measured:
            before, after = short.measured[name].peak, measured.peak
            lines.append(
                f"| {name} | {before / MEBIBYTE:.1f} | {after / MEBIBYTE:.1f} "
                f"| {after / before:.2f} |"
            )
    return lines


def block_lines(
    bench: Bench, contender: Contender, blocks: Sequence[int], tokens: int
) -> list[str]:
    """The causal integral with blocks of other sizes."""
    usual = differential_attention.BLOCK_ROWS
    works = {"prefill": bench.prefill, "training step": bench.training_step}
    lines = [
        f"## Rows of a block (`BLOCK_ROWS`, {usual} in the model): DINT causal, unified, "
        f"{tokens} tokens",
        "",
        "| work | rows | s | peak, MiB |",
        "| --- | --- | --- | --- |",
    ]

    def with_blocks(rows: int, call: Callable[[], None]) -> Callable[[], None]:
        def changed() -> None:
            differential_attention.BLOCK_ROWS = rows
            try:
                call()
            finally:
                differential_attention.BLOCK_ROWS = usual

        return changed

    for title, kind in works.items():
        call = kind(contender, tokens)
        calls = {str(rows): with_blocks(rows, call) for rows in blocks}
        peaks = {rows: bench.peak(changed) for rows, changed in calls.items()}
        for rows, seconds in bench.in_turn(calls).items():
            lines.append(
                f"| {title} | {rows} | {statistics.median(seconds):.3g} "
                f"| {peaks[rows] / MEBIBYTE:.0f} |"
            )
    return lines


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--blocks", type=int, nargs="*", default=[], help="sizes to try for DINT")
    parser.add_argument("--threads", type=int, help="of torch, on a CPU")
    parser.add_argument("--output", type=Path, help="where to write the Markdown as well")
    arguments = parser.parse_args()
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    bench = Bench(device, arguments.rounds)
    loads = [load()]
    every = contenders(bench.shape, device)
    difference = check(bench, every)

    lengths = arguments.lengths
    works = [
        measure(bench, f"prefill, {tokens} tokens", every, bench.prefill, tokens)
        for tokens in lengths
    ]
    title = f"training step, {lengths[0]} tokens"
    works.append(measure(bench, title, every, bench.training_step, lengths[0]))
    blocks = []
    if arguments.blocks:
        blocks = block_lines(bench, every["DINT causal, unified"], arguments.blocks, lengths[0])
    loads.append(load())

    gpu = f", {torch.cuda.get_device_name()}" if device == "cuda" else ""
    shape = bench.shape
    lines = [
        f"# Attention: speed and memory on {'a GPU' if device == 'cuda' else 'a CPU'}",
        "",
        f"{datetime.datetime.now().astimezone().date()}, {processor()}, {os.cpu_count()} cores "
        f"({torch.get_num_threads()} threads){gpu}, Python {platform.python_version()}, "
        f"torch {version('torch')}, transformers {version('transformers')}. "
        f"Load before and after: {loads[0]}, {loads[1]} (this run included).",
        "",
        f"One attention module, batch 1, hidden {shape.hidden}, heads of {shape.head_dim}, "
        f"{str(shape.dtype).removeprefix('torch.')}; medians of {bench.rounds} rounds in turn "
        f"(eager in {min(bench.rounds, EAGER_ROUNDS)}). "
        "Ratios are times over times of the reference: below 1 is faster than it. Peak memory is "
        "that of the tensors a call allocates. How all this is measured stands in "
        "`benchmarks/attention_speed.py`. Every variant agreed with its eager version, and DIFF "
        f"with DiffLlama, within {difference:.0e} of the output's norm.",
        "",
        "Is DIFF at least as fast as DiffLlama's SDPA path?",
        "",
        *(work.verdict() for work in works),
    ]
    for work in works:
        lines += ["", *work.lines()]
    if len(lengths) > 1:
        lines += ["", *memory_lines(works[0], works[len(lengths) - 1])]
    if blocks:
        lines += ["", *blocks]
    lines += ["", "## Heads", "", "| variant | signal | noise | keys | values | value width |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, contender in every.items():
        if isinstance(contender.module, DiffTransformerAttention) and not contender.reference:
            config = contender.module.config
            lines.append(
                f"| {name} | {config.num_signal_heads} | {config.num_noise_heads} "
                f"| {config.num_key_value_heads} | {config.num_value_heads} "
                f"| {config.value_head_dim} |"
            )
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
