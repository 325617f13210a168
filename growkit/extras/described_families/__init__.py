"""Families that users describe, as far as their classes confirm them."""
