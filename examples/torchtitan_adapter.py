"""torchtitan trains a grown Llama that was never written.

Use this adapter in the model's spec instead of ``Llama3StateDictAdapter``. Take sizes, RoPE and the
eps of norms (torchtitan's default differs) from ``GrownStorageReader(recipe).grown.config``. In the
job's checkpoint settings set ``initial_load_in_hf``, ``initial_load_model_only``, and
``initial_load_path`` to the folder of the small model.
"""

from pathlib import Path
from typing import Any

from torchtitan.models.llama3.state_dict_adapter import Llama3StateDictAdapter

from growkit.base.errors import InputError
from growkit.distributed import GrownStorageReader


class GrownLlamaAdapter(Llama3StateDictAdapter):
    """Reads the model that a recipe makes from the folder that torchtitan loads."""

    recipe = Path("recipe.yaml")  # or growkit.json of a proved model, which accepts only its source

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        """Forget the files of the small model: the grown one is saved in others."""
        super().__init__(model_config, hf_assets_path)
        self.fqn_to_index_mapping = None

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> GrownStorageReader:
        """The reader for ``torch.distributed.checkpoint.load``."""
        if from_quantized:
            raise InputError(f"{path} is quantized and cannot be grown; dequantize it first")
        return GrownStorageReader(self.recipe, source=path)
