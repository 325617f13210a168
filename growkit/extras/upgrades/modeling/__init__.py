"""The transformers model. Its files are copied next to the weights; they do not import growkit."""

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


def model_code() -> dict[str, bytes]:
    """The model's files, by name, which belong next to the weights in a folder."""
    return code_in(Path(__file__).parent)


def register() -> None:
    """Register the model with transformers' auto classes, so that no folder needs its code."""
    register_classes(MODEL_TYPE, AUTO_MAP, __name__)
