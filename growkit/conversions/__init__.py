"""Conversions between attention variants, one file each."""
