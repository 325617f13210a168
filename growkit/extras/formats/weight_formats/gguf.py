"""GGUF, the format of llama.cpp: a file with the settings of a model and its tensors, or several.

The header is read here, within limits, since the library ``gguf`` maps the file. The library
computes the numbers of quantised tensors. For each architecture, this file lists the names of
settings and tensors, and what llama.cpp computes whatever the file says (``src/models`` in
https://github.com/ggml-org/llama.cpp). A setting that is not known here is refused, as it may
change what the model computes.
"""

import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from math import pi, prod
from typing import IO, Any

from growkit.base.errors import InputError, reason
from growkit.base.lazy import Tensor, np, torch
from growkit.base.names import listed
from growkit.base.tensors import TORCH_NAMES, Config, TensorInfo, cut, full, main_dtype
from growkit.base.torch_internals import stored_dtypes
from growkit.extras.formats.gguf_tokenizer import tokenizer_settings
from growkit.extras.formats.layout import ForeignSettings, Held, LaidOut, row_sizes
from growkit.model.checkpoint.folder import PART, Folder, State, read, state_of
from growkit.model.checkpoint.format import Output
from growkit.model.checkpoint.scratch import temporary
from growkit.model.checkpoint.weight_file import Place, WeightFile, check_header, explain_damage
from growkit.model.checkpoint.writing import Shard
from growkit.model.model import Model

MAX_HEADER = 1 << 27
"""Limit for the header, in bytes; a vocabulary of 262,144 tokens takes a tenth of it."""

MAX_COUNT = 1 << 17
"""Limit for the tensors of a file, and for its settings."""

MAX_LIST = 64
"""Longest list of numbers that is kept; longer ones, and those of texts, are skipped."""

ALIGNMENT = 32
"""Alignment of tensors that llama.cpp assumes, in bytes."""

MAX_ALIGNMENT = 1 << 16
"""Limit for the alignment of tensors, in bytes."""

NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""``struct`` format of every kind of number."""

TEXT, LIST = 8, 9
"""Kinds of values that are not numbers."""

DTYPES = {0: "F32", 1: "F16", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 30: "BF16"}
"""Safetensors name of every type that is not quantised."""

FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies."""

REMEDY = "convert the model again with a program that growkit knows, or give its original folder"


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp.

    Attributes:
        model_type: of transformers.
        layers: the tensors of a layer, by their names without prefix and suffix, and those of
            transformers.
        keys: names of settings, by config keys, in addition to ``KEYS``.
        fixed: what llama.cpp computes whatever the file says, from the config so far.
        interleaved: whether rows of queries and keys that rotate as a pair are neighbours.
        offset: number added to the weights of norms.
        window: the period of layers without a window, if the others have one.
        local_theta: the default base of the rotary frequencies of layers with a window, if they
            have another one.
        biased: whether some models have biases of attention, according to their configs.
        experts: whether there are experts.
    """

    model_type: str
    layers: Mapping[str, str]
    keys: Mapping[str, str] = field(default_factory=dict)
    fixed: Callable[[Config], Config] = lambda config: {}
    interleaved: bool = False
    offset: float = 0.0
    window: int = 0
    local_theta: float = 0.0
    biased: bool = False
    experts: bool = False

    def tensors(self) -> list[Held]:
        """The layout of all tensors."""
        names = {
            "token_embd": "model.embed_tokens",
            "output_norm": "model.norm",
            "output": "lm_head",
            **{f"blk.{{layer}}.{k}": f"model.layers.{{layer}}.{v}" for k, v in self.layers.items()},
        }
        tensors = [Held(FACTORS, ())]
        for stored, name in names.items():
            offset = self.offset if stored.endswith("norm") else 0.0
            heads = {"attn_q": "heads", "attn_k": "kv_heads"}.get(stored.rpartition(".")[2], "")
            wide = "F32" if stored.endswith(WIDE) else ""  # as llama.cpp computes with them
            tensors += [
                Held(f"{stored}.{end}", (f"{name}.{end}",), offset=offset, dtype=dtype).with_pairs(
                    heads if self.interleaved else ""
                )
                for end, dtype in (("weight", wide), ("bias", "F32"))
            ]
        return tensors


WIDE = ("norm", "ffn_gate_inp")
"""Ends of the names of weights that are always in float32."""

KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}

ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
LLAMA = {**ATTENTION, "ffn_norm": "post_attention_layernorm", **MLP}
GEMMA = {
    **ATTENTION,
    **MLP,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
SPARSE = {
    **ATTENTION,
    **HEAD_NORMS,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    **{f"{stored}_exps": f"mlp.experts.{{expert}}.{name[4:]}" for stored, name in MLP.items()},
}
MIXTRAL = {
    **ATTENTION,
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{expert}.w1",
    "ffn_down_exps": "block_sparse_moe.experts.{expert}.w2",
    "ffn_up_exps": "block_sparse_moe.experts.{expert}.w3",
}
SILU = {"hidden_act": "silu"}
GELU = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}


def _scale(layers: int) -> Callable[[Config], Config]:
    """The scale of Gemma's attention; the number of layers of the model that has another."""

    def fixed(config: Config) -> Config:
        heads, own = config["num_attention_heads"], config["num_hidden_layers"] == layers
        scalar = config["hidden_size"] // heads if own else config["head_dim"]
        return {**GELU, "query_pre_attn_scalar": scalar}

    return fixed


SCALING = {
    "factor": "rope.scaling.factor",
    "original_max_position_embeddings": "rope.scaling.original_context_length",
    "beta_fast": "rope.scaling.yarn_beta_fast",
    "beta_slow": "rope.scaling.yarn_beta_slow",
    "attention_factor": "rope.scaling.yarn_attn_factor",
}
"""Settings of scaled rotary frequencies, by their keys in ``rope_parameters``."""


ARCHITECTURES: dict[str, tuple[Architecture, ...]] = {
    "llama": (
        Architecture(
            "mixtral",
            MIXTRAL,
            fixed=lambda config: {**SILU, "sliding_window": None},
            interleaved=True,
            experts=True,
        ),
        Architecture("llama", LLAMA, {}, lambda config: SILU, interleaved=True, biased=True),
    ),
    "qwen2": (
        Architecture(
            "qwen2",
            LLAMA,
            fixed=lambda config: {**SILU, "use_sliding_window": False},
        ),
    ),
    "qwen3": (
        Architecture(
            "qwen3",
            {**LLAMA, **HEAD_NORMS},
            fixed=lambda config: {**SILU, "use_sliding_window": False},
            biased=True,
        ),
    ),
    "qwen3moe": (
        Architecture(
            "qwen3_moe",
            SPARSE,
            {"moe_intermediate_size": "expert_feed_forward_length"},
            lambda config: {
                **SILU,
                "use_sliding_window": False,
                "norm_topk_prob": True,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            },
            biased=True,
            experts=True,
        ),
    ),
    "gemma": (
        Architecture(
            "gemma",
            LLAMA,
            fixed=lambda config: {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False},
            offset=1.0,
        ),
    ),
    "gemma2": (
        Architecture(
            "gemma2",
            GEMMA,
            {
                "attn_logit_softcapping": "attn_logit_softcapping",
                "final_logit_softcapping": "final_logit_softcapping",
            },
            _scale(46),
            offset=1.0,
            window=2,
        ),
    ),
    "gemma3": (
        Architecture(
            "gemma3_text",
            {**GEMMA, **HEAD_NORMS},
            {"final_logit_softcapping": "final_logit_softcapping"},
            _scale(62),
            offset=1.0,
            window=6,
            local_theta=10000.0,
        ),
    ),
}
"""By llama.cpp's name; of several, the first has experts."""

BY_TYPE = {
    one.model_type: (name, one) for name, several in ARCHITECTURES.items() for one in several
}
"""llama.cpp's name and the architecture, by type in transformers."""

EXPERTS = ("num_local_experts", "num_experts")
"""Keys of the number of experts, of which a config has one."""

OPTIONAL = ("head_dim", "attn_logit_softcapping", "final_logit_softcapping")
"""Keys that a file may lack: the class computes them, or has none."""


class GGUFFile(WeightFile):
    """A file of tensors, of which quantised ones are computed from their blocks.

    Args:
        folder: folder of the file.
        name: name of the file in the folder.
        state: state of the file when its header was read.
        places: location of every tensor, by name; of a quantised one, of its bytes.
        quantised: numbers of the types of quantised tensors, by name.
        settings: the settings in the file.
    """

    def __init__(
        self,
        folder: Folder,
        name: str,
        state: State,
        places: Mapping[str, Place],
        quantised: Mapping[str, int],
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(folder, name, state, places)
        self.quantised, self.settings, self.in_blocks = quantised, settings, quantised
        computed = {}
        for tensor, kind in quantised.items():
            *rows, stored = places[tensor].info.shape
            elements, size, _ = _block(kind, self.path)
            computed[tensor] = TensorInfo((*rows, stored // size * elements), "F32")
        self.tensors = {**self.tensors, **computed}

    def cuts(self, name: str) -> int:
        """See ``WeightFile``; blocks are parts of rows."""
        cuts = super().cuts(name)
        return min(cuts, len(self.tensors[name].shape) - 1) if name in self.quantised else cuts

    def read(self, name: str, *where: slice | None) -> Tensor:
        """See ``WeightFile``."""
        if name not in self.quantised:
            return super().read(name, *where)
        shape = self.tensors[name].shape
        *rows, columns = full(shape, where)
        stored = super().read(name, *rows)
        # Strict float64 must not apply, and whoever reads the numbers refuses those not finite.
        with stored_dtypes(), np.errstate(all="ignore"):
            numbers = _library("quants").dequantize(stored.numpy(), self.quantised[name])
            return cut(
                torch.from_numpy(np.ascontiguousarray(numbers)), (*[None] * len(rows), columns)
            )


@lru_cache(maxsize=64)
def _block(kind: int, path: Any) -> tuple[int, int, str]:
    """Number of elements and bytes of a block of a quantised type, and its name.

    Raises:
        InputError: the library is missing, or does not know the type.
    """
    if find_spec("gguf") is None:
        raise InputError(
            f"{path} has quantised tensors, which the library gguf computes; install growkit[gguf]"
            ", or give a file in F32, F16 or BF16"
        )
    known = {number.value: number for number in _library("constants").GGMLQuantizationType}
    try:
        elements, size = _library("constants").GGML_QUANT_SIZES[known[kind]]
        _library("quants").dequantize(np.zeros((1, size), np.uint8), known[kind])
    except (KeyError, NotImplementedError):
        raise InputError(
            f"{path} has tensors of the type {known[kind].name if kind in known else kind}, which "
            "the installed library gguf does not compute; update it, or give a file in another type"
        ) from None
    return elements, size, known[kind].name


def _library(module: str) -> Any:
    """A module of the library ``gguf``, which is optional."""
    return import_module(f"gguf.{module}")


class GGUF(LaidOut):
    """See ``Format``; the file may be given itself, or be the only one in a folder."""

    title, name, models = "GGUF", "gguf", BY_TYPE
    self_contained = True
    complete = False  # it has no settings of training, and no config of a tokenizer

    def files(self, folder: Folder) -> Mapping[str, Sequence[str]]:
        """See ``Format``."""
        names = [name for name in folder.names("*.gguf") if "/" not in name]
        if len({PART.sub("", name) for name in names}) > 1:
            raise InputError(
                f"{folder} has {len(names)} GGUF files ({names[0]} and others); give one of them"
            )
        return dict.fromkeys(names, ())

    def open(self, folder: Folder, names: Sequence[str]) -> Sequence[GGUFFile]:
        """See ``Format``."""
        files = [_open(folder, name) for name in names]
        kinds = {kind for file in files for kind in file.quantised.values()}
        if blocks := sorted(_block(kind, files[0].path)[2] for kind in kinds):
            files[
                0
            ].note = f"{folder} has {listed(blocks)} blocks, read as the numbers they stand for"
        return files

    def config(self, folder: Folder, files: Sequence[Any]) -> Config:
        """See ``Format``."""
        with explain_damage(f"the settings of {files[0].path} cannot be used", REMEDY):
            _check_parts(files)
            return _config(files[0].settings, {key: file for file in files for key in file.tensors})

    def layout(self, config: Config) -> Sequence[Held]:
        """See ``Format``."""
        return BY_TYPE[config["model_type"]][1].tensors()

    def output(self, model: Model, config: Config, source: Folder, shard_bytes: int) -> Output:
        """See ``Format``; one file."""
        if find_spec("gguf") is None:
            raise InputError("GGUF files are written with the library gguf; install growkit[gguf]")
        name, known = BY_TYPE[config["model_type"]]
        tensors = self.from_transformers(model, config)
        for stored, info in tensors.tensors.items():
            if info.dtype not in WRITTEN:
                raise InputError(
                    f"{tensors.where(stored)} has {info.dtype} numbers, which llama.cpp does not "
                    "compute with; pass --dtype float32, float16 or bfloat16"
                )
        settings = {f"{name}.{key}": v for key, v in _settings(config, name, known).items()}
        warnings = []
        try:
            tokenizer = tokenizer_settings(source, config)
        except ValueError as error:
            tokenizer, warnings = {"ggml.model": "none"}, [NO_TOKENIZER.format(why=reason(error))]
        settings |= {f"tokenizer.{key}": value for key, value in tokenizer.items()}
        shard = _shard(name, settings, _constants(config), tensors.tensors)
        return Output(tensors, [shard], {}, warnings)


# Writing


WRITTEN = ("F32", "F16", "BF16")
"""Safetensors names of the types that are written."""

FILE = "model.gguf"

NO_TOKENIZER = (
    "the GGUF file has no tokenizer ({why}), so programs compute with ids, but do not read text; "
    "for a file that does, convert with llama.cpp's convert_hf_to_gguf.py, and verify that"
)


def _settings(
    config: Config, name: str, architecture: Architecture
) -> dict[str, int | float | str]:
    """The settings of a file, by name without that of the architecture; see ``_config``."""
    keys = {**KEYS, **architecture.keys}
    settings = {stored: config[key] for key, stored in keys.items() if config.get(key) is not None}
    width = row_sizes(config)["head_dim"]
    settings |= dict.fromkeys(("attention.key_length", "attention.value_length"), width)
    settings |= {"rope.dimension_count": width, "vocab_size": config["vocab_size"]}
    if architecture.experts:
        settings["expert_count"] = next(config[key] for key in EXPERTS if key in config)
        settings["expert_used_count"] = config["num_experts_per_tok"]
    rope = config["rope_parameters"]
    if architecture.window and config.get("sliding_window"):
        settings["attention.sliding_window"] = config["sliding_window"]
    if architecture.local_theta:
        settings["rope.freq_base_swa"] = float(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    settings["rope.freq_base"] = float(rope["rope_theta"])
    scaled = {stored: rope[key] for key, stored in SCALING.items() if rope.get(key) is not None}
    if rope["rope_type"] in ("linear", "yarn"):
        settings |= {"rope.scaling.type": rope["rope_type"], **scaled}
    return settings


def _constants(config: Config) -> dict[str, Tensor]:
    """Tensors that follow from the config."""
    rope = config["rope_parameters"]
    if rope.get("rope_type") != "llama3":
        return {}
    width = row_sizes(config)["head_dim"]
    waves = 2 * pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = (rope["original_max_position_embeddings"] / waves - low) / (high - low)
    smooth = smooth.clip(0, 1)
    divisors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return {FACTORS: torch.from_numpy(divisors.astype(np.float32))}


def _shard(
    name: str,
    settings: Mapping[str, Any],
    constants: Mapping[str, Tensor],
    tensors: Mapping[str, TensorInfo],
) -> Shard:
    """Plan the file; the constants are part of its frame."""
    types = {dtype: number for number, dtype in DTYPES.items()}
    kinds = _library("constants")
    with temporary("archive") as folder:
        writer = _library("gguf_writer").GGUFWriter(folder / FILE, name)
        for key, value in settings.items():
            kind = kinds.GGUFValueType.get_type(value)
            kind = kinds.GGUFValueType.UINT32 if type(value) is int else kind
            writer.add_key_value(key, value, kind)
        writer.add_quantization_version(kinds.GGML_QUANT_VERSION)
        every = {key: TensorInfo.of_torch(one.shape, one.dtype) for key, one in constants.items()}
        every |= tensors
        for key, info in every.items():
            kind = kinds.GGMLQuantizationType(types[info.dtype])
            writer.add_tensor_info(key, info.shape, np.dtype(np.float32), info.bytes, kind)
        for part in ("header", "kv_data", "ti_data"):
            getattr(writer, f"write_{part}_to_file")()
        writer.close()
        frame = {0: (folder / FILE).read_bytes()}
    offsets, end = dict[str, int](), len(frame[0])
    for key, info in every.items():
        frame[end] = frame.get(end, b"") + bytes(-end % ALIGNMENT)
        end += -end % ALIGNMENT
        offsets[key] = end
        if key in constants:
            frame[end] = constants[key].numpy().tobytes()
        end += info.bytes
    frame[end] = bytes(-end % ALIGNMENT)
    return Shard(FILE, tensors, frame, {key: offsets[key] for key in tensors})


# The header


Shape = tuple[int, ...]


class _Header:
    """Reads the header of a file, and no more than a limit of it."""

    def __init__(self, stream: IO[bytes], path: Any) -> None:
        self._stream, self._path, self.at = stream, path, 0

    def take(self, count: int) -> bytes:
        self.at += count
        if self.at > MAX_HEADER:
            raise ValueError(f"its header has more than {MAX_HEADER:,} bytes")
        data = read(self._stream, count, self._path)
        if len(data) < count:
            raise ValueError("its header is not complete")
        return data

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        return struct.unpack(form, self.take(struct.calcsize(form)))

    def text(self) -> str:
        (length,) = self.numbers("Q")
        return self.take(length).decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A value of a kind; None for a list that is not kept."""
        if kind == TEXT:
            return self.text()
        if kind in NUMBERS:
            (number,) = self.numbers(NUMBERS[kind])
            # The shortest decimal number that float32 rounds to this one: 1e-06, say.
            return float(str(np.float32(number))) if NUMBERS[kind] == "f" else number
        if kind != LIST or depth:
            raise ValueError(f"a setting is of kind {kind}")
        inner, count = self.numbers("IQ")
        if inner in NUMBERS and count > MAX_LIST:
            self.take(count * struct.calcsize(NUMBERS[inner]))
            return None
        if inner in NUMBERS:
            return [self.value(inner) for _ in range(count)]
        for _ in range(count):
            if inner != TEXT:
                raise ValueError(f"a list in its settings has entries of kind {inner}")
            self.take(self.numbers("Q")[0])
        return None


def _open(folder: Folder, name: str) -> GGUFFile:
    """Read the header of a file.

    Raises:
        InputError: it is damaged, or has quantised tensors that the library does not compute.
    """
    path = folder.path / name
    with (
        folder.open(name) as stream,
        explain_damage(f"{path} is not a whole GGUF file", "it may be truncated, copy it again"),
    ):
        state, header = state_of(os.fstat(stream.fileno())), _Header(stream, path)
        magic, version, tensors, count = header.numbers("4sIQQ")
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it does not begin with GGUF and version 2 or 3, little-endian")
        if max(tensors, count) > MAX_COUNT:
            raise ValueError(f"it has more than {MAX_COUNT:,} tensors or settings")
        settings = dict[str, Any]()
        for _ in range(count):
            key = header.text()
            if key in settings:
                raise ValueError(f"setting {key[:80]!r} is there twice")
            settings[key] = header.value(*header.numbers("I"))
        entries = [_entry(header) for _ in range(tensors)]
        alignment = settings.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or not 0 < alignment <= MAX_ALIGNMENT:
            raise ValueError("its alignment is impossible")
        start = -(-header.at // alignment) * alignment
        places = {entry[0]: _place(path, start, *entry) for entry in entries}
        if len(places) < len(entries):
            raise ValueError("two of its tensors have the same name")
        edges = sorted((place.begin, place.begin + place.info.bytes) for place in places.values())
        if any(end > after for (_, end), (after, _) in pairwise(edges)):
            raise ValueError("its tensors overlap")
        if edges and edges[-1][1] > state[3]:
            raise ValueError("its tensors are not complete")
    quantised = {tensor: kind for tensor, _, kind, _ in entries if kind not in DTYPES}
    return GGUFFile(folder, name, state, places, quantised, settings)


def _place(path: Any, start: int, name: str, shape: Shape, kind: int, offset: int) -> Place:
    """Locate a tensor, or the bytes of a quantised one."""
    info = TensorInfo(shape, DTYPES.get(kind, "U8"))
    if kind not in DTYPES:
        elements, size, _ = _block(kind, path)
        if not shape or 0 in shape or shape[-1] % elements:
            raise ValueError(f"the rows of tensor {name[:80]!r} are not a multiple of a block")
        info = TensorInfo((*shape[:-1], shape[-1] // elements * size), "U8")
    check_header(path, name, info)
    return Place(start + offset, info)


def _entry(header: _Header) -> tuple[str, Shape, int, int]:
    """Name, shape, type and offset of a tensor; the file has the last dimension first."""
    name, (dimensions,) = header.text(), header.numbers("I")
    if dimensions > 4:
        raise ValueError(f"tensor {name[:80]!r} has {dimensions} dimensions")
    shape = header.numbers(f"{dimensions}Q")[::-1]
    if prod(max(size, 1) for size in shape) > 1 << 62:
        raise ValueError(f"tensor {name[:80]!r} has an impossible shape")
    return name, shape, *header.numbers("IQ")


# The settings


def _check_parts(files: Sequence[GGUFFile]) -> None:
    """Check that these are all parts of a model, in their order.

    Raises:
        ValueError: one is missing, or is a part of another model.
    """
    for number, file in enumerate(files):
        part, count = (file.settings.get(f"split.{key}") or 0 for key in ("no", "count"))
        if (part, count or 1) != (number, len(files)):
            raise ValueError(
                f"{file.path.name} says that it is file {part} of {count}, counted from 0, but it "
                f"is file {number} of {len(files)} by the names; put all parts next to it"
            )


def _config(contents: Mapping[str, Any], files: Mapping[str, GGUFFile]) -> Config:
    """The config of a model, as transformers has it.

    Args:
        contents: the settings, which the first file has.
        files: the file of every tensor.

    Raises:
        ValueError: a setting is missing, unknown or of another kind.
    """
    kind = contents.get("general.architecture", "")
    if kind not in ARCHITECTURES:
        raise ValueError(f"architecture {kind!r} is none of {', '.join(ARCHITECTURES)}")
    settings = ForeignSettings(contents, f"{kind}.")
    several, experts = ARCHITECTURES[kind], settings.take("expert_count") or None
    architecture = several[0 if experts else -1]
    config: Config = {"model_type": architecture.model_type}
    if architecture.experts:
        config[EXPERTS[0]] = experts
        config["num_experts_per_tok"] = settings.take("expert_used_count", None, int)
    else:
        settings.take("expert_used_count")
    for key, stored in {**KEYS, **architecture.keys}.items():
        config[key] = settings.take(stored)
        if config[key] is None and key not in OPTIONAL:
            raise ValueError(f"{kind}.{stored} is missing")
    width = config["hidden_size"] // max(config["num_attention_heads"], 1)
    config["head_dim"] = config["head_dim"] or width
    tensors = {name: file.tensors[name] for name, file in files.items()}
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise ValueError("token_embd.weight is missing")
    config["vocab_size"] = embedding.shape[0]
    settings.expect("vocab_size", config["vocab_size"])
    settings.expect("attention.value_length", config["head_dim"])
    settings.expect("rope.dimension_count", config["head_dim"])
    config["tie_word_embeddings"] = "output.weight" not in tensors
    if architecture.biased:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    config["dtype"] = TORCH_NAMES[main_dtype(tensors)]
    config |= architecture.fixed(config)
    theta = settings.take("rope.freq_base", 10000.0)
    rope = {"rope_theta": theta, **_scaling(settings.take, files.get(FACTORS), theta)}
    config["rope_parameters"] = rope
    if architecture.window:
        window = settings.take("attention.sliding_window") or None
        config |= _windows(architecture.window, config["num_hidden_layers"], window)
        if architecture.local_theta:
            local = settings.take("rope.freq_base_swa", architecture.local_theta)
            both = {"rope_type": "default", "rope_theta": local}
            config["rope_parameters"] = {"full_attention": rope, "sliding_attention": both}
        else:
            settings.expect("rope.freq_base_swa", theta)
    settings.finish()
    return config


def _windows(period: int, layers: int, window: int | None) -> Config:
    """The attention window of every layer."""
    if layers > MAX_COUNT:
        raise ValueError(f"it has {layers} layers")
    full_or_not = ["full", "sliding" if window else "full"]
    kinds = [f"{full_or_not[(layer + 1) % period != 0]}_attention" for layer in range(layers)]
    return {"layer_types": kinds, **({"sliding_window": window} if window else {})}


def _scaling(take: Callable[..., Any], file: GGUFFile | None, theta: float) -> dict[str, Any]:
    """How rotary frequencies are scaled, with the keys of ``rope_parameters``.

    Args:
        take: see ``ForeignSettings``.
        file: the file with ``FACTORS``, if there are any.
        theta: the base of the frequencies.
    """
    kind, factor = take("rope.scaling.type", None, str), take(SCALING["factor"])
    trained = take(SCALING["original_max_position_embeddings"])
    take("rope.scaling.finetuned", None, bool)
    yarn = {key: take(stored) for key, stored in SCALING.items() if "yarn" in stored}
    stated = {key: value for key, value in yarn.items() if value is not None}
    if file:
        if kind not in (None, "none"):
            raise ValueError(f"it has {FACTORS} and rope scaling {kind}")
        return _llama3(file.read(FACTORS), theta)
    if kind == "yarn":
        trained_with = {"original_max_position_embeddings": trained} if trained else {}
        return {"rope_type": "yarn", "factor": factor, **trained_with, **stated}
    if kind in (None, "none", "linear") and not stated:
        scaled = kind != "none" and factor not in (None, 0, 1)
        return {"rope_type": "linear", "factor": factor} if scaled else {"rope_type": "default"}
    raise ValueError(f"its rope scaling is {kind!r}")


def _llama3(factors: Tensor, theta: float) -> dict[str, Any]:
    """The settings of Llama 3.1 that give these divisors of the rotary frequencies.

    Only the ratios of the two frequency factors and the context before scaling show, so the lower
    factor is 1, as in all published models.
    """
    divisors = factors.double().numpy()
    waves = 2 * pi * theta ** (np.arange(len(divisors)) / len(divisors))
    factor = float(divisors.max(initial=1.0))
    shares = (1 / divisors - 1 / factor) / (1 - 1 / factor) if factor > 1 else divisors * 0
    between = np.flatnonzero((shares > 1e-4) & (shares < 1 - 1e-4))
    high, trained = 4.0, 8192
    if len(between) > 1:
        first, last = between[0], between[-1]
        slope = (shares[first] - shares[last]) / (1 / waves[first] - 1 / waves[last])
        high = 1 + 1 / (slope / waves[first] - shares[first])
        trained = round(slope * (high - 1))
        high = round(high, 3)
    smooth = ((trained / waves - 1) / (high - 1)).clip(0, 1)
    if not np.allclose(1 / ((1 - smooth) / factor + smooth), divisors, rtol=1e-5, atol=0):
        raise ValueError(f"its {FACTORS} are not those of Llama 3.1")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


FORMAT = GGUF()
