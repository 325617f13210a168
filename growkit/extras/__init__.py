"""What hangs on the core, which finds it by its place and never imports it.

Each package is one extra. ``growkit.base.lazy.of_extras`` looks in it for the packages
``conversions``, ``own_classes`` and ``checks``, with a file for each of these; for a module
``companion`` on files that grow with a model; and for ``families`` that describes further families.
"""
