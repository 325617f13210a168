"""Conversions, one file each: it defines ``OPERATION``.

Those between variants of differential attention are in ``growkit.extras.differential``, those to
other architectures in ``growkit.extras.upgrades``, those to files of other programs in
``growkit.extras.formats``.
"""
