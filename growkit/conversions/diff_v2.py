"""Softmax attention to DIFF V2, so that a trained model continues as a differential one.

Every signal head gets a noise head with the same query, which reads the same keys, and λ is
projected from the token by zeros. Then λ = σ(0) = ½ everywhere, the heads are A V - ½ A V = ½ A V,
and ``o_proj`` times 2 makes up for it. Nothing is rounded. Everything can train: the noise queries
get -½ of what the signal queries get, and the projection sees -¼ of what the noise heads hold.

https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2
"""

from collections.abc import Mapping
from functools import partial

from growkit.base.tensors import Config, TensorInfo, Weights
from growkit.conversions.rewriting import OnDiffTransformer, refuse, rewrite
from growkit.families.diff_transformer import FAMILY as DIFF
from growkit.families.diff_transformer import has_noise_heads
from growkit.planning.operation import Change
from growkit.planning.transforms import Constant, Kept, Mapped, Transform, row_maps


class DiffV2(OnDiffTransformer):
    """See the module."""

    name = "diff-v2"
    paper = "https://github.com/microsoft/unilm/tree/master/Diff-Transformer/Diff-Transformer-V2"

    def plan(self, source: Weights, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        diff = DIFF.complete(source.config)
        if has_noise_heads(diff):
            raise refuse(self.name, diff, "its noise heads have λ of another kind")
        switches = {"lambda_type": "projected", "noise_keys": "shared"}
        return Change([rewrite(source, differential(diff, switches), noise_like_signal)])


def differential(config: Config, switches: Mapping[str, object]) -> Config:
    """The config of a softmax model with as many noise as signal heads."""
    heads = config["num_attention_heads"]
    return config | dict(switches) | {"num_attention_heads": 2 * heads, "num_noise_heads": heads}


def doubled(name: str, info: TensorInfo, why: str) -> Transform:
    """A tensor whose rows come twice."""
    rows, *others = info.shape
    maps = partial(row_maps, (rows // 2, *others), (*range(rows // 2),) * 2)
    return Mapped(name, maps, why, alike=False)


def noise_like_signal(name: str, info: TensorInfo, layer: int | None) -> Transform | None:
    """Noise queries copy signal queries, λ is ½, and the output makes up for it."""
    if name.endswith(("q_proj.weight", "q_proj.bias")):
        return doubled(name, info, "noise heads copy signal heads")
    if name.endswith("o_proj.weight"):
        return Kept(name, 2.0, "× 2, because λ is ½")
    of_lambda = name.endswith("lambda_proj.weight")
    return Constant(info.dtype, 0.0, "zero, so that λ is ½") if of_lambda else None


OPERATION = DiffV2()
