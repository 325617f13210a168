"""Conversions to classes with another architecture, with the function kept."""
