"""Freed memory: what the C library keeps for the next tensor, and what goes back to the system.

glibc gives large blocks back as they are freed, and gets every page of the next one anew, each with
a fault and filled with zeros.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""mallopt(3)."""

LARGEST = 1 << 25
"""Bytes of a block, at most, that glibc can be asked to keep."""


def keep_freed(most: int) -> None:
    """Let the process keep so many bytes that are free, for blocks of up to ``LARGEST`` bytes.

    Nothing happens where the C library is another one.
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            libc = ctypes.CDLL(None)
            libc.mallopt(M_MMAP_THRESHOLD, LARGEST)
            libc.mallopt(M_TRIM_THRESHOLD, most)


def give_back() -> None:
    """Give the system back what is free.

    glibc keeps what lies between tensors that are still in use, a fifth of a proof's peak
    (measured).
    """
    if sys.platform == "linux":
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
