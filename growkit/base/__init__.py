"""Shared foundations: errors, names, units, strict parsing, progress."""
