"""What continued training needs apart from an engine."""

from growkit.optimizer.groups import hidden_matrices, param_groups
from growkit.training.preserved import AssertPreserved, assert_preserved, keep_stored
from growkit.training.ramps import GammaRamp, rewarming

__all__ = [
    "AssertPreserved",
    "GammaRamp",
    "assert_preserved",
    "hidden_matrices",
    "keep_stored",
    "param_groups",
    "rewarming",
]
