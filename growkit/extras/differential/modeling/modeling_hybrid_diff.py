"""The DIFF Transformer with the Mamba-2 mixer of Falcon-H1 beside the attention of every layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    LinearAttentionAndStaticFullAttentionLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.falcon_h1.configuration_falcon_h1 import FalconH1Config
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

from .configuration_diff_transformer import DiffTransformerConfig
from .integral_cache import StaticHeadsLayer
from .modeling_diff_transformer import (
    DiffTransformerDecoderLayer,
    DiffTransformerForCausalLM,
    DiffTransformerModel,
)
from .seen_tokens import PackedTexts, find_packed_texts, repack

DESCRIPTION = """
family: Hybrid DIFF Transformer
model_type: hybrid_diff
extends: diff_transformer
sizes:
  mamba_d_ssm: inner
  mamba_n_heads: mixer_heads
  mamba_n_groups: mixer_groups
  mamba_d_state: state
  mamba_d_conv: kernel
upgrades:
  hybrid:
    diff_transformer: {only: {integral: [none]}}
tensors:
  model.layers.{layer}.mamba.in_proj.weight:
    pattern: inner + inner + mixer_groups.state + mixer_groups.state + mixer_heads <- hidden
    bias: 'get(mamba_proj_bias, False)'
  model.layers.{layer}.mamba.conv1d.weight:
    pattern: inner + mixer_groups.state + mixer_groups.state, one, kernel
  model.layers.{layer}.mamba.conv1d.bias:
    {pattern: inner + mixer_groups.state + mixer_groups.state, when: 'get(mamba_conv_bias, True)'}
  model.layers.{layer}.mamba.dt_bias: {pattern: mixer_heads, start: time_steps}
  model.layers.{layer}.mamba.A_log: {pattern: mixer_heads, start: decays}
  model.layers.{layer}.mamba.D: {pattern: mixer_heads, start: 1.0}
  model.layers.{layer}.mamba.norm.weight: {pattern: inner, when: 'get(mamba_rms_norm, False)'}
  model.layers.{layer}.mamba.out_proj.weight:
    {pattern: hidden <- inner, bias: 'get(projectors_bias, False)'}
"""


MIXER = {
    key: default
    for key, default in FalconH1Config().to_dict().items()
    if key.startswith("mamba_") or key == "projectors_bias"
}
"""Falcon-H1's settings of the mixer, with its defaults."""


class HybridDiffConfig(DiffTransformerConfig):
    """The DIFF Transformer's config, with the settings of the mixer.

    Raises:
        ValueError: see ``DiffTransformerConfig``; or there is an integral.
    """

    model_type = "hybrid_diff"
    time_step_limit = (0.0, float("inf"))
    ssm_in_multiplier = 1.0

    def __init__(self, **kwargs: Any) -> None:
        settings = MIXER | kwargs
        settings["mamba_d_head"] = settings["mamba_d_ssm"] // settings["mamba_n_heads"]
        super().__init__(**settings)
        if self.integral != "none":
            raise ValueError(f"integral is {self.integral!r}; a hybrid has none")

    @property
    def layer_types(self) -> list[str]:
        """What the cache holds of each layer."""
        return ["hybrid"] * self.num_hidden_layers


class StaticHybridLayer(  # type: ignore[misc, override]
    LinearAttentionAndStaticFullAttentionLayer, StaticHeadsLayer
):
    """Static layer with a mixer's state, whose values may have other heads than the keys."""

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate keys and values, given by position, or one of the mixer's states."""
        if args:
            StaticHeadsLayer.lazy_initialization(self, *args)
        else:
            super().lazy_initialization(**kwargs)


class HybridDiffDecoderLayer(DiffTransformerDecoderLayer):
    """Attention and a mixer side by side, then the MLP."""

    def __init__(self, config: HybridDiffConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        falcon: Any = config
        self.mamba = FalconH1Mixer(falcon, layer_idx)
        self.mamba.mup_vector = 1.0  # type: ignore[assignment]

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        cache: Any = None,
        real: Tensor | None = None,
        packed: tuple[PackedTexts, ...] = (),
        **kwargs: Any,
    ) -> Tensor:
        """See ``DiffTransformerDecoderLayer``.

        In addition: ``real``, [batch, rows], 0 for padding, and ``packed``, the texts that rows
        hold, whose states the mixer keeps apart.
        """
        read = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(read, position_embeddings, cache, **kwargs)
        if packed:
            texts = [self.mamba(read.flatten(0, 1)[of.indices], None, of.real) for of in packed]
            mixed = repack(packed, [text.unsqueeze(1) for text in texts], len(read)).squeeze(1)
        else:
            mixed = self.mamba(read, cache, real)
        attended = attended + mixed
        hidden_states = hidden_states + self.residual_multiplier * attended
        added: Tensor = self.mlp(self.post_attention_layernorm(hidden_states))
        return hidden_states + self.residual_multiplier * added


class HybridDiffModel(DiffTransformerModel):
    """Embedding, layers and the final norm."""

    config_class = HybridDiffConfig
    _no_split_modules = ["HybridDiffDecoderLayer"]  # noqa: RUF012
    _is_stateful = True
    _can_compile_fullgraph = False

    def __init__(self, config: HybridDiffConfig) -> None:
        super().__init__(config)
        layers = (HybridDiffDecoderLayer(config, index) for index in range(len(self.layers)))
        self.layers = nn.ModuleList(layers)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        DiffTransformerModel._init_weights(self, module)  # also that of HybridDiffForCausalLM
        if isinstance(module, FalconH1Mixer):
            init.ones_(module.dt_bias)
            init.copy_(module.A_log, torch.arange(1, len(module.A_log) + 1).log())
            init.ones_(module.D)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """See ``DiffTransformerModel``."""
        embedded = kwargs.get("inputs_embeds")
        tokens = input_ids if embedded is None else embedded
        if tokens is not None and position_ids is not None and attention_mask is None:
            cached = bool(kwargs.get("use_cache") or kwargs.get("cache") is not None)
            kwargs["packed"] = find_packed_texts(position_ids, len(tokens), cached=cached)
        if tokens is not None and attention_mask is not None and attention_mask.dim() == 2:
            kwargs["real"] = attention_mask[:, -tokens.shape[1] :]
        inputs = input_ids, attention_mask, position_ids
        output: BaseModelOutputWithPast = super().forward(*inputs, **kwargs)
        return output

    def _prepare_cache(self, cache: Cache | None, use_cache: bool | None) -> Cache | None:
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if cache is None and use_cache:
            cache = DynamicCache(config=self.config)
        layers: list[Any] = cache.layers if cache is not None else []
        for index, layer in enumerate(layers):
            if type(layer) is LinearAttentionAndStaticFullAttentionLayer:
                layers[index] = StaticHybridLayer(layer.max_cache_len)
        return super()._prepare_cache(cache, use_cache)


class HybridDiffForCausalLM(DiffTransformerForCausalLM):
    """The model with its output head."""

    config_class = HybridDiffConfig
    _no_split_modules = ["HybridDiffDecoderLayer"]  # noqa: RUF012
    _is_stateful = True
    _can_compile_fullgraph = False
    _init_weights = HybridDiffModel._init_weights

    def __init__(self, config: HybridDiffConfig) -> None:
        super().__init__(config)
        self.model = HybridDiffModel(config)
        self.post_init()

    @staticmethod
    def create_masks_for_generate(
        attention_mask: Tensor | None = None, **kwargs: Any
    ) -> Tensor | None:
        """The mask as it is, from which attention and mixers take what they need."""
        return attention_mask
