"""Tools for continued training: parameter groups, and a check at step 0."""

from growkit.extras.loading.step_zero import AssertPreserved, assert_preserved, keep_stored
from growkit.extras.optimizer.param_groups import hidden_matrices, param_groups

__all__ = ["AssertPreserved", "assert_preserved", "hidden_matrices", "keep_stored", "param_groups"]
