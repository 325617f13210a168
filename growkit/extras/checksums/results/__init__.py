"""Results of checking a folder."""
