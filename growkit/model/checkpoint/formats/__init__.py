"""Formats of weights that growkit writes as well (``growkit.model.checkpoint.format``)."""
