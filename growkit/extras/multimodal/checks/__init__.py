"""Checks of what is around the language models, one file each: ``CHECK``."""
