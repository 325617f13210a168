"""Mamba: a selective state space in every layer, and nothing else.

https://github.com/huggingface/transformers/tree/main/src/transformers/models/mamba
"""

from __future__ import annotations

from growkit.families.description import Norm, Tensor, always, is_set, linear, tied, untied
from growkit.families.family import Family

LAYER = "backbone.layers.{layer}."
MIXER = LAYER + "mixer."
NORM = Norm("hidden", "layer_norm_epsilon")


_bias = is_set("use_bias")

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
        *linear(MIXER + "in_proj", "two.inner <- hidden", _bias),
        Tensor(MIXER + "conv1d.weight", "inner, one, kernel"),
        Tensor(MIXER + "conv1d.bias", "inner", is_set("use_conv_bias")),
        Tensor(MIXER + "x_proj.weight", "rank + state + state <- inner"),
        *linear(MIXER + "dt_proj", "inner <- rank", always),
        Tensor(MIXER + "A_log", "inner, state"),
        Tensor(MIXER + "D", "inner"),
        *linear(MIXER + "out_proj", "hidden <- inner", _bias),
        Tensor("backbone.norm_f.weight", "<- hidden", tied, norm=NORM),
        Tensor("backbone.norm_f.weight", "hidden", untied, norm=NORM),
        Tensor("lm_head.weight", "vocab <- hidden", untied),
    ),
    duplicates={"lm_head.weight": "backbone.embeddings.weight"},
)
