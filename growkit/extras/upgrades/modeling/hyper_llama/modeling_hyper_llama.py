"""Llama with several residual streams, mixed by the hyper-connections of DeepSeek-V4.

Attention is Llama's or Qwen3's, the MLP is Llama's, experts in its place are Mixtral's, and the
mixing is DeepSeek-V4's ("mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880). States
between layers are [batch, tokens, streams, hidden].
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaModel,
)
from transformers.models.mixtral.modeling_mixtral import (
    MixtralExperts,
    MixtralForCausalLM,
    MixtralSparseMoeBlock,
    MixtralTopKRouter,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .configuration_hyper_llama import HyperLlamaConfig

WITHOUT_START = (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    MixtralExperts,
    MixtralTopKRouter,
)
"""Modules whose parameters are empty until a model initialises them."""


def _mixed(weights: tuple[Tensor, Tensor], output: Tensor, streams: Tensor) -> Tensor:
    """Add a block's output to the mixed streams.

    Args:
        weights: factors of the output for every stream, [batch, tokens, streams], and the matrix
            that mixes the streams, [batch, tokens, streams, streams].
        output: [batch, tokens, hidden].
        streams: [batch, tokens, streams, hidden].
    """
    post, mixing = (weight.to(streams.dtype) for weight in weights)
    return post.unsqueeze(-1) * output.unsqueeze(-2) + mixing.transpose(-1, -2) @ streams


class HyperLlamaDecoderLayer(LlamaDecoderLayer):
    """A layer of Llama that reads and writes several streams."""

    def __init__(self, config: HyperLlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        mixing: Any = config
        if config.use_qk_norm:
            attention: Any = Qwen3Attention(mixing, layer_idx)
            self.self_attn = attention
        if config.num_local_experts:
            experts: Any = MixtralSparseMoeBlock(mixing)
            self.mlp = experts
        self.attn_hc = DeepseekV4HyperConnection(mixing)
        self.ffn_hc = DeepseekV4HyperConnection(mixing)

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer.

        Args:
            hidden_states: the streams, [batch, tokens, streams, hidden].
            **kwargs: arguments of the attention.
        """
        *weights, read = self.attn_hc(hidden_states)
        output, _ = self.self_attn(hidden_states=self.input_layernorm(read), **kwargs)
        hidden_states = _mixed(weights, output, hidden_states)
        *weights, read = self.ffn_hc(hidden_states)
        return _mixed(weights, self.mlp(self.post_attention_layernorm(read)), hidden_states)


class _WithExperts:
    """Lets users choose how Mixtral's experts run, whichever base was asked first."""

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True


class HyperLlamaModel(_WithExperts, LlamaModel):
    """Llama's stack of layers, between the copies of the embedding and the sum of the streams."""

    config: HyperLlamaConfig
    config_class = HyperLlamaConfig
    _no_split_modules = ["HyperLlamaDecoderLayer"]  # noqa: RUF012
    _can_record_outputs = {  # noqa: RUF012
        "attentions": [LlamaAttention, Qwen3Attention],
        "hidden_states": HyperLlamaDecoderLayer,
        "router_logits": OutputRecorder(MixtralTopKRouter, index=0),
    }

    def __init__(self, config: HyperLlamaConfig) -> None:
        super().__init__(config)
        layers = (HyperLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        mixing: Any = config
        self.hc_head = DeepseekV4HyperHead(mixing)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)  # type: ignore[no-untyped-call]
        if isinstance(module, WITHOUT_START):
            for name, parameter in module.named_parameters(recurse=False):
                if name.endswith("base"):
                    init.zeros_(parameter)
                elif name.endswith("scale"):
                    init.ones_(parameter)
                else:
                    init.normal_(parameter, std=self.config.initializer_range)

    @merge_with_config_defaults  # type: ignore[untyped-decorator]
    @capture_outputs  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> MoeModelOutputWithPast:
        """Run the model; see ``LlamaModel.forward``."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds was expected")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            position_ids = (position_ids + seen).unsqueeze(0)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=inputs_embeds,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )
        positions = self.rotary_emb(inputs_embeds, position_ids=position_ids)
        streams = inputs_embeds.unsqueeze(2).expand(-1, -1, self.config.hc_mult, -1).contiguous()
        for layer in self.layers:
            streams = layer(
                streams,
                attention_mask=mask,
                position_embeddings=positions,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                **kwargs,
            )
        hidden_states = self.norm(self.hc_head(streams))
        return MoeModelOutputWithPast(last_hidden_state=hidden_states, cache=cache)


class HyperLlamaForCausalLM(_WithExperts, MixtralForCausalLM):
    """The model with a head for language modelling, and the loss that balances experts."""

    config: HyperLlamaConfig  # type: ignore[assignment]
    config_class = HyperLlamaConfig
    _no_split_modules = ["HyperLlamaDecoderLayer"]  # noqa: RUF012

    def __init__(self, config: HyperLlamaConfig) -> None:
        mixing: Any = config
        super().__init__(mixing)
        self.model = HyperLlamaModel(config)
        self.post_init()  # type: ignore[no-untyped-call]


__all__ = ["HyperLlamaForCausalLM", "HyperLlamaModel"]
