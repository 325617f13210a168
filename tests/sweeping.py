"""Sweeps by hand: one check of many seeds, and a line for each that fails."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROUNDING = 1e-12
"""Relative error, at most, of what is to be the same in float64."""


def say(line: str) -> None:
    """Print a line at once: sweeps take hours."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def sweep(
    title: str,
    seeds: range,
    check: Callable[[int, Path], float | None],
    told: Callable[[int], object] = lambda seed: "",
) -> int:
    """Try many seeds.

    Args:
        title: what is tried.
        seeds: those to try.
        check: takes a seed and an empty folder, and raises what is wrong; or returns a relative
            error, which is to be rounding.
        told: what a line says of a seed that fails.

    Returns:
        The number of seeds that fail.
    """
    wrong, largest, begin = 0, 0.0, time.time()
    for seed in seeds:
        problem = ""
        with tempfile.TemporaryDirectory() as folder:
            try:
                error = check(seed, Path(folder)) or 0.0
            except Exception as raised:
                problem = f"{type(raised).__name__}: {raised}"
            else:
                largest = max(largest, error)
                problem = f"{error:.2g}" if error >= ROUNDING else ""
        if problem:
            wrong += 1
            say(f"{title} seed {seed}: {problem} {told(seed)}".rstrip())
    hold = f"{len(seeds) - wrong} of {len(seeds)} hold"
    say(f"{title:24} {hold}, {largest:.1e}  {time.time() - begin:.1f} s")
    return wrong
