"""Granite with the latent attention of DeepSeek-V3, and with Qwen3's norms of heads.

Multipliers and everything beside attention are Granite's.
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
    eager_attention_forward,
)
from transformers.models.granite.configuration_granite import GraniteConfig
from transformers.models.granite.modeling_granite import (
    GraniteDecoderLayer,
    GraniteForCausalLM,
    GraniteModel,
)

DESCRIPTION = """
family: Latent-Granite
model_type: latent_granite
extends: granite
sizes:
  num_key_value_heads: heads
  head_dim: null
  q_lora_rank: {query_latent: low_rank}
  kv_lora_rank: latent
  qk_nope_head_dim: nope
  qk_rope_head_dim: rope
  v_head_dim: value
may_be_zero: [qk_nope_head_dim]
groups: {heads: null}
multiples: {num_attention_heads: null}
assumed: {head_dim: null, rotary_heads: null}
conditions:
  low_rank: q_lora_rank is not None
  normed: rotary_heads is not None
upgrades:
  mla:
    granite: {}
    qwen3: {only: {use_sliding_window: [false, null]}}
tensors:
  model.layers.{layer}.self_attn.q_proj.weight:
    {pattern: heads.(nope + rope) <- hidden, when: not low_rank, bias: null}
  model.layers.{layer}.self_attn.q_a_proj.weight:
    {pattern: query_latent <- hidden, when: low_rank, bias: attention_bias}
  model.layers.{layer}.self_attn.q_a_layernorm.weight:
    {pattern: query_latent, norm: query_latent, when: low_rank}
  model.layers.{layer}.self_attn.q_b_proj.weight:
    {pattern: heads.(nope + rope) <- query_latent, when: low_rank}
  model.layers.{layer}.self_attn.q_norm.weight: {pattern: rope, when: normed}
  model.layers.{layer}.self_attn.k_norm.weight: {pattern: rope, when: normed}
  model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight:
    {pattern: latent + rope <- hidden, bias: attention_bias}
  model.layers.{layer}.self_attn.kv_a_layernorm.weight: {pattern: latent, norm: latent}
  model.layers.{layer}.self_attn.kv_b_proj.weight: heads.(nope + value) <- latent
  model.layers.{layer}.self_attn.k_proj.weight: null
  model.layers.{layer}.self_attn.v_proj.weight: null
  model.layers.{layer}.self_attn.o_proj.weight: {pattern: hidden <- heads.value}
"""


@strict
class LatentGraniteConfig(GraniteConfig):
    """Granite's config, with DeepSeek-V3's keys for latent attention.

    Args:
        q_lora_rank: width of the latent of queries; None without one.
        kv_lora_rank: width of the latent of keys and values.
        qk_rope_head_dim: width of the rotary key, and of what reads it in the queries of a head.
        qk_nope_head_dim: width of the keys of a head that come from the latent.
        v_head_dim: width of the values of a head.
        rope_interleave: whether the two coordinates that are rotated together are neighbours.
        rotary_heads: number of heads side by side in the rotary key, which have norms like those
            of Qwen3; None without norms.
    """

    model_type = "latent_granite"
    base_model_tp_plan = {  # noqa: RUF012
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }

    q_lora_rank: int | None = None
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    qk_nope_head_dim: int = 128
    v_head_dim: int = 128
    rope_interleave: bool = False
    rotary_heads: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("head_dim", None)
        super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        self.head_dim = self.qk_rope_head_dim  # what rotary embeddings look for


class LatentGraniteHeadNorm(nn.Module):
    """RMSNorm of heads side by side, whose rotary pairs are the same places of both halves.

    Args:
        size: of all heads together.
        heads: that are normed one by one.
        width: of a head, by which its sum of squares is divided; a query is as long as all heads,
            but most of it is zero.
        eps: what is added to the mean of the squares.
    """

    def __init__(self, size: int, heads: int, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.heads, self.width, self.eps = heads, width, eps

    def forward(self, rows: Tensor) -> Tensor:
        """Norm the last dimension."""
        by_head = rows.to(torch.float32).unflatten(-1, (2, self.heads, -1))
        squares = by_head.pow(2).sum((-3, -1), keepdim=True) / self.width
        by_head = by_head * torch.rsqrt(squares + self.eps)
        normed: Tensor = self.weight * by_head.flatten(-3).to(rows.dtype)
        return normed


class LatentGraniteAttention(DeepseekV3Attention):
    """DeepSeek-V3's attention with Granite's multiplier and norms of heads."""

    def __init__(self, config: LatentGraniteConfig, layer_idx: int) -> None:
        latent: Any = config
        super().__init__(latent, layer_idx)
        self.scaling *= config.attention_multiplier
        size, heads = config.qk_rope_head_dim, config.rotary_heads
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if heads is not None:
            width, eps = size // heads, config.rms_norm_eps
            self.q_norm = LatentGraniteHeadNorm(size, 1, width, eps)
            self.k_norm = LatentGraniteHeadNorm(size, heads, width, eps)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Run the attention; see ``DeepseekV3Attention.forward``."""
        batch, tokens, _ = hidden_states.shape
        if self.q_lora_rank is None:
            queries = self.q_proj(hidden_states)  # type: ignore[misc]
        else:
            queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden_states)))  # type: ignore[misc]
        queries = queries.view(batch, tokens, -1, self.qk_head_dim).transpose(1, 2)
        unrotated, queries = queries.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
        down = self.kv_a_proj_with_mqa(hidden_states).unsqueeze(1)
        latent, keys = down.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        latent, queries, keys = self.kv_a_layernorm(latent), self.q_norm(queries), self.k_norm(keys)
        interleaved = self.config.rope_interleave
        rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
        queries, keys = rotate(queries, keys, *position_embeddings)
        if cache is not None:
            latent, keys = cache.update(latent, keys, self.layer_idx)
        expanded, values = self.expand_kv(latent, keys)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        output, weights = attend(
            self,
            torch.cat((unrotated, queries), -1),
            expanded,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )
        return self.o_proj(output.reshape(batch, tokens, -1).contiguous()), weights


class LatentGraniteDecoderLayer(GraniteDecoderLayer):
    """A layer of Granite with latent attention."""

    def __init__(self, config: LatentGraniteConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        attention: Any = LatentGraniteAttention(config, layer_idx)
        self.self_attn = attention


class LatentGraniteModel(GraniteModel):
    """Granite's stack of layers."""

    config: LatentGraniteConfig
    config_class = LatentGraniteConfig
    _no_split_modules = ["LatentGraniteDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": LatentGraniteDecoderLayer,
        "attentions": LatentGraniteAttention,
    }

    def __init__(self, config: LatentGraniteConfig) -> None:
        super().__init__(config)
        layers = (LatentGraniteDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.post_init()  # type: ignore[no-untyped-call]


class LatentGraniteForCausalLM(GraniteForCausalLM):
    """The model with a head for language modelling."""

    config: LatentGraniteConfig
    config_class = LatentGraniteConfig
    _no_split_modules = ["LatentGraniteDecoderLayer"]  # noqa: RUF012

    def __init__(self, config: LatentGraniteConfig) -> None:
        super().__init__(config)
        self.model = LatentGraniteModel(config)
        self.post_init()  # type: ignore[no-untyped-call]
