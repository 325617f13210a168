"""Families of classes of transformers that growkit does not know, inferred from the class."""
