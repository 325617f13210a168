"""The DIFF Transformer with a Mamba-2 mixer beside the attention of every layer."""

from growkit.extras.upgrades.modeling import own_class

OWN_CLASS = own_class("hybrid_diff", "HybridDiff", "growkit.extras.differential.modeling")
