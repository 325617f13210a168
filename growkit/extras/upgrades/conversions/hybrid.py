"""Addition of a Mamba-2 mixer beside the attention of every layer.

The mixer starts as Mamba-2 does (Dao and Gu, "Transformers are SSMs", arXiv 2405.21060), but for
its last projection, which is zero, so that it adds nothing at first. That projection trains from
the first step on, what is before it from the second. The class is Falcon-H1's ("Falcon-H1",
arXiv 2507.22448), with multipliers as the source has them, or 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.options import MAX_COUNT, Option
from growkit.base.tensors import Config, TensorInfo
from growkit.extras.starts import new_tensor
from growkit.extras.upgrades.more_general import upgraded
from growkit.model.families.family_parts import Member
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Kept, Transform

HEAD_DIM = 64
"""Width of a head of the mixer, if hidden is a multiple of it."""

MIXER_HEADS = Option(
    "mixer_heads",
    f"number of heads of the mixer, each as wide as hidden / mixer_heads (default: one for every "
    f"{HEAD_DIM} coordinates of hidden)",
    form="N",
    kind=int,
    limits=(1, MAX_COUNT),
)
MIXER_STATE = Option(
    "mixer_state",
    "size of the state of each coordinate of the mixer (default: 128)",
    form="N",
    kind=int,
    limits=(1, MAX_COUNT),
)

SETTINGS: Config = {
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "projectors_bias": False,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
}
"""Settings of the class, all written out, since other software has other defaults for them."""

UNKNOWN = ("residual_multiplier", "attention_multiplier", "logits_scaling")
"""Multipliers of Granite that the class has under other names."""

RENAMED = {
    ".feed_forward.": ".mlp.",
    ".pre_ff_layernorm.": ".post_attention_layernorm.",
    "model.final_layernorm.": "model.norm.",
}
"""Parts of names in the target, and the same in the source."""


class ParallelMixer(Operation):
    """See the module."""

    name = "hybrid"
    paper = "https://arxiv.org/abs/2507.22448"
    options = (MIXER_HEADS, MIXER_STATE)

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        target, config = upgraded(source, self.name)
        sizes = source.family.sizes(source.config)
        hidden = sizes["hidden"]
        heads = int(options.get("mixer_heads", max(1, hidden // HEAD_DIM)))
        if hidden % heads:
            raise InputError(
                f"mixer_heads {heads} does not divide hidden {hidden} of {source.where()}; choose "
                "a divisor"
            )
        warnings = []
        if "residual_multiplier" not in target.defaults:  # Falcon-H1 has other names for it
            config = {key: value for key, value in config.items() if key not in UNKNOWN}
            config |= _multipliers(source.complete, sizes["head_dim"])
            if (factor := config["embedding_multiplier"]) != 1:
                warnings.append(
                    f"{target.one} does not multiply inputs_embeds by embedding_multiplier "
                    f"{factor:g}, as {source.family.one} does; multiply what you pass there"
                )
        config |= SETTINGS | {
            "mamba_d_ssm": hidden,
            "mamba_n_heads": heads,
            "mamba_d_head": hidden // heads,
            "mamba_d_state": int(options.get("mixer_state", 128)),
            "attention_bias": any(name.endswith("q_proj.bias") for name in source.tensors),
        }

        def special(member: Member, info: TensorInfo) -> Transform | None:
            name = member.name
            for new, old in RENAMED.items():
                name = name.replace(new, old)
            if name in source.tensors:
                return Kept(name)
            return new_tensor(member, f"{seed}:{name}", info)

        plan = rewrite(source, target, config, special)
        waits = {name for name in plan.by_target if ".mamba." in name and ".out_proj." not in name}
        return Change([replace(plan, waits=frozenset(waits))], warnings=warnings)


def _multipliers(config: Config, width: int) -> Config:
    """The multipliers of a model, as those of the class; of what it has none, 1."""
    root = width**0.5
    residual = config.get("residual_multiplier", 1.0)
    return {
        "attention_in_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": [1.0] * 5,
        "embedding_multiplier": config.get("embedding_multiplier", 1.0),
        "lm_head_multiplier": 1 / config.get("logits_scaling", 1.0),
        "key_multiplier": config.get("attention_multiplier", 1 / root) * root,
        "attention_out_multiplier": residual,
        "mlp_multipliers": [1.0, residual],
    }


OPERATION = ParallelMixer()
