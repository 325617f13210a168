"""Families that growkit has no description of, inferred from their classes in transformers."""
