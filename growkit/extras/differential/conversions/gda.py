"""Conversion of DIFF to grouped DIFF 1:1: every noise head serves a group of one signal head.

The weights do not change; their layout becomes the one whose config has ``num_noise_heads``. Then
``grow --method group-diff --signal-heads xN`` makes the groups larger.

Grouped differential attention, arXiv 2510.06949.
"""

from collections.abc import Mapping

from growkit.extras.differential.conversions.layout_conversions import OnDiffTransformer, refuse
from growkit.extras.differential.diff_family import FAMILY as DIFF
from growkit.model.model import Model
from growkit.planning.operation import Change
from growkit.planning.rewriting import rewrite


class GroupedDiff(OnDiffTransformer):
    """See the module."""

    name = "gda"
    paper = "https://arxiv.org/abs/2510.06949"

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        diff = self.with_noise_heads(source, "it has no noise heads")
        if diff["num_attention_heads"] != 2 * diff["num_noise_heads"]:
            raise refuse(self.name, diff, "it is grouped already")
        return Change([rewrite(source, DIFF, diff)])


OPERATION = GroupedDiff()
