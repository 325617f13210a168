"""Differential attention: its family, its public layouts, and the conversions between its variants.

A conversion is one file: it defines ``OPERATION``. Every model that can be read as a DIFF
Transformer (``growkit.extras.differential.layouts``) can be converted.
"""
