"""The config of Llama with several residual streams."""

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig


@strict
class HyperLlamaConfig(LlamaConfig):
    """Llama's config, with the keys that DeepSeek-V4 has for its hyper-connections.

    Args:
        hc_mult: number of residual streams.
        hc_sinkhorn_iters: number of steps that make the matrix that mixes streams doubly
            stochastic.
        hc_eps: number added in these steps, and to the weights with which streams are read.
    """

    model_type = "hyper_llama"

    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 0.0


__all__ = ["HyperLlamaConfig"]
