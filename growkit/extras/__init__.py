"""Additions that the core finds by their place and never imports.

Each package is one extra. ``growkit.base.lazy.of_extras`` looks in it for the packages ``growth``,
``conversions``, ``reductions`` (ways to shrink), ``own_classes``, ``checks``, ``weight_formats``,
``quantised``, ``companions`` (files that grow with a model), ``results`` (that commands print,
sections of proofs, and what a growth says of companions) and ``views`` (of results), with a file
for each of these; and for modules ``addresses``, which finds models that are not folders,
``families``, which describes further families, ``descriptions``, which checks what users describe,
``dequantising``, which reads quantised weights as dense ones, and ``language_models``, which takes
them out of multimodal ones. Its descriptions of families (YAML) and classes (``modeling_NAME.py``)
are found in any of its folders.
"""
