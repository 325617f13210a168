"""Sections on differential attention, NAME_section.py: ``SECTION``."""
