"""Granite with multi-head latent attention."""
