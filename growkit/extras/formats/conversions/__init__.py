"""Conversions to the files of other programs."""
