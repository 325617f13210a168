"""Checks of the proof on adapters."""
