"""Conversion of softmax attention to DIFF V2, to continue the training of a model as differential.

Every signal head gets a noise head with the same query and the same keys, and the projection of λ
is zero. Then λ = σ(0) = ½ everywhere, the heads are A V - ½ A V = ½ A V, and ``o_proj`` × 2
compensates. Nothing is rounded. Everything can train: the gradient of noise queries is -½ times
that of signal queries, and the gradient of λ's projection is -¼ times the noise heads.

https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2
"""

from collections.abc import Mapping
from functools import partial

from growkit.base.tensors import Config, TensorInfo
from growkit.extras.differential.conversions.layout_conversions import OnDiffTransformer, refuse
from growkit.extras.differential.diff_family import FAMILY as DIFF
from growkit.model.families.family_parts import Member
from growkit.model.model import Model
from growkit.planning.operation import Change
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Constant, Kept, Mapped, Transform, row_maps


class DiffV2(OnDiffTransformer):
    """See the module."""

    name = "diff-v2"
    paper = "https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2"

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        diff = DIFF.complete(source.config)
        if diff["num_noise_heads"]:
            raise refuse(self.name, diff, "its noise heads have λ of another kind")
        switches = {"lambda_type": "projected", "noise_keys": "shared"}
        return Change([rewrite(source, DIFF, differential(diff, switches), noise_like_signal)])


def differential(config: Config, switches: Mapping[str, object]) -> Config:
    """The config of a softmax model after it gets as many noise heads as signal heads."""
    heads = config["num_attention_heads"]
    return config | dict(switches) | {"num_attention_heads": 2 * heads, "num_noise_heads": heads}


def doubled(name: str, info: TensorInfo, why: str) -> Transform:
    """Repeat all rows of a tensor."""
    rows, *others = info.shape
    maps = partial(row_maps, (rows // 2, *others), (*range(rows // 2),) * 2)
    return Mapped(name, maps, why, alike=False)


def noise_like_signal(member: Member, info: TensorInfo) -> Transform | None:
    """Copy signal queries to noise queries, set λ to ½, and double the output."""
    if member.name.endswith(("q_proj.weight", "q_proj.bias")):
        return doubled(member.name, info, "noise heads copy signal heads")
    if member.name.endswith("o_proj.weight"):
        return Kept(member.name, 2.0, "× 2, because λ is ½")
    of_lambda = member.name.endswith("lambda_proj.weight")
    return Constant(info.dtype, 0.0, "zero, so that λ is ½") if of_lambda else None


OPERATION = DiffV2()
