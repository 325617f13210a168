"""Log-probabilities of models as another program computes them: reading.py PROGRAM FOLDER ...

Runs in an environment of that program, so it imports nothing of this project. ``ids.json`` in a
folder has the tokens; ``read.npz`` there gets the log-probabilities of the token after each, a row
for each token, or ``read.txt`` the reason why the program does not read the model. The output is
the program's version.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


def transformers(folder: Path, ids: list[int]) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model.eval()(input_ids=torch.tensor([ids])).logits[0].double().numpy()


def mlx(folder: Path, ids: list[int]) -> Any:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    return np.array(model(mx.array([ids]))[0].astype(mx.float32), dtype=np.float64)


def llama_cpp(folder: Path, ids: list[int]) -> Any:
    """Read ``model.gguf``; without it, convert the folder first."""
    import llama_cpp

    file = folder / "model.gguf"
    if not file.is_file():
        convert_to_gguf(folder, file)
    precise = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    model = llama_cpp.Llama(
        str(file), n_ctx=512, logits_all=True, verbose=False, n_threads=1, swa_full=True, **precise
    )
    model.eval(ids)
    return model.scores[: len(ids)].astype(np.float64)


def convert_to_gguf(folder: Path, file: Path) -> None:
    """Convert a folder without a tokenizer; ``LLAMA_CPP`` is the folder of the sources."""
    sources = Path(os.environ["LLAMA_CPP"])
    sys.path[:0] = [str(sources / "gguf-py"), str(sources)]
    import conversion
    import gguf

    config = json.loads((folder / "config.json").read_text("utf-8"))
    cls: Any = conversion.get_model_class(config["architectures"][0])

    def set_vocab(self: Any) -> None:
        self._set_vocab_none()
        self.gguf_writer.add_vocab_size(config["vocab_size"])

    cls.set_vocab = set_vocab
    tokens = {str(token): token for token in range(config["vocab_size"])}
    (folder / "tokenizer.json").write_text(
        json.dumps({"added_tokens": [], "model": {"vocab": tokens}})
    )
    cls(folder, gguf.LlamaFileType.ALL_F32, file).write()


def litgpt(folder: Path, ids: list[int]) -> Any:
    import torch
    from litgpt import GPT, Config

    model = GPT(Config.from_file(folder / "model_config.yaml"))
    model.load_state_dict(torch.load(folder / "lit_model.pth", mmap=True))
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]))[0].double().numpy()


def torchtune(folder: Path, ids: list[int]) -> Any:
    """Build the model with the builder of its type, from the config of transformers."""
    import torch
    from torchtune.models import gemma, llama3_1, qwen2

    config = json.loads((folder / "config.json").read_text("utf-8"))
    kind = config["model_type"]
    sizes = {
        "vocab_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": config["num_attention_heads"],
        "num_kv_heads": config["num_key_value_heads"],
        "embed_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "norm_eps": config["rms_norm_eps"],
    }
    rope = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
    if kind == "llama":
        model = llama3_1.llama3_1(**sizes, rope_base=rope, scale_factor=1)
    elif kind == "qwen2":
        model = qwen2.qwen2(
            **sizes, rope_base=rope, tie_word_embeddings=config["tie_word_embeddings"]
        )
    elif kind == "gemma":
        model = gemma.gemma(**sizes, head_dim=config["head_dim"], rope_base=rope)
    else:
        raise LookupError(f"it has no {kind}")
    model.load_state_dict(torch.load(folder / "model-00001-of-00001.bin", mmap=True))
    with torch.no_grad():
        return model.eval()(torch.tensor([ids]))[0].double().numpy()


def vllm(folder: Path, ids: list[int]) -> Any:
    """Run the engine in this process; its kernels for CPUs know heads of 32 and more."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    from vllm import LLM, SamplingParams

    size = json.loads((folder / "config.json").read_text("utf-8"))["vocab_size"]
    model = LLM(
        str(folder), dtype="float32", skip_tokenizer_init=True, max_model_len=256,
        enforce_eager=True, max_logprobs=size, max_num_seqs=1, max_num_batched_tokens=256,
    )  # fmt: skip
    asked = SamplingParams(max_tokens=1, prompt_logprobs=size, detokenize=False)
    (answer,) = model.generate([{"prompt_token_ids": [*ids, 0]}], asked)
    assert answer.prompt_logprobs is not None
    rows = [each for each in answer.prompt_logprobs if each]
    return np.array([[each[token].logprob for token in range(size)] for each in rows])


PROGRAMS: dict[str, tuple[str, Callable[[Path, list[int]], Any]]] = {
    "transformers": ("transformers", transformers),
    "llama.cpp": ("llama_cpp_python", llama_cpp),
    "mlx-lm": ("mlx-lm", mlx),
    "litgpt": ("litgpt", litgpt),
    "torchtune": ("torchtune", torchtune),
    "vllm": ("vllm-cpu", vllm),
}
"""By name: the package that has the version, and the way to compute logits."""


def main(program: str, *folders: str) -> None:
    package, logits_of = PROGRAMS[program]
    sys.stdout.write(f"{version(package)}\n")
    sys.stdout.flush()
    for folder in map(Path, folders):
        try:
            logits = logits_of(folder, json.loads((folder / "ids.json").read_text("utf-8")))
        except Exception as error:  # of the program
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            (folder / "read.txt").write_text(reason, encoding="utf-8")
            continue
        largest = logits.max(-1, keepdims=True)
        log_sum = largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True))
        np.savez(folder / "read.npz", logs=logits - log_sum)


if __name__ == "__main__":
    main(*sys.argv[1:])
