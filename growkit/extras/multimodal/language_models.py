"""How a language model is taken out of a multimodal one.

transformers resolves its config from the config of the whole model; its tensors have a prefix in
the files. Towers and projectors are left out.
"""

import json
from pathlib import Path
from typing import Any

from growkit.base.errors import foreign
from growkit.base.tensors import Config
from growkit.engine.transformers_class import parsed, quiet
from growkit.extras.multimodal.inside import Inside, tensors_inside
from growkit.model.checkpoint.reading import Checkpoint

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Config keys of special tokens."""


def view_inside(checkpoint: Checkpoint) -> Inside | None:
    """The language model inside a multimodal checkpoint; None if none can be taken out.

    Raises:
        InputError: transformers does not accept the config of the whole model.
    """
    if not tensors_inside(checkpoint.tensors):
        return None
    config = config_inside(checkpoint.config, checkpoint.folder)
    return Inside(checkpoint, config) if config else None


def config_inside(whole: Config, folder: Path) -> Config | None:
    """The config of the language model inside a multimodal one.

    None if there is no other model inside, or transformers has no class for the whole.
    """
    from transformers import CONFIG_MAPPING

    inner = whole.get("text_config")
    if not isinstance(inner, dict) or whole.get("model_type") not in CONFIG_MAPPING:
        return None
    with quiet(), foreign(f"transformers cannot load {folder}", "correct its config.json"):
        resolved: Any = parsed(whole, str(folder / "config.json"))
        inner = resolved.get_text_config(decoder=True)
        config: Config = json.loads(inner.to_json_string(use_diff=True))
        # A whole model stops at the tokens that its own config names.
        config |= {key: whole[key] for key in TOKENS if whole.get(key) is not None}
    # The class of the whole model decides whether embeddings are tied, if it has the key.
    tied = getattr(resolved, "tie_word_embeddings", config.get("tie_word_embeddings"))
    config["tie_word_embeddings"] = bool(tied)
    dtype = whole.get("dtype", whole.get("torch_dtype"))
    return {**config, "dtype": dtype} if dtype else config
