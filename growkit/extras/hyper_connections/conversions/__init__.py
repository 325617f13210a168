"""Conversions to models with several residual streams."""
