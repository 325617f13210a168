"""Llama with several residual streams."""
