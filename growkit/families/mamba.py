"""Mamba: a selective state space in every layer, and nothing else.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/mamba
"""

from __future__ import annotations

from growkit.base.tensors import Config
from growkit.families.description import Norm, Tensor
from growkit.families.family import Family
from growkit.families.llama import tied, untied

LAYER = "backbone.layers.{layer}."
MIXER = LAYER + "mixer."
NORM = Norm("hidden", "layer_norm_epsilon")


def _bias(config: Config) -> bool:
    return bool(config["use_bias"])


def _conv_bias(config: Config) -> bool:
    return bool(config["use_conv_bias"])


FAMILY = Family(
    name="Mamba",
    model_types=("mamba",),
    architecture="MambaForCausalLM",
    axes={
        "vocab_size": ("vocab",),
        "hidden_size": ("hidden",),
        "intermediate_size": ("inner",),
        "state_size": ("state",),
        "time_step_rank": ("rank",),
        "conv_kernel": ("kernel",),
        "num_hidden_layers": ("layers",),
    },
    derived=frozenset({"intermediate_size"}),
    ratios={"expand": ("inner", "hidden")},
    kinds={"inner": "ffn"},
    defaults={
        "state_size": 16,
        "expand": 2,
        "intermediate_size": lambda config: int(config["expand"] * config["hidden_size"]),
        "time_step_rank": lambda config: -(-config["hidden_size"] // 16),
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
    },
    constants={"one": 1, "two": 2},
    tensors=(
        Tensor("backbone.embeddings.weight", "vocab -> hidden"),
        Tensor(LAYER + "norm.weight", "hidden", norm=NORM, component="input_layernorm"),
        Tensor(MIXER + "in_proj.weight", "two.inner <- hidden"),
        Tensor(MIXER + "in_proj.bias", "two.inner", _bias),
        Tensor(MIXER + "conv1d.weight", "inner, one, kernel"),
        Tensor(MIXER + "conv1d.bias", "inner", _conv_bias),
        Tensor(MIXER + "x_proj.weight", "rank + state + state <- inner"),
        Tensor(MIXER + "dt_proj.weight", "inner <- rank"),
        Tensor(MIXER + "dt_proj.bias", "inner"),
        Tensor(MIXER + "A_log", "inner, state"),
        Tensor(MIXER + "D", "inner"),
        Tensor(MIXER + "out_proj.weight", "hidden <- inner"),
        Tensor(MIXER + "out_proj.bias", "hidden", _bias),
        # What a tied head reads is shared out one step earlier, in the norm before it.
        Tensor("backbone.norm_f.weight", "<- hidden", tied, norm=NORM),
        Tensor("backbone.norm_f.weight", "hidden", untied, norm=NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    duplicates={"lm_head.weight": "backbone.embeddings.weight"},
)
