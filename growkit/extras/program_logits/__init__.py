"""Logits that other programs computed, compared with those of the source's own class."""
