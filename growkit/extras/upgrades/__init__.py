"""Conversions to classes of transformers with another architecture, with the function kept."""
