"""Formats of weights of other programs, one per file, as ``FORMAT``."""
