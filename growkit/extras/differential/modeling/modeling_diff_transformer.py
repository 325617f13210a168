"""The DIFF Transformer as a transformers model; ``DiffTransformerConfig`` has its switches."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GenerationMixin, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_layers import (
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.granite.modeling_granite import GraniteForCausalLM
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from .configuration_diff_transformer import DiffTransformerConfig
from .differential_attention import (
    EXACT_ROWS,
    SHORTEST_SERIES,
    Heads,
    Projected,
    Sums,
    combine,
    differential_heads,
    differential_maps,
    fused_attention,
    head_norm,
    lambda_of_vectors,
    runs_kernels,
    values_of,
    wide,
)
from .integral_cache import IntegralLayer, StaticIntegralLayer, fit_cache
from .seen_tokens import Visibility, find_packed_texts, find_visibility, repack
from .transformers_versions import (
    CACHE,
    capture_outputs,
    causal_mask,
    init,
    is_tracing,
    takes_cache,
    update,
)

POLY_NORM_EPS = 1e-6

BUILT_IN = (None, "sdpa", "eager", "paged|eager")
"""Attention implementations that are part of this model."""

EXTERNAL = ("flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Implementations that transformers calls, once for signal heads and once for noise heads."""


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


class HeadRMSNorm(nn.RMSNorm):
    """RMSNorm of each head by itself, in the dtype of its input, which is float32 or wider.

    The heads share a weight.
    """

    def forward(self, heads: Tensor) -> Tensor:
        """[..., width] to the same."""
        assert self.eps is not None
        return head_norm(heads, self.weight, self.eps)


class HeadUpdates(nn.Module):
    """The low-rank updates of Shared DIFF, expanded head by head and added to the bases.

    The weight has the shape of a Linear's, but each row reads only the updates of its own head. It
    is not a Linear, so that quantisation and adapters do not replace it by one.

    Args:
        rank: rank of the updates.
        heads: numbers of signal and of noise heads.
        head_dim: rows of each head.
        per_layer: whether all signal heads share one update, and all noise heads another.
        bias: whether to add a bias.
    """

    def __init__(
        self, rank: int, heads: tuple[int, int], head_dim: int, per_layer: bool, bias: bool
    ) -> None:
        super().__init__()
        self.rows = [count * head_dim for count in heads]
        self.head_dim, self.per_layer = head_dim, per_layer
        self.weight = nn.Parameter(torch.empty(sum(self.rows), rank))
        self.bias = nn.Parameter(torch.zeros(sum(self.rows))) if bias else None
        nn.init.normal_(self.weight, 0, rank**-0.5)  # as in a Linear; usable outside a model

    def forward(self, low: Tensor, base: Tensor) -> Tensor:
        """[..., heads or 2, rank] and bases [..., rows] to [..., rows]."""
        if self.per_layer:
            weights = self.weight.split(self.rows)
            update = torch.cat(
                [functional.linear(low[..., i, :], weight) for i, weight in enumerate(weights)], -1
            )
        else:
            weight = self.weight.view(-1, self.head_dim, self.weight.shape[1])
            update = torch.einsum("...hr,hdr->...hd", low, weight).flatten(-2)
        heads = base + update
        return heads if self.bias is None else heads + self.bias


class SharedProjection(nn.Module):
    """Signal and noise heads as shared bases plus low-rank updates (Shared DIFF, eq. 3 and 4).

    In the paper's W = W_base + A Bᵀ, ``down`` is A and ``up`` is B, head by head, signal heads
    first.
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
    """Attention with every switch of the config; ``differential_attention`` has the mathematics."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.scaling = config.attention_multiplier
        self.is_causal = True
        signal, noise = config.num_signal_heads, config.num_noise_heads
        values, bias = config.num_value_heads, config.attention_bias
        noise_keys = values if config.has_noise_keys else 0
        self.num_key_value_groups = signal // values

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
        self.head_norm = None
        if config.head_norm != "none":
            affine = config.head_norm == "affine"
            self.head_norm = HeadRMSNorm(config.value_head_dim, config.head_norm_eps, affine)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None,
        visibility: Visibility = Visibility(),  # noqa: B008
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention.

        Args:
            hidden_states: [batch, rows, hidden].
            position_embeddings: cosines and sines of the rotation.
            cache: keys and values of earlier tokens.
            visibility: which tokens see which.
            **kwargs: for external implementations, and for the cache of continuous batching.

        Returns:
            [batch, rows, hidden], and the maps A₁ - λ A₂ + γ H, [batch, signal, rows, columns], or
            None where they are not computed in full.
        """
        config = self.config
        projected, past, layer = self.project(
            hidden_states, position_embeddings, cache, visibility, **kwargs
        )
        norm, scale, dtype = self.head_norm, 1.0, hidden_states.dtype
        if config.head_output_scale != "none":
            assert config.lambda_init is not None
            scale = 1 - config.lambda_init[self.layer_idx]
        in_kernels = _in_kernels(hidden_states) and (norm is None or type(norm) is HeadRMSNorm)
        of_norm: Any = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        of_norm = (*of_norm, norm is not None, scale)
        if in_kernels and self._is_next_row(projected, past, visibility, layer):
            from .triton_kernels import HeadInputs, HeadNorm, row_of_heads

            sums = None if layer is None else layer.sums.columns
            real = visibility.real
            inputs, weights = HeadInputs(*projected[:4], self.scaling, real), projected[4:]
            output, sums = row_of_heads(inputs, *weights, sums, HeadNorm(*of_norm))
            self._add_rows(layer, projected, None if sums is None else Sums(sums), real)
            return self.o_proj(output), None
        heads, maps = self._attend(projected, past, visibility, layer, kwargs)
        if in_kernels:
            from .triton_kernels import HeadNorm, combine_in_kernel

            output = combine_in_kernel(heads, HeadNorm(*of_norm), dtype)
        else:
            output = combine(*heads)
            output = output if norm is None else norm(output)
            output = _scale(output, scale).to(dtype).transpose(1, 2).flatten(2)
        return self.o_proj(output), maps

    def project(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None,
        visibility: Visibility = Visibility(),  # noqa: B008
        **kwargs: Any,
    ) -> tuple[Projected, int | Tensor, Any]:
        """Compute what maps and heads are made of; ``forward`` has the arguments.

        Returns:
            Queries, keys and values, the number of earlier tokens, and the layer of the cache that
            holds sums of an integral, if there is one.
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
        if _in_kernels(query):
            from .triton_kernels import rotate

            query, key = rotate(query, key, *position_embeddings)
        else:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        past: int | Tensor = 0
        if isinstance(cache, Cache):
            past, key, value = self._update_cache(cache, key, value, visibility)
        elif cache is not None:
            key, value = self._update_pages(cache, key, value, kwargs)
        layer = cache.layers[self.layer_idx] if isinstance(cache, Cache) else None
        if not isinstance(layer, IntegralLayer | StaticIntegralLayer):
            layer = None
        projected = Projected(query, key, value, config.num_signal_heads)
        if config.num_noise_heads:
            lambda_ = self._lambda(hidden_states)
            gamma = lambda_ * wide(self.gamma_gate) if hasattr(self, "gamma_gate") else lambda_
            projected = projected._replace(lambda_=lambda_, gamma=gamma)
        return projected, past, layer

    def _update_cache(
        self, cache: Cache, key: Tensor, value: Tensor, visibility: Visibility
    ) -> tuple[int | Tensor, Tensor, Tensor]:
        """Cache new keys and values; return the number of earlier tokens, all keys and values."""
        past, rows = cache.get_seq_length(self.layer_idx), key.shape[2]
        built_in = self.config._attn_implementation in BUILT_IN
        if not built_in or visibility.visible is not None:
            return past, *update(cache, key, value, self.layer_idx)
        past = int(past)  # the tensor of a static cache, if it has one yet, changes with the update
        key, value = update(cache, key, value, self.layer_idx)
        return past, key[:, :, : past + rows], value[:, :, : past + rows]

    def _attend_externally(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
    ) -> Tensor:
        """Run an external implementation for some heads; see ``fused_attention``."""
        implementation: Any = self.config._attn_implementation
        # Transformers searches the source for this call, to see if implementations can be chosen.
        attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, None)  # type: ignore[arg-type]
        batch, heads, rows, head_dim = query.shape
        width = value.shape[3]
        query, key, value = (  # kernels need heads of one width
            functional.pad(tensor, (0, max(head_dim, width) - tensor.shape[3]))
            for tensor in (query, key, value)
        )
        self.num_key_value_groups = heads // key.shape[1]
        output, _ = attend(
            self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **kwargs
        )
        attended: Tensor = output.reshape(batch, rows, heads, -1).transpose(1, 2)[..., :width]
        return attended

    def _attend(
        self,
        projected: Projected,
        past: Any,
        visibility: Visibility,
        layer: Any,
        kwargs: dict[str, Any],
    ) -> tuple[Heads, Tensor | None]:
        """Parts of the heads, and their maps where these are computed in full."""
        integral = self.config.integral
        past_sums = layer.sums if layer is not None else None
        maps: Tensor | None = None
        sums: Sums | None = None
        real, visible = visibility.real, visibility.visible
        if visible is not None and (visibility.eager or integral != "none"):
            how = self.scaling, integral, visible, past_sums
            maps, beyond, sums = differential_maps(projected, *how)
            signal = values_of(maps, projected.value)
            heads = Heads(signal if beyond is None else signal + beyond)
        elif visibility.packed:
            parts = []
            for texts in visibility.packed:
                alone = Visibility(texts.real if integral != "none" else None)
                unpacked = projected.map(texts.unpack)
                parts.append(combine(*self._attend(unpacked, 0, alone, None, kwargs)[0]))
            heads = Heads(repack(visibility.packed, parts, len(projected.value)))
        else:
            attend = partial(self._attend_externally, mask=visible, kwargs=kwargs)
            if self.config._attn_implementation in BUILT_IN:
                attend = partial(
                    fused_attention, scaling=self.scaling, past=past, real=real, visible=visible
                )
            integral = self._integral(projected, past, visibility, layer)
            of_text = past, real, past_sums, attend
            heads, sums = differential_heads(projected, self.scaling, integral, *of_text)
        self._add_rows(layer, projected, sums, visibility.real)
        return heads, maps

    def _is_next_row(
        self, projected: Projected, past: Any, visibility: Visibility, layer: Any
    ) -> bool:
        """Whether this is a row after others in a cache, which kernels compute at once."""
        config = self.config
        sums = None if layer is None else layer.sums
        return (
            projected.query.shape[2] == 1
            and isinstance(past, int)
            and past > 0
            and visibility.visible is None
            and config._attn_implementation in BUILT_IN
            and config.integral != "column_mean"
            and (layer is None or (sums is not None and sums.rest is None))
            and not torch.is_grad_enabled()
        )

    def _add_rows(
        self, layer: Any, projected: Projected, sums: Sums | None, real: Tensor | None
    ) -> None:
        """Store sums of an integral in its layer of the cache, if there is one."""
        if layer is not None:
            assert sums is not None
            (query, key), _ = projected.parts()
            layer.add_rows(sums, query, key.shape[1], real, self.scaling)

    def _integral(
        self, projected: Projected, past: Any, visibility: Visibility, layer: Any = None
    ) -> str:
        """The integral for ``differential_heads``: kernels or the series where they can run.

        A static cache, which graphs read, holds the column sums of an exact one; and a graph does
        not know where padding ends.
        """
        config, query = self.config, projected.query
        complete = not isinstance(past, Tensor) and past == 0 and visibility.visible is None
        kernels = query.shape[2] > 1 and projected.value.shape[3] % 8 == 0 and runs_kernels(query)
        kernels &= complete and config._attn_implementation in BUILT_IN
        if config.integral == "none" and kernels and not torch.compiler.is_compiling():
            return "fused"
        # Gradients of tiles are added up in any order.
        kernels &= not (torch.is_grad_enabled() and torch.are_deterministic_algorithms_enabled())
        if config.integral == "causal" and kernels:
            return "tiles"
        if config.integral != "causal" or config.integral_method == "exact":
            return config.integral
        rows = SHORTEST_SERIES if config.integral_method == "auto" else EXACT_ROWS + 1
        complete = complete and query.shape[2] >= rows
        graph = isinstance(layer, StaticIntegralLayer)
        graph = graph or (torch.compiler.is_compiling() and visibility.real is not None)
        return "series" if complete and not graph and query.dtype != torch.float64 else "causal"

    def _update_pages(
        self, cache: Any, key: Tensor, value: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Add to the cache of continuous batching; return keys and values of all its tokens.

        The cache has as much room for values as for keys, whatever the shape of their heads.
        """
        room = key.shape[1] * key.shape[3]
        flat = value.transpose(1, 2).flatten(2)  # [1, rows, room]
        width = flat.shape[2]
        flat = functional.pad(flat, (0, room - width))
        key, flat = cache.update(
            key_states=key,
            value_states=flat.unflatten(2, (key.shape[1], -1)).transpose(1, 2),
            layer_idx=self.layer_idx,
            kwargs=kwargs,
        )
        flat = flat.transpose(1, 2).flatten(2)[..., :width]
        return key, flat.unflatten(2, value.shape[1::2]).transpose(1, 2)

    def _lambda(self, hidden_states: Tensor) -> Tensor:
        """λ as [1, 1, 1, 1], or [batch, signal, rows, 1]."""
        if self.config.lambda_type == "projected":
            return wide(self.lambda_proj(hidden_states)).sigmoid().transpose(1, 2)[..., None]
        assert self.config.lambda_init is not None
        vectors = self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2
        if _in_kernels(hidden_states):
            from .triton_kernels import lambda_in_kernel

            return lambda_in_kernel(*vectors, self.config.lambda_init[self.layer_idx])
        lambda_ = lambda_of_vectors(*vectors, self.config.lambda_init[self.layer_idx])
        return lambda_.view(1, 1, 1, 1)


def _in_kernels(tensor: Tensor) -> bool:
    """Whether kernels do what compilers of graphs fuse by themselves."""
    return runs_kernels(tensor) and not torch.compiler.is_compiling()


class DiffTransformerDecoderLayer(GradientCheckpointingLayer):
    """Attention and MLP, each after an RMSNorm and added to the residual stream."""

    def __init__(self, config: DiffTransformerConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DiffTransformerAttention(config, layer_idx)
        ACT2FN["poly_norm"] = PolyNorm  # not at import: the code of other models has one too
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.residual_multiplier = config.residual_multiplier

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """[batch, rows, hidden] to the same; ``DiffTransformerAttention`` has the arguments."""
        attended, _ = self.self_attn(
            self.input_layernorm(hidden_states), position_embeddings, cache, **kwargs
        )
        hidden_states = hidden_states + _scale(attended, self.residual_multiplier)
        added = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + _scale(added, self.residual_multiplier)


class DiffTransformerPreTrainedModel(PreTrainedModel):
    """Declarations that transformers requires."""

    config_class = DiffTransformerConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DiffTransformerDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = ["cache"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DiffTransformerDecoderLayer,
        "attentions": DiffTransformerAttention,
    }

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """Choose an implementation, as in transformers.

        Raises:
            ValueError: it cannot run this model.
        """
        name: str = super().get_correct_attn_implementation(requested_attention, is_init_check)
        known = (*EXTERNAL, *(f"paged|{kernel}" for kernel in ("sdpa", *EXTERNAL)))
        if name not in BUILT_IN and (self.config.integral != "none" or name not in known):
            why = "has no integral" if name in known else "is not known to fit its heads"
            raise ValueError(
                f"attn_implementation is {name!r}, which {why}; this model runs with 'sdpa' or "
                "'eager'"
            )
        return name

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
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    @takes_cache
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states of every token.

        Texts may be packed: without a mask and a cache, a text begins wherever ``position_ids`` do
        not increase by one.

        Args:
            input_ids: [batch, rows].
            attention_mask: [batch, columns], 0 for padding; or [batch or 1, 1, rows, columns], true
                or 0 for visible columns, false or far below 0 for hidden ones.
            position_ids: [batch or 1, rows]; None to continue after the cached tokens.
            cache: a dynamic or static cache, or that of continuous batching.
            inputs_embeds: [batch, rows, hidden], instead of ``input_ids``.
            use_cache: whether to return a cache.
            **kwargs: ``output_hidden_states`` for those of every layer, ``output_attentions`` for
                the maps A₁ - λ A₂ + γ H of every layer, [batch, signal heads, rows, columns], whose
                rows do not sum to one; the rest is for the implementation of attention.

        Raises:
            ValueError: the inputs contradict each other, or the cache cannot be used.
        """
        hidden_states = self._embed(input_ids, inputs_embeds)
        paged = cache is not None and not isinstance(cache, Cache)
        packed: tuple[Any, ...] = ()
        if position_ids is not None and attention_mask is None and not paged and not is_tracing():
            cached = bool(use_cache or cache is not None)
            packed = find_packed_texts(position_ids, len(hidden_states), cached=cached)
            use_cache = False if packed else use_cache
        if not paged:
            cache = self._prepare_cache(cache, use_cache)
        past = cache.get_seq_length() if isinstance(cache, Cache) else 0
        tokens = hidden_states, attention_mask, position_ids
        if position_ids is None:
            rows = torch.arange(hidden_states.shape[1], device=hidden_states.device)
            position_ids = (rows + past)[None]
        if self.config._attn_implementation in BUILT_IN:
            maps = bool(kwargs.get("output_attentions", self.config.output_attentions))
            visibility = find_visibility(
                *(*tokens, None if paged else cache, packed),
                paged=paged,
                averaged=self.config.integral != "none",
                eager=maps or self.config._attn_implementation in ("eager", "paged|eager"),
            )
        else:
            masks = {"attention_mask": attention_mask, "position_ids": position_ids}
            visible = causal_mask(self.config, hidden_states, cache, **masks)
            visibility = Visibility(visible=visible)
        position_embeddings = self.rotary_emb(hidden_states, position_ids=position_ids)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                position_embeddings=position_embeddings,
                cache=cache,
                visibility=visibility,
                position_ids=position_ids,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states),
            **{CACHE: cache if use_cache is not False else None},
        )

    def _embed(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
        """The first hidden states."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        return _scale(hidden_states, self.config.embedding_multiplier)

    def _prepare_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        """Make the cache, or check the one that was passed; None for no cache."""
        config = self.config
        if use_cache is None:
            use_cache = config.use_cache and not self.training
        if config.integral == "column_mean":
            if use_cache or cache is not None:
                raise ValueError(
                    "the column mean changes with every token, so nothing can be cached; pass "
                    "use_cache=False (and generate from input_ids, not from inputs_embeds)"
                )
            return None
        if cache is None and use_cache:
            cache = DynamicCache()
        if cache is not None:
            key_shape = config.num_key_value_heads, config.head_dim
            same_shape = key_shape == (config.num_value_heads, config.value_head_dim)
            integral = config.integral == "causal"
            fit_cache(cache, len(self.layers), integral=integral, same_shape=same_shape)
        return cache


def _scale(tensor: Tensor, factor: float) -> Tensor:
    """Multiply a tensor by a factor, if that is not 1."""
    return tensor if factor == 1 else tensor * factor


class DiffTransformerForCausalLM(DiffTransformerPreTrainedModel, GenerationMixin):
    """The model with its output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: DiffTransformerConfig) -> None:
        super().__init__(config)
        self.model = DiffTransformerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    # Granite's: logits of the next token, divided by ``logits_scaling``, and their loss.
    forward = GraniteForCausalLM.forward

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as in transformers; without a cache if the integral is a column mean."""
        if self.config.integral == "column_mean":
            kwargs["use_cache"] = False
        return super().generate(*args, **kwargs)

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Begin continuous batching, as in transformers.

        Raises:
            ValueError: the pages, which have as much room for values as for keys, do not suffice.
        """
        config = self.config
        room = config.num_key_value_heads * config.head_dim
        if config.integral != "none" or config.num_value_heads * config.value_head_dim > room:
            kept = "the column sums of an integral" if config.integral != "none" else "its values"
            raise ValueError(
                f"continuous batching has no room for {kept}; use generate with a padded batch"
            )
        return super().init_continuous_batching(*args, **kwargs)


class _Classifier(DiffTransformerPreTrainedModel):
    """The model with a linear layer on its hidden states."""

    score_bias = True

    def __init__(self, config: DiffTransformerConfig) -> None:
        # Transformers' own __init__ looks up the model's class, and asks whether to trust its code.
        DiffTransformerPreTrainedModel.__init__(self, config)
        assert config.num_labels is not None
        self.num_labels = config.num_labels
        self.model = DiffTransformerModel(config)
        self.dropout = nn.Dropout(getattr(config, "classifier_dropout", None) or 0.0)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=self.score_bias)
        self.post_init()


class DiffTransformerForSequenceClassification(GenericForSequenceClassification, _Classifier):
    """A linear layer over the last token that is not padding."""

    score_bias = False
    __init__ = _Classifier.__init__


class DiffTransformerForTokenClassification(GenericForTokenClassification, _Classifier):
    """A linear layer over every token."""

    __init__ = _Classifier.__init__


# Makes ``save_pretrained`` copy this code next to the weights.
DiffTransformerConfig.register_for_auto_class()
DiffTransformerModel.register_for_auto_class("AutoModel")
for _class in (
    DiffTransformerForCausalLM,
    DiffTransformerForSequenceClassification,
    DiffTransformerForTokenClassification,
):
    _class.register_for_auto_class(_class.__name__.replace("DiffTransformer", "AutoModel"))
