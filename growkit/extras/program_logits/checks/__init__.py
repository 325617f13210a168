"""Checks of the proof that this extra adds."""
