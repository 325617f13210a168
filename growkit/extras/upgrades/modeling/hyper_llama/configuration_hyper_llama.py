"""The config of Llama, or of its class with experts, with several residual streams."""

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig


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


__all__ = ["HyperLlamaConfig"]
