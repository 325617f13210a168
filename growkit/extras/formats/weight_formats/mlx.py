"""Folders of mlx-lm with stacked experts or quantised layers; transformers reads the others itself.

https://github.com/ml-explore/mlx-lm
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from growkit.base.errors import InputError
from growkit.base.names import listed
from growkit.base.tensors import Config
from growkit.extras.formats.layout import Held, LaidOut, row_sizes
from growkit.extras.formats.quantised.mlx_groups import FORMAT as QUANTISED
from growkit.extras.formats.quantised.mlx_groups import STACKED
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import Output
from growkit.model.checkpoint.formats.transformers import Transformers
from growkit.model.families.config_keys import earlier_keys
from growkit.model.model import Model

MARK = b'"format":"mlx"'
"""In the first bytes of the header that mlx writes."""

PEEK = 64
MIXTRAL = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


class MLX(LaidOut, Transformers):
    """See ``Format``."""

    title, name, program, in_recipes = "MLX", "mlx", "mlx", ""
    models = ("gemma", "gemma2", "gemma3_text", "llama", "mixtral", "qwen2", "qwen3", "qwen3_moe")
    rank = -1  # these files look like those of transformers
    read_by_transformers = False

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        if not (folder.names("model*.safetensors") and (files := super().files(folder))):
            return {}
        with folder.open(min(files)) as stream:
            if MARK not in stream.read(PEEK):
                return {}
        names = (name for file in self.open(folder, [*files]) for name in file.tensors)
        own = any(STACKED in name or name.endswith(QUANTISED.suffixes[0]) for name in names)
        return files if own else {}

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``; mlx-lm 0.32 reads settings by the names before transformers 5."""
        files, keys = super().output(model, config, source, shard_bytes), earlier_keys(config)
        if "rope_local_base_freq" in keys and "sliding_window_pattern" not in keys:
            raise InputError(
                f"MLX has full attention in every n-th layer, and layer_types of {source} is "
                "otherwise; convert it to another format"
            )
        if config["model_type"] == "qwen3_moe":  # which mlx-lm does not read without them
            keys |= {"num_experts": config["num_local_experts"]}
            keys |= {"head_dim": row_sizes(config)["head_dim"]}
        return replace(files, config=keys)

    def notes(self, folder: Folder, names: Sequence[str]) -> Iterator[str]:
        """See ``Format``."""
        yield from super().notes(folder, names)
        config = self.config(folder, ())
        if missing := sorted(earlier_keys(config).keys() - config.keys()):
            yield (
                f"config.json in {folder} has no {listed(missing)}, so mlx-lm computes with its "
                "own defaults; copy what rope_parameters says to these keys"
            )

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
            *(
                Held(f"{stored}{end}", (f"{name}{end}",))
                for stored, name in names.items()
                for end in (".weight", *QUANTISED.suffixes[:-1])
            ),
            Held("{name}", ("{name}",)),
        ]


FORMAT = MLX()
