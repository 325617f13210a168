"""Motif-3: its description, and a class that runs it."""
