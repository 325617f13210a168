"""Checks of the proof on differential attention."""
