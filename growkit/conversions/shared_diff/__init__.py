"""Shared DIFF: queries and keys as shared bases with low-rank updates."""

from growkit.conversions.shared_diff.conversion import OPERATION as OPERATION
