"""The transformers model for every variant of differential attention.

The only place with attention mathematics. Its files are copied next to exported weights, so that a
folder loads without growkit installed; they do not import growkit.
"""

from functools import partial
from pathlib import Path

from growkit.planning.own_class import code_in, register_classes

MODEL_TYPE = "diff_transformer"
OLDEST_TRANSFORMERS = "4.57"
"""The oldest version of transformers that runs the copied code; the config repeats it."""

ARCHITECTURE = "DiffTransformerForCausalLM"
AUTO_MAP = {
    "AutoConfig": "configuration_diff_transformer.DiffTransformerConfig",
    "AutoModel": "modeling_diff_transformer.DiffTransformerModel",
    **{
        f"AutoModel{task}": f"modeling_diff_transformer.DiffTransformer{task}"
        for task in ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")
    },
}
"""The ``auto_map`` of ``config.json``: where transformers finds the classes in a folder."""


def model_code() -> dict[str, bytes]:
    """The model's files, by name, which belong next to the weights in a folder."""
    files = code_in(Path(__file__).parent)
    return {name: code for name, code in files.items() if "hybrid" not in name}


register = partial(register_classes, MODEL_TYPE, AUTO_MAP, __name__)
"""Registers the model with transformers' auto classes, so that no folder needs its code."""
