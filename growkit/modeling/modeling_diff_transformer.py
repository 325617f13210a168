"""The DIFF Transformer as a transformers model: see ``DiffTransformerConfig`` for its switches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils.generic import can_return_tuple

from .configuration_diff_transformer import DiffTransformerConfig
from .differential_attention import (
    causal_integral,
    column_mean,
    combine,
    fused_attention,
    head_norm,
    lambda_of_vectors,
    wide,
)

POLY_NORM_EPS = 1e-6


class IntegralLayer(DynamicLayer):
    """Keys and values of a layer, and the column sums that the causal integral needs.

    ``column_sums`` is [batch, signal heads, tokens]: the sum of all rows of the signal maps so far.
    """

    is_croppable = False
    column_sums: Tensor | None = None

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Add keys and values; refused where gradients would have to flow into the sums."""
        if self.keys is not None and self.keys.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "gradients do not flow through the cache of an integral; run the whole text at "
                "once, or fill the cache under torch.no_grad()"
            )
        updated: tuple[Tensor, Tensor] = super().update(*args, **kwargs)
        return updated

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.column_sums = None

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Follow the beams."""
        super().reorder_cache(beam_idx)
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some sequences of the batch."""
        super().batch_select_indices(indices)
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch."""
        super().batch_repeat_interleave(repeats)
        if self.column_sums is not None:
            self.column_sums = self.column_sums.repeat_interleave(repeats, dim=0)

    def offload(self) -> None:
        """Move to the CPU."""
        super().offload()
        if self.column_sums is not None:
            self.column_sums = self.column_sums.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Move back to the device."""
        super().prefetch()
        if self.column_sums is not None and self.keys is not None:
            self.column_sums = self.column_sums.to(self.keys.device, non_blocking=True)

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what a token added to the sums of earlier ones is not known any more."""
        if tokens_to_remove:
            raise ValueError(
                "the cache of a model with an integral cannot be cropped: its column sums cannot "
                "be taken back; generate without an assistant, or with use_cache=False"
            )

    def _select(self, indices: Tensor) -> None:
        if self.column_sums is not None:
            self.column_sums = self.column_sums[indices.to(self.column_sums.device)]


class PolyNorm(nn.Module):
    """Polynomial activation (arXiv 2411.03884): Σ weight · norm(x^power) + bias, powers 3, 2, 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., intermediate_size] to the same."""
        x = wide(hidden_states)
        cubed, squared, linear = (
            head_norm(power, None, POLY_NORM_EPS) for power in (x**3, x**2, x)
        )
        weight = wide(self.weight)
        output = weight[0] * cubed + weight[1] * squared + weight[2] * linear + wide(self.bias)
        return output.to(hidden_states.dtype)


class DiffTransformerMLP(nn.Module):
    """Gated MLP: down(activation(gate) · up)."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__()
        hidden, ffn, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(hidden, ffn, bias=bias)
        self.up_proj = nn.Linear(hidden, ffn, bias=bias)
        self.down_proj = nn.Linear(ffn, hidden, bias=bias)
        self.act_fn = PolyNorm() if config.hidden_act == "poly_norm" else ACT2FN[config.hidden_act]

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, rows, hidden] to the same."""
        gate = self.act_fn(self.gate_proj(hidden_states))
        output: Tensor = self.down_proj(gate * self.up_proj(hidden_states))
        return output


class HeadRMSNorm(nn.Module):
    """RMSNorm of every head on its own, in the precision of its input, which is float32 or wider.

    Args:
        width: of a head.
        eps: added to the mean square.
        affine: whether there is a weight, shared by the heads.
    """

    def __init__(self, width: int, eps: float, affine: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if affine else None
        self.eps = eps

    def forward(self, heads: Tensor) -> Tensor:
        """[..., width] to the same."""
        return head_norm(heads, self.weight, self.eps)


class HeadUpdates(nn.Module):
    """The low-rank updates of Shared DIFF, expanded head by head and added to the bases.

    Its weight has the shape of a Linear's, but every row reads the updates of its own head alone.
    So it is no Linear, which quantisation and adapters would replace by one.

    Args:
        rank: of the updates.
        heads: how many signal heads there are, and how many noise heads.
        head_dim: rows of each.
        per_layer: whether all signal heads share one update, and all noise heads another.
        bias: whether there is one.
    """

    def __init__(
        self, rank: int, heads: tuple[int, int], head_dim: int, per_layer: bool, bias: bool
    ) -> None:
        super().__init__()
        self.rows = [count * head_dim for count in heads]
        self.head_dim, self.per_layer = head_dim, per_layer
        self.weight = nn.Parameter(torch.empty(sum(self.rows), rank))
        self.bias = nn.Parameter(torch.empty(sum(self.rows))) if bias else None

    def forward(self, low: Tensor, base: Tensor) -> Tensor:
        """Updates [..., heads or 2, rank] and bases [..., rows] to [..., rows]."""
        if self.per_layer:
            weights = self.weight.split(self.rows)
            update = torch.cat(
                [functional.linear(low[..., i, :], each) for i, each in enumerate(weights)], -1
            )
        else:
            weight = self.weight.view(-1, self.head_dim, self.weight.shape[1])
            update = torch.einsum("...hr,hdr->...hd", low, weight).flatten(-2)
        heads = base + update
        return heads if self.bias is None else heads + self.bias


class SharedProjection(nn.Module):
    """Signal and noise heads as shared bases plus low-rank updates (Shared DIFF, eq. 3 and 4).

    The paper's W = W_base + A Bᵀ, where ``down`` holds A and ``up`` holds B, head by head, signal
    heads first.
    """

    def __init__(
        self, config: DiffTransformerConfig, rank: int, signal: int, noise: int, groups: int
    ) -> None:
        super().__init__()
        self.heads = (signal, noise)
        self.head_dim, self.rank = config.head_dim, rank
        self.bases = 1 if config.shared_scope == "all_heads" else groups
        per_layer = config.shared_scope == "layer"
        updates = 2 if per_layer else signal + noise
        self.base = nn.Linear(config.hidden_size, self.bases * self.head_dim, bias=False)
        self.down = nn.Linear(config.hidden_size, updates * self.rank, bias=False)
        self.up = HeadUpdates(
            self.rank, self.heads, self.head_dim, per_layer, config.attention_bias
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[batch, rows, hidden] to [batch, rows, (signal + noise) · head_dim]."""
        shape = hidden_states.shape[:-1]
        bases = self.base(hidden_states).view(*shape, self.bases, self.head_dim)
        base = torch.cat([bases.repeat_interleave(n // self.bases, -2) for n in self.heads], -2)
        low = self.down(hidden_states).view(*shape, -1, self.rank)
        heads: Tensor = self.up(low, base.flatten(-2))
        return heads


class DiffTransformerAttention(nn.Module):
    """Attention with every switch of the config; the mathematics is in differential_attention."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.attention_multiplier
        signal, noise = config.num_signal_heads, config.num_noise_heads
        values, bias = config.num_value_heads, config.attention_bias
        noise_keys = values if config.has_noise_keys else 0

        def projection(signal: int, noise: int, groups: int) -> nn.Module:
            if config.qk_projection == "shared" and noise:
                return SharedProjection(config, config.rank(layer_idx), signal, noise, groups)
            return nn.Linear(config.hidden_size, (signal + noise) * config.head_dim, bias=bias)

        self.q_proj = projection(signal, noise, noise)
        self.k_proj = projection(values, noise_keys, values)
        self.v_proj = nn.Linear(config.hidden_size, values * config.value_head_dim, bias=bias)
        self.o_proj = nn.Linear(
            signal * config.value_head_dim, config.hidden_size, bias=config.attention_output_bias
        )
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                LlamaRMSNorm(config.head_dim, config.rms_norm_eps) for _ in range(2)
            )
        if noise and config.lambda_type == "vectors":
            self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
                nn.Parameter(torch.empty(config.head_dim)) for _ in range(4)
            )
        elif noise:
            self.lambda_proj = nn.Linear(config.hidden_size, signal, bias=False)
        if config.integral != "none" and config.gamma == "gated":
            self.gamma_gate = nn.Parameter(torch.zeros(1))
        self.head_norm = (
            HeadRMSNorm(config.value_head_dim, config.head_norm_eps, config.head_norm == "affine")
            if config.head_norm != "none"
            else None
        )

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        real: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            hidden_states: [batch, rows, hidden].
            position_embeddings: cosines and sines of the rotation.
            real: [batch, columns], false for padding; None if there is none.
            past_key_values: what came before.

        Returns:
            [batch, rows, hidden].
        """
        config = self.config
        batch, rows = hidden_states.shape[:2]

        def heads(projected: Tensor, width: int) -> Tensor:  # [batch, heads, rows, width]
            return projected.view(batch, rows, -1, width).transpose(1, 2)

        query = heads(self.q_proj(hidden_states), config.head_dim)
        key = heads(self.k_proj(hidden_states), config.head_dim)
        value = heads(self.v_proj(hidden_states), config.value_head_dim)
        if config.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        past = 0
        layer = None
        if past_key_values is not None:
            past = past_key_values.get_seq_length(self.layer_idx)
            key, value = past_key_values.update(key, value, self.layer_idx)
            layer = past_key_values.layers[self.layer_idx]

        signal_query, noise_query = query.split(
            [config.num_signal_heads, config.num_noise_heads], dim=1
        )
        signal_key = key[:, : config.num_value_heads]
        noise_key = key[:, -config.num_value_heads :]
        lambda_ = self._lambda(hidden_states)
        gamma = self._gamma(lambda_)
        integral = None
        if config.integral == "causal":
            assert gamma is not None
            signal, sums = causal_integral(
                signal_query,
                signal_key,
                value,
                gamma,
                self.scaling,
                past,
                real,
                layer.column_sums if isinstance(layer, IntegralLayer) else None,
            )
            if isinstance(layer, IntegralLayer):
                layer.column_sums = sums
        else:
            signal = fused_attention(signal_query, signal_key, value, self.scaling, past, real)
            if config.integral == "column_mean":
                assert gamma is not None
                mean = column_mean(signal_query, signal_key, self.scaling, real)
                repeats = config.num_signal_heads // config.num_value_heads
                means = mean[:, :, None] @ wide(value).repeat_interleave(repeats, dim=1)
                integral = gamma * means
        noise = None
        if config.num_noise_heads:
            noise = fused_attention(noise_query, noise_key, value, self.scaling, past, real)

        output = combine(signal, noise, lambda_, integral)  # [batch, signal, rows, width]
        if self.head_norm is not None:
            output = self.head_norm(output)
        if config.head_output_scale != "none":
            assert config.lambda_init is not None
            output = output * (1 - config.lambda_init[self.layer_idx])
        output = output.to(hidden_states.dtype).transpose(1, 2).reshape(batch, rows, -1)
        projected: Tensor = self.o_proj(output)
        return projected

    def _lambda(self, hidden_states: Tensor) -> Tensor | None:
        """λ as [1, 1, 1, 1], or [batch, signal, rows, 1]; None without noise heads."""
        if not self.config.num_noise_heads:
            return None
        if self.config.lambda_type == "projected":
            return wide(self.lambda_proj(hidden_states)).sigmoid().transpose(1, 2)[..., None]
        assert self.config.lambda_init is not None
        return lambda_of_vectors(
            self.lambda_q1,
            self.lambda_k1,
            self.lambda_q2,
            self.lambda_k2,
            self.config.lambda_init[self.layer_idx],
        ).view(1, 1, 1, 1)

    def _gamma(self, lambda_: Tensor | None) -> Tensor | None:
        """γ, like λ; None without an integral."""
        if self.config.integral == "none" or lambda_ is None:
            return None
        return lambda_ * wide(self.gamma_gate) if self.config.gamma == "gated" else lambda_


class DiffTransformerDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each after an RMSNorm and added to the residual stream."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DiffTransformerAttention(config, layer_idx)
        self.mlp = DiffTransformerMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.residual_multiplier = config.residual_multiplier

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        real: Tensor | None = None,
        past_key_values: Cache | None = None,
    ) -> Tensor:
        """[batch, rows, hidden] to the same; see the attention for the arguments."""
        attended = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, real, past_key_values
        )
        hidden_states = hidden_states + _times(attended, self.residual_multiplier)
        added = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + _times(added, self.residual_multiplier)


class DiffTransformerPreTrainedModel(PreTrainedModel):
    """What transformers wants to know."""

    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DiffTransformerDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DiffTransformerAttention):
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                if hasattr(module, name):
                    init.normal_(getattr(module, name), 0, self.config.lambda_std_dev)
            if hasattr(module, "gamma_gate"):
                init.zeros_(module.gamma_gate)
        elif isinstance(module, HeadUpdates):
            init.normal_(module.weight, 0, self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, PolyNorm):
            init.constant_(module.weight, 1 / 3)
            init.zeros_(module.bias)


class DiffTransformerModel(DiffTransformerPreTrainedModel):
    """Embedding, layers and the final norm."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(
            DiffTransformerDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)  # type: ignore[arg-type]
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of every token.

        Args:
            input_ids: [batch, rows].
            attention_mask: [batch, columns], 0 for padding.
            position_ids: [batch or 1, rows]; None to count from what is cached.
            past_key_values: a dynamic cache.
            inputs_embeds: [batch, rows, hidden], instead of ``input_ids``.
            use_cache: whether to return a cache.
            output_hidden_states: whether to return those of every layer.
            **kwargs: not used.

        Raises:
            ValueError: the inputs contradict each other, or the cache cannot be used.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states = _times(hidden_states, self.config.embedding_multiplier)
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        past_key_values = self._cache(past_key_values, use_cache)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            position_ids = (rows + past)[None]
        elif attention_mask is None and not torch.compiler.is_compiling():
            _refuse_packed(position_ids)
        real = _real_tokens(
            attention_mask, past + hidden_states.shape[1], averaged=self.config.integral != "none"
        )
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)

        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        states = []
        for layer in self.layers:
            states.append(hidden_states)
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                real=real,
                past_key_values=past_key_values,
            )
        hidden_states = self.norm(hidden_states)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states,
            past_key_values=past_key_values if use_cache else None,
            hidden_states=(*states, hidden_states) if output_hidden_states else None,
        )

    def _cache(self, cache: Cache | None, use_cache: bool) -> Cache | None:
        """The cache as this model needs it; None if there is to be none."""
        integral = self.config.integral
        if integral == "column_mean":
            if use_cache or cache is not None:
                raise ValueError(
                    "the column mean changes with every token, so nothing can be cached; pass "
                    "use_cache=False (and generate from input_ids, not from inputs_embeds)"
                )
            return None
        if cache is None:
            if not use_cache:
                return None
            cache = DynamicCache()
        if cache.is_compileable:
            raise ValueError(
                "a DIFF Transformer works with dynamic caches, not with static ones; "
                "leave cache_implementation out"
            )
        if integral == "causal":
            _hold_column_sums(cache, len(self.layers))
        return cache


def _times(tensor: Tensor, factor: float) -> Tensor:
    """The tensor itself where the factor is 1."""
    return tensor if factor == 1 else tensor * factor


def _hold_column_sums(cache: Cache, layers: int) -> None:
    """Give an empty cache room for the column sums of every layer."""
    if not cache.layers:
        cache.layers.extend(IntegralLayer() for _ in range(layers))
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, IntegralLayer):
            continue
        if type(layer) is not DynamicLayer or layer.get_seq_length():
            raise ValueError(
                "this cache has no column sums, which the integral needs; "
                "pass an empty DynamicCache(config=model.config)"
            )
        cache.layers[index] = IntegralLayer()


def _refuse_packed(position_ids: Tensor) -> None:
    """Packed documents would attend to each other, and nothing would show it."""
    if bool(position_ids.diff(dim=-1).le(0).any()):
        raise ValueError(
            "position_ids begin anew inside a sequence; a DIFF Transformer does not keep packed "
            "documents apart, so pad them instead, with an attention_mask"
        )


def _real_tokens(attention_mask: Tensor | None, columns: int, averaged: bool) -> Tensor | None:
    """[batch, columns], false for padding; None where no token is touched by any.

    Args:
        attention_mask: as it was given.
        columns: tokens that are cached or new.
        averaged: whether maps are averaged over rows, which padding must not take part in.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2 or attention_mask.shape[1] != columns:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}; [batch, {columns}] was "
            "expected, with 0 for padding, of what is cached as well"
        )
    real = attention_mask.bool()
    if torch.compiler.is_compiling():  # which cannot look at values
        return real
    after_the_text = bool((real[:, :-1] | ~real[:, 1:]).all())  # no token sees such padding
    return None if bool(real.all()) or (after_the_text and not averaged) else real


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):
    """The model with its output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the next token; see the model for the arguments.

        Args:
            input_ids: [batch, rows].
            attention_mask: see the model, as for the others.
            position_ids: see there.
            past_key_values: see there.
            inputs_embeds: see there.
            labels: [batch, rows], -100 where there is no loss; None for no loss.
            use_cache: see there.
            logits_to_keep: number of last rows, or which rows; 0 for all.
            output_hidden_states: see there.
            **kwargs: for the loss.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        if self.config.logits_scaling != 1:
            logits = logits / self.config.logits_scaling
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a model with a column mean generates without a cache."""
        if self.config.integral == "column_mean":
            kwargs["use_cache"] = False
        return super().generate(*args, **kwargs)  # type: ignore[misc]


class DiffTransformerForSequenceClassification(
    GenericForSequenceClassification, DiffTransformerPreTrainedModel
):
    """The model with a linear layer over the last token that is no padding."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        # Transformers' own looks up the class of the model, which asks whether to trust its code.
        DiffTransformerPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = DiffTransformerModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class DiffTransformerForTokenClassification(
    GenericForTokenClassification, DiffTransformerPreTrainedModel
):
    """The model with a linear layer over every token."""

    def __init__(self, config: DiffTransformerConfig) -> None:
        DiffTransformerPreTrainedModel.__init__(self, config)
        self.num_labels = config.num_labels
        self.model = DiffTransformerModel(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", None) or 0.0)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


# A folder that ``save_pretrained`` writes then has this code beside its weights.
DiffTransformerConfig.register_for_auto_class()
DiffTransformerModel.register_for_auto_class("AutoModel")
DiffTransformerForCausalLM.register_for_auto_class("AutoModelForCausalLM")
DiffTransformerForSequenceClassification.register_for_auto_class(
    "AutoModelForSequenceClassification"
)
DiffTransformerForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
