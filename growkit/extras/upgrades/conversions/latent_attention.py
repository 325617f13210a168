"""Conversion of grouped-query attention to multi-head latent attention (MLA), exactly.

Each token caches a latent vector and one rotary key for all heads (DeepSeek-AI, "DeepSeek-V2",
arXiv 2405.04434, section 2.1). Here, with g key-value heads of width d:

- The rotary key holds the keys of all KV heads side by side, pair i of head j at j·d/2 + i of each
  half. The queries of a head are zero outside its own KV head. LongRoPE's factors with base 1 give
  each pair the frequency that it has in the source, and ``mscale_all_dim`` multiplies scores by √g,
  since the class divides them by √(g·d) in place of √d.
- The latent holds the values of all KV heads, and constants b from the bias with
  Σ b² = n·2^60 for n coordinates. The RMSNorm of the latent then divides by 2^30, whatever the
  values are: they change the mean by less than 2^-60 of their own mean square. The norm's weight
  2^30 takes this back without rounding. By Lagrange's theorem, four constants are enough.
- If queries have biases, they go through a latent of their own, in the same way.

Everything but the constants trains at the source's scale from the first step on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from growkit.algebra.expansion import NOTHING
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import FLOAT_BITS, TORCH_NAMES, Config, TensorInfo, main_dtype
from growkit.families.description import Member
from growkit.families.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.rewriting import rewrite, upgraded
from growkit.planning.transforms import Computed, Constant, Mapped, Transform, row_maps

CONSTANTS = 4
"""Coordinates of a latent with constants."""

EXPONENT = 30
"""The norm of a latent divides by two to this power."""


class LatentAttention(Operation):
    """See the module."""

    name = "mla"
    paper = "https://arxiv.org/abs/2405.04434"

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        target, config = upgraded(source, self.name)
        _check_dtype(source)
        sizes = source.family.sizes(source.config)
        biased = any(name.endswith("self_attn.q_proj.bias") for name in source.tensors)
        heads = _Heads(source, sizes["heads"], sizes["kv_heads"], sizes["head_dim"], biased)
        config = {key: value for key, value in config.items() if key not in REPLACED}
        config |= heads.config()
        dense = target.complete(config)["first_k_dense_replace"]
        config["first_k_dense_replace"] = max(dense, sizes["layers"])
        return Change(
            [rewrite(source, target, config, heads.transform, divergence="latents are new")]
        )


REPLACED = ("head_dim", "rope_theta", "rope_scaling", "rope_parameters")
"""Keys that the config of the latents replaces."""


def _check_dtype(source: Model) -> None:
    dtype = main_dtype(source.tensors)
    if FLOAT_BITS[dtype][0] < 8:
        raise InputError(
            f"the weights in {source.where()} are {TORCH_NAMES[dtype]}, which cannot hold the "
            f"constants of latents, about 2^{EXPONENT}; pass --dtype bfloat16 or --dtype float32"
        )


@dataclass(frozen=True)
class _Heads:
    """The heads of the source, and their places in the latents.

    Attributes:
        source: the source.
        heads: number of query heads.
        kv_heads: number of KV heads.
        width: of a head.
        biased: whether queries have biases.
    """

    source: Model
    heads: int
    kv_heads: int
    width: int
    biased: bool

    def config(self) -> Config:
        """The keys of the config that describe the latents."""
        keys = self.kv_heads * self.width
        return {
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.heads * self.width + CONSTANTS if self.biased else None,
            "kv_lora_rank": keys + CONSTANTS,
            "qk_rope_head_dim": keys,
            "qk_nope_head_dim": 0,
            "v_head_dim": self.width,
            "attention_bias": True,
            "rope_interleave": False,
            "num_nextn_predict_layers": 0,
            **_rope(self.source, self.width, self.kv_heads),
        }

    @cached_property
    def key_rows(self) -> tuple[int, ...]:
        """The row of ``k_proj`` at each place of the rotary key."""
        pairs, heads = range(self.width // 2), range(self.kv_heads)
        halves = (0, self.width // 2)
        return tuple(
            head * self.width + half + pair for half in halves for head in heads for pair in pairs
        )

    @cached_property
    def query_rows(self) -> tuple[int, ...]:
        """The row of ``q_proj`` at each place of the queries; NOTHING outside their KV head."""
        group = self.heads // self.kv_heads
        places = [divmod(row, self.width) for row in self.key_rows]
        return tuple(
            head * self.width + row if kv_head == head // group else NOTHING
            for head in range(self.heads)
            for kv_head, row in places
        )

    @cached_property
    def value_rows(self) -> tuple[int, ...]:
        """The coordinate of the latent at each row of the values."""
        group = self.heads // self.kv_heads
        return tuple(
            head // group * self.width + row
            for head in range(self.heads)
            for row in range(self.width)
        )

    def transform(self, member: Member, info: TensorInfo) -> Transform | None:
        """The transform of a tensor of the target; None keeps the source's."""
        before, attention, name = member.name.partition(".self_attn.")
        module, _, kind = name.rpartition(".")
        placed = {"q_b_proj": self.query_rows, "kv_b_proj": self.value_rows}
        down = {"q_a_proj": ("q_proj",), "kv_a_proj_with_mqa": ("v_proj", "k_proj")}
        if module == "q_proj":
            maps = partial(row_maps, self.source.tensors[member.name].shape, self.query_rows)
            return Mapped(member.name, maps, "zeros outside the KV head of each head")
        if module in placed:
            ones = partial(_ones, placed[module], info)
            return Computed((), "ones at the places of the heads", ones, dtype=info.dtype)
        if module in down:
            old = [f"{before}{attention}{projection}.{kind}" for projection in down[module]]
            names = tuple(name for name in old if name in self.source.tensors)
            latent = partial(self._latent, info, module == "kv_a_proj_with_mqa")
            why = "constants, and biases of the source" if kind == "bias" else "put together"
            return Computed(names, why, latent, dtype=info.dtype)
        if module in ("q_a_layernorm", "kv_a_layernorm"):
            return Computed((), f"2^{EXPONENT}", partial(_norm, info), dtype=info.dtype)
        if member.name not in self.source.tensors:
            return Constant(info.dtype, 0.0, "new")  # the bias of o_proj
        return None

    def _latent(self, info: TensorInfo, with_keys: bool, *projections: Tensor) -> Tensor:
        """Rows of a latent and its constants, and the rows of the rotary key if there are any."""
        keys = self.kv_heads * self.width if with_keys else 0
        latent = info.shape[0] - keys
        down = torch.zeros(info.shape, dtype=info.torch_dtype)
        if len(info.shape) == 1:
            down[latent - CONSTANTS : latent] = _constants(latent)
        if projections:
            down[: latent - CONSTANTS] = projections[0]
        if projections and keys:
            down[latent:] = projections[1][list(self.key_rows)]
        return down


def _ones(columns: Sequence[int], info: TensorInfo) -> Tensor:
    """A matrix with a 1 in each row, at a column; without one for NOTHING."""
    matrix = torch.zeros(info.shape, dtype=info.torch_dtype)
    at = torch.tensor(columns)
    rows = (at != NOTHING).nonzero()[:, 0]
    matrix[rows, at[rows]] = 1
    return matrix


def _norm(info: TensorInfo) -> Tensor:
    """The weight of a latent's norm, which multiplies constants by 1."""
    weight = torch.full(info.shape, 2.0**EXPONENT, dtype=info.torch_dtype)
    weight[-CONSTANTS:] = 1
    return weight


def _constants(size: int) -> Tensor:
    """Constants of a latent whose mean square over all coordinates is 4 to the power of EXPONENT.

    Args:
        size: number of all coordinates, a sum of four squares by Lagrange's theorem.
    """
    for first in range(math.isqrt(size), -1, -1):
        for second in range(math.isqrt(size - first**2), -1, -1):
            rest = size - first**2 - second**2
            for third in range(math.isqrt(rest), -1, -1):
                fourth = math.isqrt(rest - third**2)
                if fourth**2 == rest - third**2:
                    roots = (first, second, third, fourth)
                    return torch.tensor(roots, dtype=torch.float64) * 2.0**EXPONENT
    raise AssertionError(f"{size} is no sum of four squares")


def _rope(source: Model, width: int, kv_heads: int) -> Config:
    """Rotary parameters that give every KV head the frequencies of the source, spelled as there.

    Raises:
        InputError: the frequencies are not fixed, or not all of a head is rotated.
    """
    rope, theta = _spelled_out(source.config)
    context = source.config.get("max_position_embeddings")
    if rope == "default" and isinstance(theta, int | float) and isinstance(context, int):
        short = long = [theta ** (pair / width) for pair in range(0, width, 2)]
        factor, original = 1.0, context
    else:
        from growkit.engine.rotary import FIXED, rotary_of  # imports torch

        rotary = rotary_of(source.config)
        if rotary is None or 2 * len(rotary.short) != width:
            raise InputError(
                f"config.json in {source.where()} has rotary embeddings that latent attention "
                "cannot have; only models that rotate whole heads, with rope_type default, "
                f"{', '.join(FIXED)}, can be converted"
            )
        short, long = [*rotary.short], [*rotary.long]
        factor, original = rotary.factor, rotary.original
    base = {"rope_theta": 1.0}
    scaling = {
        "rope_type": "longrope",
        "short_factor": short * kv_heads,
        "long_factor": long * kv_heads,
        "attention_factor": factor,
        "original_max_position_embeddings": original,
        "factor": math.e,
        "mscale_all_dim": 10 * (kv_heads**0.25 - 1),
    }
    if "rope_parameters" in source.config:
        return {"rope_parameters": base | scaling}
    return base | {"rope_scaling": scaling}  # which transformers 4 reads


def _spelled_out(config: Config) -> tuple[object, object]:
    """The type and the base of rotary embeddings that a config states, without its class."""
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping):
        scaled = config.get("rope_scaling") is not None
        rope = {"rope_type": None if scaled else "default", "rope_theta": config.get("rope_theta")}
    partial_factor = {config.get("partial_rotary_factor"), rope.get("partial_rotary_factor")}
    whole = partial_factor <= {None, 1}
    return rope.get("rope_type") if whole else None, rope.get("rope_theta")


OPERATION = LatentAttention()
