"""Models that other programs converted: ``tests/converted_by``, and the sources they are made of.

``python -m tests.converted PROGRAM`` makes the files again, in an environment of the program:
litgpt, mlx, torchtune, torchtitan, megatron or, followed by the folder of its sources and that of
its ``gguf-py``, llama.cpp. The weights of a source follow from their names, without random numbers.
"""

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

FILES = Path(__file__).with_name("converted_by")
SMALL: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32}
SMALL |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SMALL |= {"max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA3, "tie_word_embeddings": True, "head_dim": 8},
    "qwen3": {"head_dim": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
}
MODELS["gemma3_text"]["num_hidden_layers"] = 6
"""Keys of the config by type, beside those of ``SMALL``."""

OTHERS: dict[str, dict[str, Any]] = {"qwen3_moe": {"head_dim": 8, "moe_intermediate_size": 8}}
OTHERS["qwen3_moe"] |= {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
"""Likewise, of types of which only the programs in ``TYPES`` wrote files."""


BLOCKS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 1}
BLOCKS |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
"""Sizes of a model with rows that llama.cpp divides into blocks."""


EXPERTS: dict[str, Any] = {**MODELS["mixtral"], "hidden_size": 64, "intermediate_size": 64}
EXPERTS |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS |= {"num_local_experts": 2}
"""Sizes of a model with rows that MLX divides into blocks."""


def save_source(folder: Path, kind: str, sizes: dict[str, Any] | None = None) -> Path:
    """A source in bfloat16, whose numbers have at most eight bits."""
    config = CONFIG_MAPPING[kind](**{**SMALL, **(sizes or (MODELS | OTHERS).get(kind, {}))})
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for salt, (_, parameter) in enumerate(sorted(model.named_parameters())):
            numbers = (torch.arange(parameter.numel()) * 2654435761 + salt * 104729) >> 11
            vector = parameter.dim() == 1
            filled = (numbers % 61 + 100) / 128 if vector else (numbers % 241 - 120) / 512
            parameter.copy_(filled.view(parameter.shape))
    model.save_pretrained(folder)
    return folder


def llama_cpp(source: Path, out: Path, most: int = 0) -> None:
    """Convert a source with the modules of llama.cpp's converter, without a tokenizer.

    Args:
        source: the folder.
        out: the file, without its suffix.
        most: limit for the tensors of a file, if it is split.
    """
    import conversion
    import gguf

    config = json.loads((source / "config.json").read_text("utf-8"))
    cls: Any = conversion.get_model_class(config["architectures"][0])

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(config["vocab_size"])

    cls.set_vocab = set_vocab
    tokens = {str(token): token for token in range(config["vocab_size"])}
    content = {"added_tokens": [], "model": {"vocab": tokens}}
    (source / "tokenizer.json").write_text(json.dumps(content))
    file, kind = out.with_suffix(".gguf"), gguf.LlamaFileType.MOSTLY_BF16
    cls(source, kind, file, split_max_tensors=most).write()


def quantised(source: Path, out: Path) -> None:
    """Convert a source, round it to blocks as ``llama-quantize`` does, and compute with it."""
    import llama_cpp as program
    import numpy as np
    from safetensors.numpy import save_file

    llama_cpp(source, source / "dense")
    params = program.llama_model_quantize_default_params()
    params.ftype = program.LLAMA_FTYPE_MOSTLY_Q4_K_M
    paths = (str(path).encode() for path in (source / "dense.gguf", out.with_suffix(".q4_k_m")))
    assert program.llama_model_quantize(*paths, params) == 0
    model = program.Llama(str(out.with_suffix(".q4_k_m")), n_ctx=64, logits_all=True)
    ids = [number * 7 % SMALL["vocab_size"] for number in range(48)]
    model.eval(ids)
    tensors = {"ids": np.array(ids), "logits": np.ascontiguousarray(model.scores[:48])}
    about = {"program": "llama.cpp", "dtype": "int8"}
    save_file(tensors, out.with_suffix(".q4_k_m.logits.safetensors"), about)


LITGPT = {
    "llama": "Llama-3.1-8B",
    "qwen3": "Qwen3-0.6B",
    "gemma3_text": "Gemma-3-1b-it",
    "mixtral": "Mixtral-8x7B-v0.1",
}
"""Models whose settings litgpt has, by type."""


def litgpt(source: Path, out: Path) -> None:
    """Convert a source with litgpt's script, which looks a model up by its name."""
    from litgpt.scripts import convert_hf_checkpoint as script

    config = json.loads((source / "config.json").read_text("utf-8"))
    rope, windows = config["rope_parameters"], config.get("sliding_window")
    sizes = {
        "n_embd": config["hidden_size"],
        "n_layer": config["num_hidden_layers"],
        "n_head": config["num_attention_heads"],
        "head_size": config.get("head_dim") or 4,
        "n_query_groups": config["num_key_value_heads"],
        "norm_eps": config["rms_norm_eps"],
        "intermediate_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "padded_vocab_size": config["vocab_size"],
        "n_expert": config.get("num_local_experts", 0),
        "block_size": config["max_position_embeddings"],
        "rope_base": rope.get("full_attention", rope)["rope_theta"],
    }
    if windows:
        local = [int(kind == "sliding_attention") for kind in config["layer_types"]]
        sizes |= {"sliding_window_size": windows, "attention_scores_scalar": 8}
        sizes |= {"sliding_window_indices": local, "rope_indices": local}
    look_up, name = script.Config.from_name, LITGPT[config["model_type"]]
    script.Config.from_name = lambda name: look_up(name, **sizes)
    script.extend_checkpoint_dir = lambda folder: folder
    script.convert_hf_checkpoint(source, model_name=name)
    script.Config.from_name = look_up
    out.with_suffix(".litgpt").mkdir(exist_ok=True)
    for file in ("lit_model.pth", "model_config.yaml"):
        shutil.copy(source / file, out.with_suffix(".litgpt") / file)


def mlx(source: Path, out: Path) -> None:
    """Load a source with mlx-lm, and save it."""
    from mlx_lm.utils import load_model, save_model

    model, _ = load_model(source)
    save_model(out.with_suffix(".mlx"), model)
    for file in ("config.json", "generation_config.json"):
        shutil.copy(source / file, out.with_suffix(".mlx") / file)


def mlx_blocks(source: Path, out: Path) -> None:
    """Round a source to blocks of several kinds with mlx-lm, and dequantise these again."""
    from mlx_lm import utils

    kinds: dict[str, Any] = {
        "q_proj": {"group_size": 32, "bits": 8},
        "k_proj": False,
        "v_proj": {"group_size": 32, "bits": 3},
        "o_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "gate_proj": {"group_size": 32, "bits": 6},
        "up_proj": {"group_size": 32, "bits": 5},
    }
    model, config = utils.load_model(source)
    model, config = utils.quantize_model(
        model, config, 64, 4, quant_predicate=lambda path, _: kinds.get(path.split(".")[-1], True)
    )
    utils.save_model(out.with_suffix(".mlx_blocks"), model)
    utils.save_config(config, out.with_suffix(".mlx_blocks") / "config.json")
    utils.save_model(out.with_suffix(".mlx_numbers"), utils.dequantize_model(model))
    shutil.copy(source / "config.json", out.with_suffix(".mlx_numbers"))


def torchtune(source: Path, out: Path) -> None:
    """Load a source with torchtune, and save it with the names of torchtune."""
    from torchtune.training import checkpointing

    kind = {"llama": "LLAMA3_2", "qwen2": "QWEN2"}[source.name]
    given: Any = {"checkpoint_files": ["model.safetensors"], "model_type": kind}
    given |= {"checkpoint_dir": source, "output_dir": source.with_name("out")}
    state = checkpointing.FullModelHFCheckpointer(**given).load_checkpoint()
    checkpointing.FullModelTorchTuneCheckpointer(**given).save_checkpoint(state, 0)
    saved, folder = source.with_name("out") / "epoch_0", out.with_suffix(".torchtune")
    folder.mkdir(exist_ok=True)
    for file in ("model-00001-of-00001.bin", "config.json", "generation_config.json"):
        shutil.copy(saved / file, folder)


def megatron(source: Path, out: Path) -> None:
    """Load what growkit writes with Megatron-Core on a CPU, compare its logits, and save it.

    Gemma 3 has the modules of Megatron-Bridge, but for those that are not in the files (windows,
    two rotations, the scale of the embedding): its logits are not compared.
    """
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel import RowParallelLinear
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    import growkit

    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    tensor_parallel.get_cuda_rng_tracker = lambda: SimpleNamespace(fork=nullcontext)
    moe_utils.te_general_gemm = None
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", f"file://{source}.store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config, kind = theirs.config, theirs.config.model_type
    experts: dict[str, Any] = {"num_moe_experts": getattr(config, "num_local_experts", None)}
    if experts["num_moe_experts"]:
        experts |= {"moe_router_topk": config.num_experts_per_tok}
        experts |= {"moe_token_dispatcher_type": "allgather"}
    gemma, normed_heads = kind == "gemma3_text", kind in ("qwen3", "gemma3_text")
    of_layers = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=theirs.model.layers[0].self_attn.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        **dict.fromkeys(("gated_linear_unit", "use_cpu_initialization"), True),
        **dict.fromkeys(("add_bias_linear", "gradient_accumulation_fusion"), False),
        **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
        qk_layernorm=normed_heads,
        **experts,
    )
    layers = get_gpt_layer_local_spec(
        experts["num_moe_experts"], qk_layernorm=normed_heads, normalization="RMSNorm"
    )

    class WithNorm(RowParallelLinear):
        def __init__(self, size: int, width: int, **of_linear: Any) -> None:
            super().__init__(size, width, **of_linear)
            self.post_layernorm = torch.nn.RMSNorm(width)

    if gemma:
        layers.submodules.self_attention.submodules.linear_proj = WithNorm
        layers.submodules.mlp.submodules.linear_fc2 = WithNorm
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    model = GPTModel(
        of_layers,
        layers,
        config.vocab_size,
        config.max_position_embeddings,
        parallel_output=False,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
        rope_scaling=rope["rope_type"] == "llama3",
    ).eval()
    growkit.convert(source, source.with_name("own"), "megatron", verify=False)
    state = dist_checkpointing.load(model.sharded_state_dict(), str(source.with_name("own")))
    model.load_state_dict(state)
    ids = torch.arange(config.max_position_embeddings)[None] * 7 % config.vocab_size
    seen = torch.ones(*ids.shape, ids.shape[1], dtype=torch.bool).triu(1)[None]
    if not gemma:
        with torch.no_grad():
            logits = model(ids, torch.arange(ids.shape[1])[None], seen)
            torch.testing.assert_close(logits, theirs(ids).logits, rtol=1e-4, atol=1e-4)
    folder = out.with_suffix(".megatron")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    dist_checkpointing.save(model.bfloat16().sharded_state_dict(), str(folder))
    for file in ("config.json", "generation_config.json"):
        shutil.copy(source / file, folder)


def torchtitan(source: Path, out: Path) -> None:
    """Load what growkit writes with torchtitan, compare its logits, and save it."""
    from torch.distributed import checkpoint
    from torch.nn.attention.flex_attention import create_block_mask
    from torchtitan.models import common, qwen3

    import growkit

    theirs = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = theirs.config
    width, longest, rows = config.hidden_size, config.max_position_embeddings, config.vocab_size
    sizes: dict[str, Any] = {"hidden_dim": config.intermediate_size}
    build = qwen3._build_qwen3_layers
    if experts := getattr(config, "num_local_experts", None):
        sizes = {"num_experts": experts, "top_k": config.num_experts_per_tok}
        sizes |= {"moe_hidden_dim": config.moe_intermediate_size, "moe_comm_backend": "standard"}
        build = qwen3._build_qwen3_moe_layers
    layers = build(
        n_layers=config.num_hidden_layers,
        dim=width,
        n_heads=config.num_attention_heads,
        n_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        rope=common.CosSinRoPE.Config(
            dim=config.head_dim, max_seq_len=longest, theta=config.rope_parameters["rope_theta"]
        ),
        attn_backend="flex",
        **sizes,
    )
    model = qwen3.Qwen3Model.Config(
        dim=width,
        vocab_size=rows,
        norm=qwen3._qwen3_norm(width),
        tok_embeddings=common.Embedding.Config(num_embeddings=rows, embedding_dim=width),
        lm_head=common.Linear.Config(in_features=width, out_features=rows),
        layers=layers,
    ).build()
    growkit.convert(source, source.with_name("own"), "torchtitan", verify=False)
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=source.with_name("own"), no_dist=True)
    model.load_state_dict(state)
    ids = torch.arange(longest)[None] * 7 % rows
    mask = create_block_mask(lambda _b, _h, q, k: q >= k, 1, None, longest, longest, device="cpu")
    with torch.no_grad():
        logits = model(ids, torch.arange(longest)[None], mask)
    limit = 0.05 if experts else 1e-4  # experts are computed in bfloat16
    torch.testing.assert_close(logits, theirs(ids).logits, rtol=limit, atol=limit)
    folder = out.with_suffix(".torchtitan")
    checkpoint.save(model.bfloat16().state_dict(), checkpoint_id=folder, no_dist=True)
    for file in ("config.json", "generation_config.json"):
        shutil.copy(source / file, folder)


PROGRAMS = {"llama.cpp": llama_cpp, "litgpt": litgpt, "mlx": mlx, "torchtune": torchtune}
PROGRAMS |= {"megatron": megatron, "torchtitan": torchtitan}
TYPES = {
    "torchtune": ("llama", "qwen2"),
    "megatron": ("gemma3_text", "llama", "mixtral", "qwen3"),
    "torchtitan": ("qwen3", "qwen3_moe"),
}
"""Types of models of which files of a program are here, if not all of ``MODELS``."""


def main(program: str, *sources: str) -> None:
    sys.path[:0] = [str(Path(folder)) for folder in sources]
    if program == "llama.cpp":
        with TemporaryDirectory() as scratch:
            quantised(save_source(Path(scratch) / "llama", "llama", BLOCKS), FILES / "llama")
            source = save_source(Path(scratch) / "parts", "llama")
            llama_cpp(source, FILES / "llama.parts" / "llama", 8)
    if program == "mlx":
        with TemporaryDirectory() as scratch:
            mlx_blocks(
                save_source(Path(scratch) / "mixtral", "mixtral", EXPERTS), FILES / "mixtral"
            )
    for kind in TYPES.get(program, MODELS):
        with TemporaryDirectory() as scratch:
            PROGRAMS[program](save_source(Path(scratch) / kind, kind), FILES / kind)


if __name__ == "__main__":
    main(*sys.argv[1:])
