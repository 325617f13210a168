"""Conversions, one file each: it defines ``OPERATION``.

Those between attention variants begin with DIFF Transformers; every model that can be read as one
(``layouts``) can be converted.
"""
