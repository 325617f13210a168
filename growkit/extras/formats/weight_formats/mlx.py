"""Folders of mlx-lm with stacked experts; without these, the files are like those of transformers.

https://github.com/ml-explore/mlx-lm
"""

from collections.abc import Mapping, Sequence

from growkit.base.errors import InputError
from growkit.base.tensors import Config
from growkit.checkpoint.folder import Folder
from growkit.checkpoint.formats.transformers import Transformers
from growkit.checkpoint.layout import Held

MARK = b'"format":"mlx"'
"""In the first bytes of the header that mlx writes."""

PEEK = 64
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class MLX(Transformers):
    """See ``Format``."""

    title, name, program = "MLX", "mlx", "mlx"
    models = ("gemma", "gemma2", "gemma3_text", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    rank = -1  # these files look like those of transformers
    read_by_transformers = False

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``; quantised models are refused."""
        if not (folder.names("model*.safetensors") and (files := super().files(folder))):
            return {}
        with folder.open(min(files)) as stream:
            if MARK not in stream.read(PEEK):
                return {}
        config = folder.json("config.json") if folder.find("config.json") else {}
        if config.get("quantization"):
            raise InputError(
                f"{folder} was quantised by MLX, whose blocks growkit does not read; give the "
                "model that it was made from, or dequantise it (mlx_lm.convert --dequantize)"
            )
        names = (name for file in self.open(folder, [*files]) for name in file.tensors)
        return files if any(".switch_mlp." in name for name in names) else {}

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        layer = "model.layers.{layer}."
        names = {
            f"{layer}mlp.switch_mlp.{kind}": f"{layer}mlp.experts.{{expert}}.{kind}"
            for kind in MIXTRAL
        } | {
            f"{layer}block_sparse_moe.switch_mlp.{kind}": (
                f"{layer}block_sparse_moe.experts.{{expert}}.{name}"
            )
            for kind, name in MIXTRAL.items()
        }
        return [
            *(Held(f"{stored}.weight", (f"{name}.weight",)) for stored, name in names.items()),
            Held("{name}", ("{name}",)),
        ]


FORMAT = MLX()
