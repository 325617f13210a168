"""Shared foundations: errors, names, units, strict parsing, progress."""

__version__ = "0.1.0"
