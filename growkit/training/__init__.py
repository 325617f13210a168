"""What continued training needs beside an engine of its own."""

from growkit.training.gamma import GammaRamp
from growkit.training.groups import hidden_matrices, param_groups
from growkit.training.warming import rewarming

__all__ = ["GammaRamp", "hidden_matrices", "param_groups", "rewarming"]
