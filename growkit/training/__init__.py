"""What continued training needs beside an engine of its own."""

from growkit.training.gamma import GammaRamp
from growkit.training.groups import hidden_matrices, param_groups
from growkit.training.preserved import AssertPreserved, assert_preserved
from growkit.training.stored import keep_stored
from growkit.training.warming import rewarming

__all__ = [
    "AssertPreserved",
    "GammaRamp",
    "assert_preserved",
    "hidden_matrices",
    "keep_stored",
    "param_groups",
    "rewarming",
]
