"""Checks of the proof: mistakes of conversions, and weights that growkit dequantised."""
