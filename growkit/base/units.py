"""Sizes and times as people read them, in units that fit."""

from __future__ import annotations

UNITS = ("bytes", "kB", "MB", "GB", "TB")


def size(count: float) -> str:
    """A number of bytes, e.g. ``6.43 MB``."""
    *units, largest = UNITS
    for unit in units:
        if float(f"{count:.3g}") < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {largest}" if count < 1000 else f"{count:,.0f} {largest}"


def duration(seconds: float) -> str:
    """A time, e.g. ``2 min 5 s``."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
