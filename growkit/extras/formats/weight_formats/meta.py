"""Meta's original files of Llama: ``consolidated.NN.pth``, one for each rank, and ``params.json``.

Rows of queries and keys that rotate as a pair are neighbours. A rank has a part of the rows or of
the columns of every matrix, and all norms (https://github.com/meta-llama/llama-models).
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from growkit.base.errors import InputError
from growkit.base.lazy import Tensor, torch
from growkit.base.tensors import TORCH_NAMES, Config, TensorInfo, full, main_dtype
from growkit.base.torch_internals import stored_dtypes
from growkit.extras.formats.layout import ForeignSettings, Held, LaidOut
from growkit.extras.formats.torch_archive import archive_shard
from growkit.model.checkpoint.folder import Folder
from growkit.model.checkpoint.format import MAX_DIGITS, Output
from growkit.model.checkpoint.weight_file import (
    StoredWeights,
    TorchFile,
    WeightFile,
    explain_damage,
    open_saved,
    plain_tensors,
)
from growkit.model.model import Model

FILE = re.compile(r"consolidated\.(\d\d)\.pth")
CONFIG = "params.json"
KIND = TorchFile("weights of Llama", "copy it again")
NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "layers.{layer}.attention_norm": "model.layers.{layer}.input_layernorm",
    "layers.{layer}.ffn_norm": "model.layers.{layer}.post_attention_layernorm",
    "layers.{layer}.attention.wq": "model.layers.{layer}.self_attn.q_proj",
    "layers.{layer}.attention.wk": "model.layers.{layer}.self_attn.k_proj",
    "layers.{layer}.attention.wv": "model.layers.{layer}.self_attn.v_proj",
    "layers.{layer}.attention.wo": "model.layers.{layer}.self_attn.o_proj",
    "layers.{layer}.feed_forward.w1": "model.layers.{layer}.mlp.gate_proj",
    "layers.{layer}.feed_forward.w2": "model.layers.{layer}.mlp.down_proj",
    "layers.{layer}.feed_forward.w3": "model.layers.{layer}.mlp.up_proj",
}
COLUMNS = ("wo.weight", "w2.weight")
"""Ends of the names of matrices of which a rank has some columns."""


class Ranks(StoredWeights):
    """The tensors of all ranks, put together.

    Args:
        files: the file of every rank, in order.
        hidden: width of the model: an embedding with fewer columns is divided by columns.

    Attributes:
        tied: whether the head has the numbers of the embedding.
    """

    def __init__(self, files: Sequence[WeightFile], hidden: int) -> None:
        self._files, self.path = files, files[0].path
        self.paths = [path for file in files for path in file.paths]
        self._along: dict[str, int | None] = {}
        infos = {}
        for name in dict.fromkeys(name for file in files for name in file.tensors):
            if name == "rope.freqs":  # the class computes them
                continue
            info, *others = (file.tensors.get(name) for file in files)
            if info is None or any(other != info for other in others):
                raise ValueError(f"tensor {name} is not in all of them with the same shape")
            narrow = name == "tok_embeddings.weight" and info.shape[1:] < (hidden,)
            along = int(narrow or name.endswith(COLUMNS)) if len(info.shape) > 1 else None
            self._along[name] = along if len(files) > 1 else None
            shape = list(info.shape)
            if self._along[name] is not None:
                shape[along or 0] *= len(files)
            infos[name] = TensorInfo(tuple(shape), info.dtype)
        self.tensors = infos
        head = files[0].places.get("output.weight")
        self.tied = head in (None, files[0].places.get("tok_embeddings.weight"))

    def cuts(self, name: str) -> int:
        """See ``Weights``."""
        return min(file.cuts(name) for file in self._files)

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``Weights``.

        Raises:
            InputError: the ranks have different norms.
        """
        along = self._along[name]
        if along is None:
            parts = [file.read(name, *where) for file in self._files]
            if not all(part.equal(parts[0]) for part in parts):
                raise InputError(
                    f"tensor {name} is not the same in all of {self.path.parent}; copy them again"
                )
            return parts[0]
        asked = full(self.tensors[name].shape, where)
        size, parts = self._files[0].tensors[name].shape[along], []
        for rank, file in enumerate(self._files):
            span = [
                max(0, min(edge - rank * size, size))
                for edge in (asked[along].start, asked[along].stop)
            ]
            part = [*asked]
            part[along] = slice(*span)
            parts.append(file.read(name, *part))
        with stored_dtypes():  # strict float64 must not apply
            return torch.cat(parts, along)


class Meta(LaidOut):
    """See ``Format``."""

    title, name, models = "Meta's original files", "meta", ("llama",)
    complete = False  # it has no settings of training, nor ids of tokens, nor a longest context
    beside = (CONFIG,)

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        names = [name for name in folder.names("consolidated.*.pth") if FILE.fullmatch(name)]
        if not names or folder.find(CONFIG) is None:
            return {}
        expected = [f"consolidated.{rank:02}.pth" for rank in range(len(names))]
        if names != expected:
            missing = min({*expected} - {*names})
            raise InputError(f"{folder} has {len(names)} files of Llama, but no {missing}; copy it")
        return dict.fromkeys(names, ())

    def open(self, folder: Folder, names: Sequence[str]) -> Sequence[StoredWeights]:
        """See ``Format``."""
        files = [open_saved(folder, name, KIND)[1](plain_tensors) for name in names]
        hidden = folder.json(CONFIG, MAX_DIGITS).get("dim")
        with explain_damage(
            f"the files of Llama in {folder} do not fit together", "copy them again"
        ):
            ranks = Ranks(files, hidden if type(hidden) is int else 0)
        settings = folder.json(CONFIG, MAX_DIGITS)
        if settings.get("use_scaled_rope") and "rope_scaling_factor" not in settings:
            ranks.note = (
                f"{folder.path / CONFIG} does not say by which factor rotary frequencies are "
                "scaled, so growkit guesses it by the number of layers, as in Llama 3.1 (8, from "
                "32 layers on) and 3.2 (32); add rope_scaling_factor if it is another one"
            )
        return [ranks]

    def config(self, folder: Folder, files: Sequence[Any]) -> Config:
        """See ``Format``."""
        (file,) = files
        where, stored = folder.path / CONFIG, folder.json(CONFIG, MAX_DIGITS)
        with explain_damage(f"{where} cannot be used", "copy the folder again"):
            return _config(ForeignSettings(stored), file)

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        heads = {"wq": "heads", "wk": "kv_heads"}
        tied = config.get("tie_word_embeddings")
        return [
            *([Held("output.weight", ())] if tied else []),  # the same numbers as the embedding
            *(
                Held(f"{stored}.weight", (f"{name}.weight",)).with_pairs(heads.get(stored[-2:], ""))
                for stored, name in NAMES.items()
            ),
        ]

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``; the file of one rank."""
        tensors = self.from_transformers(model, config)
        tied = {"output.weight": "tok_embeddings.weight"} if config["tie_word_embeddings"] else {}
        shard = archive_shard("consolidated.00.pth", tensors.tensors, tied)
        settings = f"{json.dumps(_settings(config))}\n"
        return Output(tensors, [shard], {CONFIG: settings.encode()})


def _settings(config: Config) -> dict[str, Any]:
    """Meta's settings for a config of transformers, the reverse of ``_config``."""
    rope, usual = config["rope_parameters"], int(8 * config["hidden_size"] / 3)
    settings = {
        "dim": config["hidden_size"],
        "n_layers": config["num_hidden_layers"],
        "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
        "norm_eps": config["rms_norm_eps"],
        "rope_theta": rope["rope_theta"],
        "multiple_of": 1,
        "ffn_dim_multiplier": (config["intermediate_size"] + 0.5) / usual,  # it rounds down
        "use_scaled_rope": rope["rope_type"] == "llama3",
    }
    return settings | ({"rope_scaling_factor": rope["factor"]} if "factor" in rope else {})


def _config(settings: ForeignSettings, file: Ranks) -> Config:
    """The config of transformers for the settings of Llama.

    Raises:
        ValueError: a setting is missing or not known.
    """
    heads, layers = settings.take("n_heads"), settings.take("n_layers")
    rope = {"rope_type": "default", "rope_theta": float(settings.take("rope_theta", 10000.0))}
    if settings.take(
        "use_scaled_rope", False, bool
    ):  # Llama 3.2, which has fewer layers, is scaled more than Llama 3.1
        factor = settings.take("rope_scaling_factor", 8.0 if layers >= 32 else 32.0)
        rope |= {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = {
        "model_type": "llama",
        "hidden_size": settings.take("dim"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": settings.take("n_kv_heads", heads),
        "rms_norm_eps": settings.take("norm_eps"),
        "rope_parameters": rope,
    }
    if missing := [key for key, value in config.items() if value is None]:
        raise ValueError(f"the setting for {missing[0]} is missing")
    config["intermediate_size"] = file.tensors["layers.0.feed_forward.w1.weight"].shape[0]
    config["vocab_size"] = file.tensors["tok_embeddings.weight"].shape[0]
    settings.expect("vocab_size", config["vocab_size"], -1)
    settings.ignore("multiple_of", "ffn_dim_multiplier", "max_batch_size", "max_seq_len", "model")
    settings.finish()
    config |= {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
    config["head_dim"] = config["hidden_size"] // max(heads, 1)
    config["tie_word_embeddings"] = file.tied
    return config | {"dtype": TORCH_NAMES[main_dtype(file.tensors)]}


FORMAT = Meta()
