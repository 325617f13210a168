"""SIGKILL at a moment that is chosen beforehand."""

from __future__ import annotations

import os
import signal

from tests.faults.world import Hook


def kill_at(number: int) -> Hook:
    """Dies at the call of the system of this number, counted from 0."""
    left = iter(range(number))

    def hook(name: str, after: bool, about: object) -> None:
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return hook


def kill_after(seconds: float) -> None:
    """Dies, whatever it is doing then."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
