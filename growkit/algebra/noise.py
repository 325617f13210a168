"""Noise by counter: a number for each place of a tensor that depends on the place alone.

Philox4×64 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) turns a key and a
counter into random words. The key comes from seed, tensor and purpose, the counter from the place.
So no order, block size, thread or rank changes a bit, and any part of the noise is had without
the rest. Only raw words are used: these, unlike numpy's distributions, stay the same for ever.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.random import Philox
from numpy.typing import NDArray

LANES = 16
"""Numbers of 16 bits that one step of the counter gives: four words of 64 bits."""


def noise(key: str, rows: NDArray[np.int64], columns: int) -> NDArray[np.int16]:
    """Whole numbers from -2¹⁵ to 2¹⁵ - 1, all equally likely.

    Args:
        key: what tells one field of noise from another.
        rows: which rows of the field, in ascending order.
        columns: how many columns it has.

    Returns:
        The noise of these rows, [rows, columns].
    """
    steps = -(-columns // LANES)
    digest = hashlib.sha256(key.encode()).digest()
    words = np.frombuffer(digest[:16], "<u8").astype(np.uint64)
    runs = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
    drawn = [_neighbours(words, run, steps) for run in runs]
    field = drawn[0] if len(drawn) == 1 else np.concatenate(drawn)
    return field[:, :columns]


def _neighbours(key: NDArray[np.uint64], rows: NDArray[np.int64], steps: int) -> NDArray[np.int16]:
    """The noise of rows that follow each other, of so many steps of the counter each."""
    generator = Philox(key=key)
    generator.advance(int(rows[0]) * steps if len(rows) else 0)
    raw = generator.random_raw(len(rows) * steps * 4)
    # Little-endian words, so that the four numbers of a word have their places everywhere.
    numbers = np.asarray(raw, "<u8").view("<i2").astype(np.int16, copy=False)
    return numbers.reshape(len(rows), steps * LANES)
