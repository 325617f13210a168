"""The transformers model for every variant of differential attention.

The only place with attention mathematics. Its files are copied next to exported weights, so that a
folder loads without growkit installed; they do not import growkit.
"""
