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
- Multipliers and norms of heads stay, in a class of growkit's own; norms keep latents from being
  compressed.

Everything but the constants trains at the source's scale from the first step on.

With a rank, latents are compressed (``growkit.extras.upgrades.mla_compression``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from growkit.algebra.expansion import NOTHING
from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.options import Value
from growkit.base.tensors import (
    FLOAT_BITS,
    FLOAT_BYTES,
    TORCH_NAMES,
    Config,
    TensorInfo,
    main_dtype,
)
from growkit.extras.composed_transforms import Computed
from growkit.extras.upgrades.mla_compression import (
    ATTENTION,
    OPTIONS,
    Bases,
    LatentSearch,
    LatentWay,
    Shape,
    check_latents,
)
from growkit.extras.upgrades.more_general import upgraded
from growkit.model.families.family import Family
from growkit.model.families.family_parts import Member
from growkit.model.model import Model
from growkit.planning.operation import Change, Operation
from growkit.planning.plan import Plan, TargetCheck
from growkit.planning.rewriting import rewrite
from growkit.planning.transforms import Constant, Mapped, Transform, row_maps
from growkit.results.proof_result import Spectrum

CONSTANTS = 4
"""Coordinates of an exact latent with constants; one is enough if a projection may round."""

EXPONENT = 30
"""The norm of a latent divides by two to this power."""


class LatentAttention(Operation):
    """See the module."""

    name = "mla"
    paper = "https://arxiv.org/abs/2405.04434"
    options = OPTIONS

    def plan(self, source: Model, options: Mapping[str, str], seed: int) -> Change:
        """See ``growkit.planning.operation.Operation``."""
        target, config = upgraded(source, self.name)
        _check_dtype(source)
        sizes = source.family.sizes(source.config)
        biased, normed = (
            any(name.endswith(f"self_attn.{part}") for name in source.tensors)
            for part in ("q_proj.bias", "q_norm.weight")
        )
        counts = sizes["heads"], sizes["kv_heads"], sizes["head_dim"]
        heads = LatentHeads(source, *counts, biased, normed)
        if "rank" in options:
            if normed:
                raise InputError(
                    f"{source.where()} has a norm of every key head, so that latents cannot hold "
                    "less than all of it; leave out rank"
                )
            return _compressed(heads, target, config, options)
        if options:
            raise InputError(f"{next(iter(options))} needs a rank; leave it out, or give one")
        return Change([_rewritten(heads, target, config)])


def _rewritten(heads: LatentHeads, target: Family, config: Config, **more: Any) -> Plan:
    config = {key: value for key, value in config.items() if key not in REPLACED}
    config |= heads.config()
    dense = "first_k_dense_replace"
    if dense in target.defaults:
        completed = target.complete(config)
        config[dense] = max(completed[dense], completed["num_hidden_layers"])
        config["num_nextn_predict_layers"] = 0
    divergence = "latents are new"
    return rewrite(heads.source, target, config, heads.transform, divergence=divergence, **more)


def _compressed(
    heads: LatentHeads, target: Family, config: Config, options: Mapping[str, str]
) -> Change:
    source, layers = heads.source, config["num_hidden_layers"]
    scale = source.complete.get("attention_multiplier", heads.width**-0.5)
    shape = Shape(heads.heads, heads.kv_heads, heads.width, scale)
    search = LatentSearch(source, shape, layers, 1, options)
    way, tried = search.settle()
    compressed = Compressed(
        source, heads.heads, heads.kv_heads, heads.width, heads.biased, False, search, way
    )
    checks = tuple(map(compressed.check, range(layers)))
    plan = _rewritten(compressed, target, config, checks=checks)
    size = FLOAT_BYTES[main_dtype(source.tensors)] * layers
    full = 2 * heads.kv_heads * heads.width
    lost = (
        f"the part of keys and values that {way.rank:,} numbers cannot hold: a token takes "
        f"{size * way.rank:,} bytes of the cache in place of {size * full:,}"
    )
    settled: dict[str, Value | None] = {"rank": str(way.rank), "tolerance": None}
    settled["pairs"] = ",".join(map(str, way.pairs))
    return Change([plan], "bounded", lost, settled, ranks=tried)


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
class LatentHeads:
    """The heads of the source, and their places in the latents.

    Attributes:
        source: the source.
        heads: number of query heads.
        kv_heads: number of KV heads.
        width: of a head.
        biased: whether queries have biases.
        normed: whether query and key heads have norms.
    """

    source: Model
    heads: int
    kv_heads: int
    width: int
    biased: bool
    normed: bool

    @property
    def latent(self) -> int:
        """Number of coordinates of the latent, but for the constants."""
        return self.kv_heads * self.width

    @property
    def unrotated(self) -> int:
        """Number of coordinates of a head's key that come from the latent."""
        return 0

    @property
    def number_of_constants(self) -> int:
        """Number of the constants of the latent."""
        return CONSTANTS

    @property
    def constants(self) -> Tensor:
        """The constants of the latent."""
        return _constants(self.latent + CONSTANTS)

    @property
    def frequencies(self) -> tuple[int, ...]:
        """The pair of the source whose frequency each pair of the rotary key has."""
        return tuple(range(self.width // 2)) * self.kv_heads

    def config(self) -> Config:
        """The keys of the config that describe the latents."""
        return {
            "num_key_value_heads": self.heads,
            "q_lora_rank": self.heads * self.width + CONSTANTS if self.biased else None,
            "kv_lora_rank": self.latent + self.number_of_constants,
            "qk_rope_head_dim": 2 * len(self.frequencies),
            "qk_nope_head_dim": self.unrotated,
            "v_head_dim": self.width,
            "attention_bias": True,
            "rope_interleave": False,
            **({"rotary_heads": self.kv_heads} if self.normed else {}),
            **_rope(self.source, self.width, self.frequencies, self.unrotated),
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
        if module in ("q_norm", "k_norm"):
            rows = tuple(row % self.width for row in self.key_rows)
            maps = partial(row_maps, self.source.tensors[member.name].shape, rows)
            return Mapped(member.name, maps, "for each KV head")
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
            constants = self.number_of_constants if module == "kv_a_layernorm" else CONSTANTS
            norm = partial(_norm, info, constants)
            return Computed((), f"2^{EXPONENT}", norm, dtype=info.dtype)
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


@dataclass(frozen=True)
class Compressed(LatentHeads):
    """Heads whose latents are compressed.

    Attributes:
        search: what computes the bases.
        way: the way to compress.
    """

    search: LatentSearch
    way: LatentWay

    @property
    def shape(self) -> Shape:
        """The numbers of heads alone."""
        return self.search.shape

    @property
    def latent(self) -> int:
        """See ``LatentHeads``."""
        return self.way.latent

    @property
    def unrotated(self) -> int:
        """See ``LatentHeads``."""
        return self.width

    @property
    def number_of_constants(self) -> int:
        """See ``LatentHeads``."""
        return 1

    @cached_property
    def constants(self) -> Tensor:
        """See ``LatentHeads``; one, which the source's dtype can hold."""
        dtype = TensorInfo((), main_dtype(self.source.tensors)).torch_dtype
        constant = torch.tensor([math.sqrt(self.latent + 1) * 2.0**EXPONENT], dtype=torch.float64)
        return constant.to(dtype).double()

    @property
    def scale(self) -> float:
        """By what the latent's norm multiplies its coordinates, about 1."""
        return math.sqrt(self.latent + 1) * 2.0**EXPONENT / float(self.constants)

    @property
    def frequencies(self) -> tuple[int, ...]:
        """See ``LatentHeads``."""
        return tuple(pair for pair, count in enumerate(self.way.pairs) for _ in range(count))

    def transform(self, member: Member, info: TensorInfo) -> Transform | None:
        """The transform of a tensor of the target; None keeps the source's."""
        prefix, attention, name = member.name.partition(".self_attn.")
        module, _, kind = name.rpartition(".")
        makers: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
            "q_proj": (self._queries, ("q_proj.weight",)),
            "q_b_proj": (self._expanded_queries, ()),
            "kv_a_proj_with_mqa": (self._down, ("k_proj.weight", "v_proj.weight")),
            "kv_b_proj": (self._up, ()),
        }
        if module not in makers:
            return super().transform(member, info)
        assert member.layer is not None
        make, old = makers[module]
        if kind == "bias":
            make, old = self._down_bias, ("k_proj.bias",)
        names = [f"{prefix}{attention}{name}" for name in old]
        names = [name for name in names if name in self.source.tensors]
        compute = partial(self._computed, make, member.layer, info)
        why = f"compressed to {self.way.rank} numbers"
        return Computed(tuple(names), why, compute, repeatable=False, dtype=info.dtype)

    def _computed(
        self, make: Callable[..., Tensor], layer: int, info: TensorInfo, *old: Tensor
    ) -> Tensor:
        def stored(up: Tensor) -> Tensor:
            return (up / self.scale).to(info.torch_dtype).double() * self.scale

        bases = self.search.bases(layer, self.way, stored)
        computed = make(bases, *(one.double() for one in old))
        assert computed.shape == info.shape
        return computed.to(info.torch_dtype).contiguous()

    def _queries(self, bases: Bases, queries: Tensor) -> Tensor:
        return bases.queries(self.shape, queries)

    def _expanded_queries(self, bases: Bases) -> Tensor:
        """Rows of queries from the latent of ``q_proj``, and zeros for its constants."""
        rows = bases.queries(self.shape, torch.eye(self.heads * self.width, dtype=torch.float64))
        return torch.nn.functional.pad(rows, (0, CONSTANTS))

    def _down(self, bases: Bases, keys: Tensor, values: Tensor) -> Tensor:
        rotary = bases.keys(self.shape, keys)
        latent = bases.latent(self.shape, keys, values)
        latent = torch.nn.functional.pad(latent, (0, 0, 0, len(self.constants)))
        return torch.cat([latent, rotary.real, rotary.imag])

    def _down_bias(self, bases: Bases, *keys: Tensor) -> Tensor:
        none = torch.zeros(self.kv_heads * self.width, dtype=torch.float64)
        rotary = bases.keys(self.shape, keys[0] if keys else none)
        latent = torch.nn.functional.pad(self.constants, (self.latent, 0))
        return torch.cat([latent, rotary.real, rotary.imag])

    def _up(self, bases: Bases) -> Tensor:
        """Rows of unrotated keys and of values of every head.

        The constant carries what all tokens have in common in values, with their biases.
        """
        first = float(self.constants) / 2.0**EXPONENT * self.scale
        keys = torch.nn.functional.pad(bases.constant, (len(bases.constant), 0)) / first
        rows = torch.cat([bases.up / self.scale, keys[:, None]], 1)
        by_head = rows.unflatten(0, (2, self.kv_heads, self.width)).transpose(0, 1)
        expanded: Tensor = by_head.repeat_interleave(self.shape.group, 0).flatten(0, 2)
        return expanded

    def check(self, layer: int) -> TargetCheck:
        """The check of what a layer has in place of queries, keys and values."""
        prefix = ATTENTION.format(layer=layer)
        queries = f"{prefix}{'q_b_proj' if self.biased else 'q_proj'}.weight"
        names = [f"{prefix}{name}" for name in ("q_proj", "v_proj", "k_proj")]
        names = [f"{name}.weight" for name in names] + [f"{prefix}k_proj.bias"]
        sources = tuple(name for name in names if name in self.source.tensors)
        down = f"{prefix}kv_a_proj_with_mqa"
        targets = (queries, f"{down}.weight", f"{down}.bias", f"{prefix}kv_b_proj.weight")
        return TargetCheck(sources, targets, partial(self._judge, prefix.rstrip(".")))

    def _judge(
        self, module: str, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[bool, Spectrum]:
        queries, values, keys, *bias = sources
        read, down, shift, expanded = targets
        if self.biased:
            read = read[:, :-CONSTANTS].double() @ queries.double()
        keys = torch.cat([keys, *(one[:, None] for one in bias)], 1)
        stored = torch.cat([down, shift[:, None]], 1) if bias else down
        end = self.latent + len(self.constants)
        constants = torch.nn.functional.pad(self.constants, (self.latent, 0)).to(shift.dtype)
        fits = shift[:end].equal(constants) and (bool(bias) or not shift[end:].any())
        fits &= not down[self.latent : end].any()
        expanded = expanded[:, : self.latent].double() * self.scale
        parts = (read, stored[end:], down[: self.latent], expanded)
        kept, spectrum = check_latents(
            module, self.shape, self.frequencies, (queries, keys, values), parts
        )
        return kept and fits, spectrum


def _ones(columns: Sequence[int], info: TensorInfo) -> Tensor:
    """A matrix with a 1 in each row, at a column; without one for NOTHING."""
    matrix = torch.zeros(info.shape, dtype=info.torch_dtype)
    at = torch.tensor(columns)
    rows = (at != NOTHING).nonzero()[:, 0]
    matrix[rows, at[rows]] = 1
    return matrix


def _norm(info: TensorInfo, constants: int) -> Tensor:
    """The weight of a latent's norm, which multiplies constants by 1."""
    weight = torch.full(info.shape, 2.0**EXPONENT, dtype=info.torch_dtype)
    weight[-constants:] = 1
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


def _rope(source: Model, width: int, frequencies: Sequence[int], unrotated: int) -> Config:
    """Rotary parameters that give every pair its frequency of the source, spelled as there.

    Their scale makes up for the width of queries, by whose root the class divides scores.

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
    scale = float(unrotated + 2 * len(frequencies))
    if "attention_multiplier" not in source.family.defaults:
        scale /= width
    scaling = {
        "rope_type": "longrope",
        "short_factor": [short[pair] for pair in frequencies],
        "long_factor": [long[pair] for pair in frequencies],
        "attention_factor": factor,
        "original_max_position_embeddings": original,
        "factor": math.e,
        "mscale_all_dim": 10 * (scale**0.25 - 1),
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
    whole = all(of.get("partial_rotary_factor") in (None, 1) for of in (config, rope))
    return rope.get("rope_type") if whole else None, rope.get("rope_theta")


OPERATION = LatentAttention()
