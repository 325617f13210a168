"""Conversion of DIFF to DINT: the integral of the signal maps is added, with weight γ.

Gated, γ = g · λ with a learnable g per layer that begins at 0: the function is the same, and the
model learns the weight of the integral. Unified, γ = λ from the first step, as in the paper:
another function.

DINT has no factor 1 - λ_init. It moves into the weight of the head norm, which is stored in
float64, so that nothing is rounded.

Cang et al., "DINT Transformer", arXiv 2501.17486, equations 5 to 9.
"""

from collections.abc import Mapping

from growkit.base.options import Option
from growkit.base.tensors import TensorInfo
from growkit.extras.composed_transforms import Computed
from growkit.extras.differential.conversions.layout_conversions import OnDiffTransformer, refuse
from growkit.extras.differential.diff_family import FAMILY as DIFF
from growkit.model.families.family_parts import Member
from growkit.model.model import Model
from growkit.planning.operation import Change
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Constant, Transform

THROUGH_DIFF_V2 = "run the recipe dint-from-softmax, which converts it --to diff-v2 first"


class Dint(OnDiffTransformer):
    """See the module."""

    name = "dint"
    paper = "https://arxiv.org/abs/2501.17486"
    options = (
        Option(
            "gamma", "weight of the integral: a gate times λ, or λ itself", ("gated", "unified")
        ),
        Option(
            "integral", "which integral; column_mean sees later tokens", ("causal", "column_mean")
        ),
        Option(
            "integral_method",
            "how a causal integral is computed: by its series in long texts alone (auto), always "
            "exactly, or always by the series, which is as fast as DIFF",
            ("auto", "exact", "series"),
            unrecorded="exact",
        ),
    )

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        diff = self.with_noise_heads(source, "it has no λ", THROUGH_DIFF_V2)
        if diff["integral"] != "none":
            raise refuse(self.name, diff, "it has an integral already")
        config = diff | {option.name: options[option.name] for option in self.options}
        moves = diff["head_output_scale"] != "none" and diff["head_norm"] != "none"
        if moves:
            config |= {"head_output_scale": "none", "head_norm": "affine"}
        if options["integral"] == "column_mean":
            config["use_cache"] = False
            if options["integral_method"] == "auto":
                config["integral_method"] = "exact"  # a column mean has no series

        def special(member: Member, info: TensorInfo) -> Transform | None:
            if member.name.endswith("gamma_gate"):
                return Constant(info.dtype, 0.0, "zero, so that the integral adds nothing yet")
            if not (moves and member.name.endswith("head_norm.weight")):
                return None
            factor = 1 - diff["lambda_init"][member.layer]
            if diff["head_norm"] == "plain":
                return Constant("F64", factor, "the factor 1 - λ_init")
            why = "times the factor 1 - λ_init"
            return Computed((member.name,), why, lambda norm: norm.double() * factor, dtype="F64")

        plan = rewrite(source, DIFF, config, special)
        settled = {"integral_method": config["integral_method"]}
        if options["gamma"] == "gated":
            return Change([plan], settled=settled)
        return Change(
            [plan], "different", "γ = λ from the first step: the integral is new", settled
        )


OPERATION = Dint()
