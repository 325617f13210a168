"""The config of the DIFF Transformer with a Mamba-2 mixer beside attention."""

from typing import Any

from .configuration_diff_transformer import DiffTransformerConfig

MIXER = {
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 256,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "projectors_bias": False,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
}
"""Falcon-H1's settings of the mixer, with their defaults."""


class HybridDiffConfig(DiffTransformerConfig):
    """The DIFF Transformer's config, with Falcon-H1's keys for the mixer, see ``MIXER``.

    Raises:
        ValueError: see ``DiffTransformerConfig``; or there is an integral.
    """

    model_type = "hybrid_diff"
    time_step_limit = (0.0, float("inf"))
    ssm_in_multiplier = 1.0

    def __init__(self, **kwargs: Any) -> None:
        for name, default in MIXER.items():
            setattr(self, name, kwargs.pop(name, default))
        kwargs["mamba_d_head"] = self.mamba_d_ssm // self.mamba_n_heads
        super().__init__(**kwargs)
        if self.integral != "none":
            raise ValueError(f"integral is {self.integral!r}; a hybrid has none")

    @property
    def layer_types(self) -> list[str]:
        """What the cache holds of each layer."""
        return ["hybrid"] * self.num_hidden_layers


HybridDiffConfig.register_for_auto_class()
