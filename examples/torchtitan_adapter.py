"""torchtitan trains a grown Llama that was never written.

Give this adapter in the model's spec in the place of ``Llama3StateDictAdapter``. Its sizes, the eps
of its norms (torchtitan's default is another than transformers') and its RoPE are those of
``GrownStorageReader(recipe).grown.config``. In the job's checkpoint settings give
``initial_load_in_hf``, ``initial_load_model_only`` and the folder of the small model as
``initial_load_path``.
"""

from pathlib import Path
from typing import Any

from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from growkit.base.errors import InputError
from growkit.distributed import GrownStorageReader


class GrownLlamaAdapter(Llama3StateDictAdapter):
    """Reads what a recipe makes of the folder that torchtitan is to load."""

    recipe = Path("recipe.yaml")  # or growkit.json of a proved model: no other source is taken

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        """Forget in which files the small model lies: the grown one is saved otherwise."""
        super().__init__(model_config, hf_assets_path)
        self.fqn_to_index_mapping = None

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> GrownStorageReader:
        """What torchtitan hands to ``torch.distributed.checkpoint.load``."""
        if from_quantized:
            raise InputError(f"{path} is quantized and cannot be grown; dequantize it first")
        return GrownStorageReader(self.recipe, source=path)
