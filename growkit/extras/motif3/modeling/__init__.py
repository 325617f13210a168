"""The transformers model for Motif-3, with the names of its parameters and settings."""

from functools import partial

from growkit.planning.own_class import register_classes

MODEL_TYPE = "motif3"
CLASSES = {
    "AutoConfig": "modeling_motif3.Motif3Config",
    "AutoModelForCausalLM": "modeling_motif3.Motif3ForCausalLM",
}
"""The classes, by auto class of transformers."""

register = partial(register_classes, MODEL_TYPE, CLASSES, __name__)
"""Registers the model with transformers' auto classes, so that no folder needs its code."""
