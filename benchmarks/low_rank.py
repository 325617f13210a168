"""Speed of the best shared base with low-rank updates, against ``torch.linalg.svd`` head by head.

    python benchmarks/low_rank.py [--rounds 7] [--output FILE.md]

d_model 4096, heads of 128, 32 pairs of signal and noise heads, rank 32, float64, on the CPU. The
peer is called once per pair on the difference of the two: as it comes (``full_matrices`` left at
its default, which computes all 4096 left vectors; timed on two pairs and scaled up), and without
them. Ours is timed for the factors alone, which is what the peer computes, and with base and
updates; and what the factors cannot do without. All must agree on the residual.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from growkit.conversions.shared_diff.low_rank import share, truncated

HIDDEN, HEAD_DIM, PAIRS, RANK = 4096, 128, 32, 32
FEW = 2
OURS = ("factors", "factors, ill-conditioned", "factors, base, updates")
NEEDED = ("DᵀD", "eigenvectors", "D V")
PEERS = ("full_matrices=False", "default (full_matrices=True)")


def seconds(function: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def peer(differences: torch.Tensor, **options: bool) -> None:
    """One singular value decomposition per pair."""
    for difference in differences:
        torch.linalg.svd(difference, **options)


def residual_error(pairs: torch.Tensor) -> float:
    """Largest relative difference between our residuals, stated or rebuilt, and the peer's."""
    found = share(pairs, RANK)
    rebuilt = found.base[:, None] + found.down @ found.up.transpose(-1, -2)
    left = (pairs - rebuilt).square().sum((1, 2, 3))
    values = torch.linalg.svdvals(pairs[:, 0] - pairs[:, 1])
    best = values[:, 2 * RANK :].square().sum(-1) / 2
    return float((torch.stack([found.residual, left]) / best - 1).abs().max())


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(PAIRS, 2, HIDDEN, HEAD_DIM, dtype=torch.float64, generator=generator)
    hard = weights * torch.logspace(0, -3, HEAD_DIM, dtype=torch.float64)
    lines = [
        "# Low-rank step on a CPU",
        "",
        f"{datetime.date.today()}, {platform.processor() or 'CPU'}, {os.cpu_count()} cores, torch "
        f"{torch.__version__}; medians of {arguments.rounds} rounds, ratios within rounds. "
        f"Load before: {os.getloadavg()[1]:.1f}.",
        "",
        f"{PAIRS} pairs of {HIDDEN} × {HEAD_DIM}, rank {RANK}, float64. Residuals agree to "
        f"{residual_error(weights[:4]):.0e}, those of ill-conditioned matrices (columns scaled by "
        f"1 to 1e-3) to {residual_error(hard[:4]):.0e}.",
    ]
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        lines += ["", f"## {threads} thread{'s' if threads > 1 else ''}", ""]
        lines += table(measure(weights, hard, arguments.rounds))
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text, encoding="utf-8")


def measure(weights: torch.Tensor, hard: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of everything, one for each round."""
    differences, hard_differences = weights[:, 0] - weights[:, 1], hard[:, 0] - hard[:, 1]
    gram = differences.transpose(-1, -2) @ differences
    some = gram[..., : 2 * RANK].contiguous()
    timed: dict[str, Callable[[], object]] = {
        OURS[0]: lambda: truncated(differences, 2 * RANK),
        OURS[1]: lambda: truncated(hard_differences, 2 * RANK),
        OURS[2]: lambda: share(weights, RANK),
        PEERS[0]: lambda: peer(differences, full_matrices=False),
        PEERS[1]: lambda: peer(differences[:FEW]),
        NEEDED[0]: lambda: differences.transpose(-1, -2) @ differences,
        NEEDED[1]: lambda: torch.linalg.eigh(gram),
        NEEDED[2]: lambda: differences @ some,
    }
    times: dict[str, list[float]] = {name: [] for name in timed}
    for name, function in timed.items():
        if name != PEERS[1]:
            function()
    for _ in range(rounds):
        for name, function in timed.items():
            times[name].append(seconds(function) * (PAIRS / FEW if name == PEERS[1] else 1))
    return times


def table(times: dict[str, list[float]]) -> list[str]:
    """The lines of one table, and what bounds the gain."""
    medians = {name: statistics.median(spent) for name, spent in times.items()}

    def faster(names: tuple[str, ...], than: str) -> str:
        spent = [sum(each) for each in zip(*(times[name] for name in names), strict=True)]
        ratios = [t / o for t, o in zip(times[than], spent, strict=True)]
        return f"{statistics.median(ratios):.1f} ×"

    parts = ", ".join(f"{name} {medians[name]:.3f}" for name in NEEDED)
    return [
        f"| | s | faster than torch.linalg.svd, {PEERS[0]} | {PEERS[1]} |",
        "| --- | --- | --- | --- |",
        *(
            f"| growkit: {name} | {medians[name]:.2f} | {faster((name,), PEERS[0])} "
            f"| {faster((name,), PEERS[1])} |"
            for name in OURS
        ),
        *(f"| torch.linalg.svd, {name} | {medians[name]:.2f} | | |" for name in PEERS),
        "",
        f"What the factors need, timed alone, in seconds: {parts}. Against {PEERS[0]}, all three "
        f"are faster by {faster(NEEDED, PEERS[0])}, the two products by "
        f"{faster(NEEDED[::2], PEERS[0])}: this way cannot gain more.",
    ]


if __name__ == "__main__":
    main()
