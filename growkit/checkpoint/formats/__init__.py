"""Formats of weights that growkit writes as well (``growkit.checkpoint.format``)."""
