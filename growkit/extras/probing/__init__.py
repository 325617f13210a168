"""Probes: grow candidates from a model, train them under the same conditions, and rank them."""
