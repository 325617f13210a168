"""The config of Granite with multi-head latent attention."""

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.models.granite.configuration_granite import GraniteConfig


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


__all__ = ["LatentGraniteConfig"]
