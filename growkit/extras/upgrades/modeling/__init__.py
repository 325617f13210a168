"""The transformers model with several residual streams.

Its files are copied next to the weights; they do not import growkit.
"""

from functools import partial
from pathlib import Path

from growkit.planning.own_class import code_in, register_classes

MODEL_TYPE = "hyper_llama"
ARCHITECTURE = "HyperLlamaForCausalLM"
AUTO_MAP = {
    "AutoConfig": "configuration_hyper_llama.HyperLlamaConfig",
    "AutoModel": "modeling_hyper_llama.HyperLlamaModel",
    "AutoModelForCausalLM": f"modeling_hyper_llama.{ARCHITECTURE}",
}
"""The ``auto_map`` of ``config.json``: where transformers finds the classes in a folder."""

model_code = partial(code_in, Path(__file__).parent)
"""Gives the model's files, by name, which belong next to the weights in a folder."""

register = partial(register_classes, MODEL_TYPE, AUTO_MAP, __name__)
"""Registers the model with transformers' auto classes, so that no folder needs its code."""
