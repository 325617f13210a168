"""Sections of the proofs of training and of gradients, one file each: ``SECTION``."""
