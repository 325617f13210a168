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
    field = np.empty((len(rows), steps * LANES), np.int16)
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    for run in np.split(np.arange(len(rows)), breaks):
        if len(run):
            generator = Philox(key=words)
            generator.advance(int(rows[run[0]]) * steps)
            raw = generator.random_raw(len(run) * steps * 4)
            # Little-endian words, so that the four numbers of a word have their places everywhere.
            numbers = np.asarray(raw, "<u8").view("<i2").astype(np.int16, copy=False)
            field[run[0] : run[-1] + 1] = numbers.reshape(len(run), -1)
    return field[:, :columns]
