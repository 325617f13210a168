"""Formats of other programs: files of weights, quantised weights, and mistakes of conversions."""
