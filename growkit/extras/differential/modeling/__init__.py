"""The transformers model for every variant of differential attention.

The only place with attention mathematics. Its files are copied next to exported weights, so that a
folder loads without growkit installed; they do not import growkit.
"""

from pathlib import Path

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

FILES = sorted(file.name for file in Path(__file__).parent.glob("[!_]*.py"))


def model_code() -> dict[str, bytes]:
    """The model's files, by name, which belong next to the weights in a folder."""
    return {name: (Path(__file__).parent / name).read_bytes() for name in FILES}


def register() -> None:
    """Register the model with transformers' auto classes, so that no folder needs its code."""
    import transformers

    from growkit.extras.differential.modeling import (
        configuration_diff_transformer,
        modeling_diff_transformer,
    )

    config = configuration_diff_transformer.DiffTransformerConfig
    transformers.AutoConfig.register(MODEL_TYPE, config, exist_ok=True)
    for auto, name in AUTO_MAP.items():
        cls = name.rpartition(".")[2]
        if auto != "AutoConfig":
            model = getattr(modeling_diff_transformer, cls)
            getattr(transformers, auto).register(config, model, exist_ok=True)
