"""Speed of the best shared base with low-rank updates, against ``torch.linalg.svd`` head by head.

    python benchmarks/low_rank.py [--rounds 7]

d_model 4096, heads of 128, 32 pairs of signal and noise heads, rank 32, float64, on the CPU. The
peer is called once per pair on the difference of the two: as it comes (``full_matrices`` left at
its default, which computes all 4096 left vectors; timed on two pairs and scaled up), and without
them. Ours is timed for the factors alone, which is what the peer computes, and with base and
updates; and what the factors cannot do without. All must agree on the residual.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from measuring import head, in_turn, machine, ratio, row, seconds

from growkit.extras.differential.low_rank import share, truncated

HIDDEN, HEAD_DIM, PAIRS, RANK = 4096, 128, 32, 32
FEW = 2
OURS = ("factors", "factors, ill-conditioned", "factors, base, updates")
NEEDED = ("DᵀD alone", "eigenvectors alone", "D V alone")
PEERS = ("full_matrices=False", "default (full_matrices=True)")


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


def measure(weights: torch.Tensor, hard: torch.Tensor, rounds: int) -> dict[str, list[float]]:
    """Seconds of everything, one for each round."""
    differences, hard_differences = weights[:, 0] - weights[:, 1], hard[:, 0] - hard[:, 1]
    gram = differences.transpose(-1, -2) @ differences
    some = gram[..., : 2 * RANK].contiguous()
    functions: tuple[Callable[[], object], ...] = (
        lambda: truncated(differences, 2 * RANK),
        lambda: truncated(hard_differences, 2 * RANK),
        lambda: share(weights, RANK),
        lambda: differences.transpose(-1, -2) @ differences,
        lambda: torch.linalg.eigh(gram),
        lambda: differences @ some,
        lambda: peer(differences, full_matrices=False),
    )
    calls = {
        name: partial(seconds, function)
        for name, function in zip((*OURS, *NEEDED, PEERS[0]), functions, strict=True)
    }
    calls[PEERS[1]] = lambda: PAIRS / FEW * seconds(lambda: peer(differences[:FEW]))
    return in_turn(calls, rounds)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(PAIRS, 2, HIDDEN, HEAD_DIM, dtype=torch.float64, generator=generator)
    hard = weights * torch.logspace(0, -3, HEAD_DIM, dtype=torch.float64)
    print(f"{machine()}; medians of {rounds} rounds, ratios within rounds")
    print(
        f"{PAIRS} pairs of {HIDDEN} × {HEAD_DIM}, rank {RANK}, float64. Residuals agree to "
        f"{residual_error(weights[:4]):.0e}, those of ill-conditioned matrices (columns scaled by "
        f"1 to 1e-3) to {residual_error(hard[:4]):.0e}."
    )
    for threads in sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        times = measure(weights, hard, rounds)
        print(head(f"threads: {threads}", "s", *(f"faster than svd, {each}" for each in PEERS)))
        for name, spent in times.items():
            faster = (f"{ratio(times[each], spent):.1f} ×" for each in PEERS)
            print(row(name, f"{median(spent):.3f}", *faster))


if __name__ == "__main__":
    main()
