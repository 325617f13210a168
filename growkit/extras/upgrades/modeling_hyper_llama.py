"""Llama with several residual streams, mixed by the hyper-connections of DeepSeek-V4.

Attention is Llama's or Qwen3's, the MLP is Llama's, experts in its place are Mixtral's, and the
mixing is DeepSeek-V4's ("mHC: Manifold-Constrained Hyper-Connections", arXiv 2512.24880). States
between layers are [batch, tokens, streams, hidden].
"""

from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
)
from transformers.models.llama.configuration_llama import LlamaConfig
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

DESCRIPTION = """
family: Hyper-Llama
model_type: hyper_llama
extends: llama
sizes: {hc_mult: streams, num_local_experts: experts}
may_be_zero: [num_local_experts]
constants: {one: 1, two: 2, three: 3}
assumed:
  hc_mult: 4
  hc_sinkhorn_iters: 20
  hc_eps: 0.0
  use_qk_norm: false
  num_local_experts: 0
  num_experts_per_tok: 2
  router_aux_loss_coef: 1.0e-3
conditions:
  dense: num_local_experts == 0
  normed: use_qk_norm
fixed:
  layers:
    why: mix their streams, so that no new layer can leave its input unchanged
norms: [{norm: hidden}]  # without a weight, which could make up for a mean that zeros change
upgrades:
  hyper-connections:
    llama: {}
    mixtral:
      assumed: {rope_theta: 1.0e+6, max_position_embeddings: 131072}
      only: {sliding_window: [null]}
    mistral: {assumed: {sliding_window: 4096}, only: {sliding_window: [null]}}
    qwen2: {only: {use_sliding_window: [false, null]}}
    qwen3: {only: {use_sliding_window: [false, null]}}
tensors:
  model.layers.{layer}.self_attn.q_norm.weight:
    {pattern: head_dim, norm: head_dim, eps: rms_norm_eps, when: normed}
  model.layers.{layer}.self_attn.k_norm.weight:
    {pattern: head_dim, norm: head_dim, eps: rms_norm_eps, when: normed}
  model.layers.{layer}.mlp.gate_proj.weight: {when: dense}
  model.layers.{layer}.mlp.up_proj.weight: {when: dense}
  model.layers.{layer}.mlp.down_proj.weight: {when: dense}
  model.layers.{layer}.mlp.gate.weight:
    {pattern: experts <- hidden, component: router, dense: new, when: not dense}
  model.layers.{layer}.mlp.experts.gate_up_proj:
    pattern: "experts: two.ffn <- hidden"
    component: experts
    when: not dense
    dense:
      - model.layers.{layer}.mlp.gate_proj.weight
      - model.layers.{layer}.mlp.up_proj.weight
  model.layers.{layer}.mlp.experts.down_proj:
    pattern: "experts: hidden <- ffn"
    component: experts
    when: not dense
    dense: "model.layers.{layer}.mlp.down_proj.weight"
  model.layers.{layer}.attn_hc.fn: streams + streams + streams.streams <- streams.hidden
  model.layers.{layer}.attn_hc.base: streams + streams + streams.streams
  model.layers.{layer}.attn_hc.scale: three
  model.layers.{layer}.ffn_hc.fn: streams + streams + streams.streams <- streams.hidden
  model.layers.{layer}.ffn_hc.base: streams + streams + streams.streams
  model.layers.{layer}.ffn_hc.scale: three
  model.hc_head.hc_fn: streams <- streams.hidden
  model.hc_head.hc_base: streams
  model.hc_head.hc_scale: one
experts:
  width: ffn
  dense: {hyper_llama: {when: num_local_experts == 0}}
"""

WITHOUT_START = (
    DeepseekV4HyperConnection,
    DeepseekV4HyperHead,
    MixtralExperts,
    MixtralTopKRouter,
)
"""Modules whose parameters are empty until a model initialises them."""


@strict
class HyperLlamaConfig(LlamaConfig):
    """Llama's config, with DeepSeek-V4's keys for hyper-connections and Mixtral's for experts.

    Args:
        hc_mult: number of residual streams.
        hc_sinkhorn_iters: number of steps that make the matrix that mixes streams doubly
            stochastic.
        hc_eps: number added in these steps, and to the weights with which streams are read.
        use_qk_norm: whether attention is Qwen3's, with norms of query and key heads.
        num_local_experts: number of experts in place of every MLP; 0 for MLPs.
        num_experts_per_tok: number of experts that a token goes through.
        router_jitter_noise: size of the noise on the input of experts in training.
        router_aux_loss_coef: coefficient of the loss that balances experts.
        output_router_logits: whether that loss is added.
    """

    model_type = "hyper_llama"

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 0.0
    use_qk_norm: bool = False
    num_local_experts: int = 0
    num_experts_per_tok: int = 2
    router_jitter_noise: float = 0.0
    router_aux_loss_coef: float = 0.001
    output_router_logits: bool = False


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
