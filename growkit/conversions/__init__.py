"""Conversions between attention variants, one file each: it defines ``OPERATION``.

All of them begin with DIFF Transformers; every model that can be read as one (``layouts``) can be
converted.
"""
