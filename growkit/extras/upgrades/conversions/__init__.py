"""Conversions to other architectures, one file each: ``OPERATION``."""
