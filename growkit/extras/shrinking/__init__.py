"""Smaller models: a growth is undone, or what is unused, or tokens, are left out."""
