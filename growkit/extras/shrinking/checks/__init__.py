"""Checks of the proof for smaller models."""
