"""Tokens for which a router cannot tell experts apart."""

from growkit.base.tensors import TORCH_NAMES, main_dtype
from growkit.model.families.family_parts import Experts
from growkit.model.model import Model

SHORT = ("F16", "BF16")
"""Dtypes so short that two experts often have equal logits."""


def lost_in_ties(source: Model, experts: Experts, what: str, parts: str) -> str:
    """The loss where a router may not choose copies together; empty if logits are hardly equal.

    Args:
        source: the model, which stores the router in the dtype that it computes in.
        experts: how its family uses experts.
        what: what has equal logits.
        parts: what a token then gets of both.
    """
    dtype = main_dtype(source.tensors)
    if dtype not in SHORT or experts.float32:
        return ""
    return (
        f"a token for which two {what} have equal router logits in {TORCH_NAMES[dtype]} may get "
        f"{parts} of both; --dtype float32 makes it exact"
    )
