"""Conversions between variants of differential attention, one file each: ``OPERATION``."""
