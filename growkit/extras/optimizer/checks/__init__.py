"""Checks of the proof on training."""
