"""Formats of weights, one per file, as ``FORMAT`` (``growkit.checkpoint.format``)."""
