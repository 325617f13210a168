"""The DIFF Transformer with the Mamba-2 mixer of Falcon-H1 beside the attention of every layer."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

from .configuration_hybrid_diff import HybridDiffConfig
from .modeling_diff_transformer import (
    DiffTransformerDecoderLayer,
    DiffTransformerForCausalLM,
    DiffTransformerModel,
)
from .seen_tokens import find_packed_texts


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
        **kwargs: Any,
    ) -> Tensor:
        """See ``DiffTransformerDecoderLayer``; real is [batch, rows], 0 for padding."""
        read = self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(read, position_embeddings, cache, **kwargs)
        attended = attended + self.mamba(read, cache, real)
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
        super()._init_weights(module)
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
        """See ``DiffTransformerModel``; the state of a mixer goes through packed texts.

        Raises:
            ValueError: see there; or texts are packed.
        """
        embedded = kwargs.get("inputs_embeds")
        tokens = input_ids if embedded is None else embedded
        if tokens is not None and position_ids is not None and attention_mask is None:
            find_packed_texts(position_ids, len(tokens), cached=True)
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


HybridDiffModel.register_for_auto_class("AutoModel")
HybridDiffForCausalLM.register_for_auto_class("AutoModelForCausalLM")
