"""Conversion of one residual stream to several, mixed by hyper-connections, exactly.

Each of n streams holds 2/n of the state, n a power of two (Zhu et al., "Hyper-Connections",
arXiv 2409.19606; the form is that of DeepSeek-V4). All mappings start with the scale and the base
zero. A block then reads the sum of the streams times σ(0) = ½, which is the state; its output, of
which 2/n is written, is added to every stream with 2σ(0) = 1; and streams are mixed evenly, which
changes nothing as long as they are equal. The head reads the sum times ½.

The random projections before the zero scales let the streams part: scales and bases train from the
first step on, and projections from the second.
"""

from collections.abc import Mapping
from dataclasses import replace

from growkit.base.options import Option
from growkit.base.tensors import TensorInfo
from growkit.extras.composed_transforms import Stacked
from growkit.extras.starts import drawn_uniformly
from growkit.extras.upgrades.more_general import upgraded
from growkit.model.families.family_parts import Member
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Constant, Kept, Transform

STREAMS = Option("streams", "number of residual streams", ("4", "2", "8"))

WRITES = (
    "embed_tokens.weight",
    "o_proj.weight",
    "o_proj.bias",
    "down_proj.weight",
    "down_proj.bias",
    ".w2.weight",
    "experts.down_proj",
)
"""The tensors that write the state."""

EXPERTS = {
    "mlp.gate.weight": ["gate"],
    "mlp.experts.gate_up_proj": ["experts.{}.w1", "experts.{}.w3"],
    "mlp.experts.down_proj": ["experts.{}.w2"],
}
"""Names inside layers of experts, and of the tensors of Mixtral that they hold, one by one."""

HEAD, NORM = "lm_head.weight", "model.norm.weight"


class HyperConnections(Operation):
    """See the module."""

    name = "hyper-connections"
    paper = "https://arxiv.org/abs/2409.19606"
    options = (STREAMS,)

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        target, config = upgraded(source, self.name)
        streams = int(options[STREAMS.name])
        config |= {
            "attention_bias": any(name.endswith("q_proj.bias") for name in source.tensors),
            "use_qk_norm": any(name.endswith("q_norm.weight") for name in source.tensors),
            "hc_mult": streams,
            "hc_sinkhorn_iters": 20,
            "hc_eps": 0.0,
        }
        tied = HEAD not in target.patterns(config)

        def special(member: Member, info: TensorInfo) -> Transform | None:
            name = member.name
            if name not in source.tensors and ".mlp." in name:
                return _of_experts(source, name, info, streams)
            if name not in source.tensors:
                if name.endswith("fn"):
                    return drawn_uniformly(f"{seed}:{name}", info)
                return Constant(info.dtype, 0.0, "new")
            if name.endswith(WRITES):
                return Kept(name, 2 / streams, f"the part of one of {streams} streams")
            if name == NORM and tied:  # whose head is the embedding
                return Kept(name, streams / 2, "takes back the factor of the embedding")
            return None

        plan = rewrite(source, target, config, special)
        waits = frozenset(name for name in plan.by_target if name.endswith("fn"))
        return Change([replace(plan, waits=waits)])


def _of_experts(source: Model, name: str, info: TensorInfo, streams: int) -> Transform:
    """A tensor of experts, from those of Mixtral, whose files have a tensor for each expert."""
    layer, _, inside = name.partition("mlp.")
    names = [f"{layer}block_sparse_moe.{part}.weight" for part in EXPERTS[f"mlp.{inside}"]]
    if len(info.shape) == 2:
        return Kept(names[0])
    rows = info.shape[1] // len(names)

    def kept(of: str) -> Transform:
        return Kept(of, 2 / streams if of.endswith(WRITES) else 1.0)

    parts = [[(kept(of.format(at)), rows) for of in names] for at in range(info.shape[0])]
    return Stacked(parts, "experts of a layer in one tensor")


OPERATION = HyperConnections()
