"""Motif-3: latent differential attention, hyper-connections and experts with PolyNorm.

Streams are [batch, tokens, streams, hidden]; other states lack the third dimension.
"""

import math
from copy import copy
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3ForCausalLM,
    Gemma3RotaryEmbedding,
    Gemma3TextModel,
)
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

EPS = 1e-6
"""The number that PolyNorm and the norms of hyper-connections add to a mean."""


@strict
class Motif3Config(PreTrainedConfig):
    """Motif's keys, but windows that count the token itself and RoPE by type of layer.

    Args:
        rope_parameters: of ``full_attention`` and ``sliding_attention``.
        use_bidirectional_attention: read by Gemma's class.
        final_logit_softcapping: likewise.
    """

    model_type = "motif3"

    rope_parameters: dict[str, Any] | None = None
    use_bidirectional_attention: bool = False
    final_logit_softcapping: float | None = None


def _linear(rows: int, columns: int) -> nn.Linear:
    return nn.Linear(columns, rows, bias=False)


class Motif3Attention(nn.Module):
    """Grouped differential latent attention, with one rotary key for all heads."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx, self.is_causal = config, layer_idx, True
        self.layer_type = config.layer_types[layer_idx]
        heads, self.groups = config.num_attention_heads, config.num_noise_heads
        self.signal_heads = heads - self.groups
        self.num_key_value_groups = heads // config.num_key_value_heads
        self.query_parts = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.latent_parts = config.kv_lora_rank, config.qk_rope_head_dim
        self.value_parts = config.qk_nope_head_dim, config.v_head_dim
        self.scaling = sum(self.query_parts) ** -0.5
        longer = config.max_position_embeddings > config.original_seq_len
        if longer and self.layer_type == "full_attention":
            self.scaling *= (0.1 * config.mscale * math.log(config.rope_factor) + 1) ** 2
        hidden, eps = config.hidden_size, config.rms_norm_eps
        values = self.signal_heads * config.v_head_dim
        self.wq_a = _linear(config.q_lora_rank, hidden)
        self.q_norm = LlamaRMSNorm(config.q_lora_rank, eps)
        self.wq_b = _linear(heads * sum(self.query_parts), config.q_lora_rank)
        self.wq_b_gate = _linear(values, config.q_lora_rank)
        self.wkv_a = _linear(sum(self.latent_parts), hidden)
        self.kv_norm = LlamaRMSNorm(config.kv_lora_rank, eps)
        kv_rows = config.num_key_value_heads * sum(self.value_parts)
        self.wkv_b = _linear(kv_rows, config.kv_lora_rank)
        self.lambda_proj = _linear(self.signal_heads, hidden)
        self.wo = _linear(hidden, values)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; the cache holds latents and rotary keys, as one head each."""
        shape = hidden_states.shape[:-1]
        latent = self.q_norm(self.wq_a(hidden_states))
        query = self.wq_b(latent).view(*shape, -1, sum(self.query_parts)).transpose(1, 2)
        query, query_rotary = query.split(self.query_parts, dim=-1)
        keys, rotary = self.wkv_a(hidden_states).unsqueeze(1).split(self.latent_parts, dim=-1)
        query_rotary, rotary = apply_rotary_pos_emb(query_rotary, rotary, *position_embeddings)
        keys = self.kv_norm(keys)
        if cache is not None:
            keys, rotary = cache.update(keys, rotary, self.layer_idx)
        expanded = self.wkv_b(keys[:, 0]).unflatten(-1, (-1, sum(self.value_parts)))
        key, value = expanded.transpose(1, 2).split(self.value_parts, dim=-1)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        heads, weights = attend(
            self,
            torch.cat([query, query_rotary], dim=-1),
            torch.cat([key, rotary.expand(-1, key.shape[1], -1, -1)], dim=-1),
            value,
            attention_mask,
            scaling=self.scaling,
            **kwargs,
        )
        heads = heads.unflatten(2, (self.groups, -1))
        factor = self.lambda_proj(hidden_states).sigmoid().view(*shape, self.groups, -1, 1)
        difference = heads[:, :, :, :-1] - factor * heads[:, :, :, -1:]
        return self.wo(difference.flatten(2) * self.wq_b_gate(latent).sigmoid()), weights


class Motif3PolyNorm(nn.Module):
    """A gate's normed powers, weighed by sigmoids, times the other input; see ``forward``.

    Args:
        config: the model's.
        experts: number of experts, if each has its own weights.
    """

    def __init__(self, config: Any, *experts: int) -> None:
        super().__init__()
        self.limit = math.inf if config.hidden_clamp is None else config.hidden_clamp
        bias = config.polynorm_bias_clamp if experts else None
        self.bias_limit = math.inf if bias is None else bias
        self.output_limit = self.limit if experts else math.inf
        self.output_scale = config.polynorm_output_scale
        self.weight = nn.Parameter(torch.full((*experts, 3), 1 / 3))
        self.bias = nn.Parameter(torch.zeros(*experts, 1))

    def forward(self, gate: Tensor, up: Tensor, expert: Any = ...) -> Tensor:
        """σ(w₀) N(g³) + σ(w₁) N(g²) + σ(w₂) N(g) + b, times up and a constant."""
        weight = self.weight[expert].float().sigmoid()
        bias = self.bias[expert].float().clamp(-self.bias_limit, self.bias_limit)
        limited, up = (x.float().clamp(-self.limit, self.limit) for x in (gate, up))
        powers = torch.stack([limited**3, limited**2, limited])
        normed = powers * (powers.square().mean(-1, keepdim=True) + EPS).rsqrt()
        output = (torch.tensordot(weight, normed, 1) + bias) * up
        scaled: Tensor = output.clamp(-self.output_limit, self.output_limit) * self.output_scale
        return scaled.to(gate.dtype)


class Motif3MLP(nn.Module):
    """A gated MLP with PolyNorm."""

    def __init__(self, config: Any, width: int) -> None:
        super().__init__()
        self.gate_proj = _linear(width, config.hidden_size)
        self.up_proj = _linear(width, config.hidden_size)
        self.down_proj = _linear(config.hidden_size, width)
        self.act_fn = Motif3PolyNorm(config)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the MLP."""
        activated = self.act_fn(self.gate_proj(hidden_states), self.up_proj(hidden_states))
        output: Tensor = self.down_proj(activated)
        return output


class Motif3Experts(nn.Module):
    """The routed experts of a layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        experts, width = config.num_experts, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, config.hidden_size))
        self.down_proj = nn.Parameter(torch.empty(experts, config.hidden_size, width))
        self.act_fn = Motif3PolyNorm(config, experts)

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Add up what the chosen experts compute.

        Args:
            hidden_states: [tokens, hidden].
            chosen: indices of experts, [tokens, experts per token].
            weights: their weights.
        """
        output = torch.zeros_like(hidden_states, dtype=torch.float32)
        for expert in chosen.unique().tolist():
            tokens, places = torch.where(chosen == expert)
            gate, up = functional.linear(hidden_states[tokens], self.gate_up_proj[expert]).chunk(
                2, -1
            )
            of_expert = functional.linear(self.act_fn(gate, up, expert), self.down_proj[expert])
            weighed = of_expert.float() * weights[tokens, places].unsqueeze(-1)
            output = output.index_add(0, tokens, weighed)
        return output


class Motif3Router(nn.Module):
    """Chooses experts for every token."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.gate = _linear(config.num_experts, config.hidden_size)

    def forward(self, hidden_states: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """The indices and weights of the chosen experts, in which corrections have no part."""
        scores = functional.linear(hidden_states.float(), self.gate.weight.float()).sigmoid()
        order = scores if correction is None else scores + correction.float()
        chosen = order.topk(self.config.experts_top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.config.route_norm:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return chosen, weights * self.config.route_scale


class Motif3MoE(nn.Module):
    """Routed experts, next to a shared one."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.router, self.experts = Motif3Router(config), Motif3Experts(config)
        self.expert_bias: Tensor | None
        corrected = config.load_balance_coeff is not None
        self.register_buffer("expert_bias", torch.zeros(config.num_experts) if corrected else None)
        shared = config.num_shared_experts
        self.shared_experts = Motif3MLP(config, config.moe_intermediate_size) if shared else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Run the experts."""
        tokens = hidden_states.flatten(0, 1)
        output: Tensor = self.experts(tokens, *self.router(tokens, self.expert_bias))
        if self.shared_experts is not None:
            output = output + self.shared_experts(tokens).float()
        return output.to(hidden_states.dtype).view_as(hidden_states)


class Motif3HyperConnection(nn.Module):
    """The weights with which a block reads, writes and mixes streams."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        streams = config.mhc_expansion_rate
        width = streams * config.hidden_size
        self.steps, self.post_factor = config.mhc_sinkhorn_iters, 1 + config.mhc_h_post_alpha_end
        self.rms_norm = LlamaRMSNorm(width, EPS)
        for part, shape in (("pre", [streams]), ("post", [streams]), ("res", [streams, streams])):
            setattr(self, f"proj_{part}", _linear(math.prod(shape), width))
            setattr(self, f"alpha_{part}", nn.Parameter(torch.zeros(1)))
            setattr(self, f"bias_{part}", nn.Parameter(torch.zeros(shape)))

    def _mapped(self, part: str, normed: Tensor, limit: float) -> Tensor:
        bias = getattr(self, f"bias_{part}").float()
        mapped = getattr(self, f"proj_{part}")(normed).float().unflatten(-1, bias.shape)
        raw: Tensor = getattr(self, f"alpha_{part}").float() * mapped + bias
        return raw.clamp(-limit, limit)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the block reads, and the weights of its output and of the streams, by stream."""
        normed = self.rms_norm(streams.flatten(-2))
        read = self._mapped("pre", normed, 10).sigmoid()
        write = self.post_factor * self._mapped("post", normed, 10).sigmoid()
        mixing = self._mapped("res", normed, 20).exp()
        for _ in range(self.steps):
            for dimension in (-1, -2):
                mixing = mixing / mixing.sum(dimension, keepdim=True).clamp(min=1e-8)
        return (streams * read.unsqueeze(-1)).sum(-2).to(streams.dtype), write, mixing


class Motif3DecoderLayer(GradientCheckpointingLayer):
    """Attention and an MLP or experts, each between hyper-connections."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__()
        eps, step = config.rms_norm_eps, config.interleave_moe_layer_step
        self.self_attn = Motif3Attention(config, layer_idx)
        if step and layer_idx >= config.n_dense_first_layers and (layer_idx + 1) % step == 0:
            self.moe = Motif3MoE(config)
        else:
            self.mlp = Motif3MLP(config, config.intermediate_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.mhc_attn, self.mhc_ffn = Motif3HyperConnection(config), Motif3HyperConnection(config)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer on streams; the arguments are those of the attention."""
        read, *weights = self.mhc_attn(hidden_states)
        output, _ = self.self_attn(self.input_layernorm(read), **kwargs)
        hidden_states = _written(hidden_states, output, *weights)
        read, *weights = self.mhc_ffn(hidden_states)
        block = self.moe if hasattr(self, "moe") else self.mlp
        return _written(hidden_states, block(self.post_attention_layernorm(read)), *weights)


def _written(streams: Tensor, output: Tensor, write: Tensor, mixing: Tensor) -> Tensor:
    """Add a block's output to the mixed streams."""
    added = write.unsqueeze(-1) * output.float().unsqueeze(-2)
    return (mixing @ streams.float() + added).to(streams.dtype)


class Motif3Embedding(nn.Embedding):
    """The embedding, of which every stream holds a copy."""

    def __init__(self, config: Any) -> None:
        super().__init__(config.vocab_size, config.hidden_size)
        self.streams = config.mhc_expansion_rate

    def forward(self, input_ids: Tensor) -> Tensor:
        """Look up the streams of every token."""
        return super().forward(input_ids).unsqueeze(2).expand(-1, -1, self.streams, -1)


class Motif3FinalNorm(LlamaRMSNorm):
    """The norm of the streams' mean."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Leave the streams."""
        normed: Tensor = super().forward(hidden_states.mean(2))
        return normed


class Motif3Model(Gemma3TextModel):
    """The stack of layers, which have a mask and rotary positions by type, as those of Gemma 3."""

    config: Any
    config_class = Motif3Config
    _no_split_modules = ["Motif3DecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {"hidden_states": Motif3DecoderLayer}  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super(Gemma3TextModel, self).__init__(config)
        embedding: Any = Motif3Embedding(config)
        self.embed_tokens = embedding
        layers = (Motif3DecoderLayer(config, index) for index in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        norm: Any = Motif3FinalNorm(config.hidden_size, config.rms_norm_eps)
        self.norm = norm
        rotary = copy(config)
        rotary.head_dim = config.qk_rope_head_dim
        self.rotary_emb = Gemma3RotaryEmbedding(rotary)
        self.gradient_checkpointing = False
        self.post_init()  # type: ignore[no-untyped-call]


class Motif3ForCausalLM(Gemma3ForCausalLM):
    """The model with a head for language modelling."""

    config: Any
    config_class = Motif3Config
    _no_split_modules = ["Motif3DecoderLayer"]  # noqa: RUF012

    def __init__(self, config: Any) -> None:
        super(Gemma3ForCausalLM, self).__init__(config)
        self.model = Motif3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = _linear(config.vocab_size, config.hidden_size)
        self.post_init()  # type: ignore[no-untyped-call]
