"""Smaller models: a growth is undone, or tokens are left out."""
