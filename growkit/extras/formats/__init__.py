"""Formats of other programs: files of weights, and quantised weights."""
