"""Sections of the proofs of training and of gradients, NAME_section.py: ``SECTION``."""
