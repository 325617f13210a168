"""Sections on differential attention, one file each: ``SECTION``."""
